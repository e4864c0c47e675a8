"""Casts between the dtypes of answers, against torch's, and how many values they changed."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradtap.errors import UsageError
from gradtap.query.cast import DTYPES, SHORT, SIZES, cast, dtype_named

TORCH = {name: getattr(torch, name) for name in SIZES}
PATTERNS = np.arange(65536, dtype=np.uint16)

VALUES = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
    elements={"allow_nan": True, "allow_infinity": True, "allow_subnormal": True},
)


def torchs(values: np.ndarray, dtype: str) -> np.ndarray:
    """torch's cast, as float64, which holds every dtype."""
    return np.asarray(torch.from_numpy(np.ascontiguousarray(values)).to(TORCH[dtype]).double().numpy())


def same_numbers(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal with the sign of zero; NaN equals NaN."""
    numbers = ~np.isnan(left)
    return np.array_equal(left, right, equal_nan=True) and np.array_equal(
        np.signbit(left[numbers]), np.signbit(right[numbers])
    )


@pytest.mark.parametrize("dtype", list(SIZES))
@settings(deadline=None)
@given(values=VALUES)
def test_a_cast_is_torchs(dtype: str, values: np.ndarray) -> None:
    """In every value and without a warning; the count is of those that are not what they were."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, rounded = cast(values, dtype)
    want = torchs(values, dtype).reshape(values.shape)
    wide = found.astype(np.float64)
    assert found.shape == values.shape and found.dtype.name == dtype
    assert same_numbers(wide, want)
    was = values.astype(np.float64)
    assert rounded == np.count_nonzero((want != was) & ~np.isnan(was))


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_every_half_value_survives_widening_and_back(half: str, wide: str) -> None:
    """All 65536 patterns, subnormals and -0 bit for bit, NaN as NaN; none counts as changed."""
    kind = ml_dtypes.bfloat16 if half == "bfloat16" else np.float16
    values = PATTERNS.view(kind)
    widened, first = cast(values, wide)
    back, second = cast(widened, half)
    nan = np.isnan(widened)
    assert first == second == 0
    assert np.array_equal(back.view(np.uint16)[~nan], PATTERNS[~nan]) and np.isnan(back[nan]).all()


@pytest.mark.parametrize(("source", "target"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_the_half_dtypes_do_not_hold_each_other(source: str, target: str) -> None:
    """Of the same size, yet values change between them and are counted."""
    values = PATTERNS.view(ml_dtypes.bfloat16 if source == "bfloat16" else np.float16)
    found, rounded = cast(values, target)
    was, now = values.astype(np.float32), found.astype(np.float32)
    assert rounded == np.count_nonzero((was != now) & ~np.isnan(was)) > 10000


def test_the_same_dtype_is_the_same_array() -> None:
    """Nothing is copied where nothing changes."""
    values = np.zeros(3, np.float32)
    assert cast(values, "float32")[0] is values


def test_names_mean_what_they_say() -> None:
    """Every long name is itself and every short one its long one."""
    assert [dtype_named(name) for name in DTYPES] == list(DTYPES)
    assert {short: dtype_named(short) for short in SHORT} == SHORT


@pytest.mark.parametrize("text", ["", "BF16", "int8", "f16", "float32 ", "x" * 1000])
def test_other_names_are_refused(text: str) -> None:
    """With all that are allowed, and no more of the text than fits a line."""
    with pytest.raises(UsageError, match="allowed are stored, native, bfloat16") as caught:
        dtype_named(text)
    assert len(str(caught.value)) < 250
