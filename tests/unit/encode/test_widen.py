"""Widening keeps the bits; scaling by a power of two is exact, or counted."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from gradtap.encode.widen import restore
from gradtap.errors import UsageError


def test_float32_without_scale_is_not_copied() -> None:
    """With k = 0 the float32 values come back as they are, memory included."""
    values = np.array([1.5, -0.0, np.nan], np.float32)
    result, inexact = restore(values, "float32", 0)
    assert result is values
    assert inexact == 0


def test_every_bfloat16() -> None:
    """Each of the 65,536 bfloat16 patterns becomes the float32 whose upper half it is."""
    bits = np.arange(2**16, dtype=np.uint16)
    result, inexact = restore(bits, "bfloat16", 0)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result.view(np.uint32), bits.astype(np.uint32) << 16)
    assert inexact == 0


def test_every_float16() -> None:
    """Each float16 pattern keeps its value, its sign and its being NaN."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    result, inexact = restore(values, "float16", 0)
    assert (result.dtype, inexact) == (np.float32, 0)
    numbers = ~np.isnan(values)
    assert np.isnan(result[~numbers]).all()
    for half, single in zip(values[numbers].tolist(), result[numbers].tolist(), strict=True):
        assert half == single
    np.testing.assert_array_equal(np.signbit(values), np.signbit(result))


def test_every_float16_at_a_usual_loss_scale_is_exact() -> None:
    """float32 has room for each float16 value divided by 65,536."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    result, inexact = restore(values, "float16", 16)
    assert inexact == 0
    finite = np.isfinite(values)
    np.testing.assert_array_equal(result[finite].astype(np.float64) * 65536, values[finite].astype(np.float64))


def test_float64_stays_float64() -> None:
    """A float64 gradient is scaled in float64."""
    result, inexact = restore(np.array([1 / 3, -2.0]), "float64", 2)
    assert (result.dtype, inexact) == (np.float64, 0)
    np.testing.assert_array_equal(result, np.array([1 / 12, -0.5]))


def test_scale_whose_inverse_is_subnormal() -> None:
    """2**-140 is subnormal in float32, yet 2**20 times it is an exact, normal value."""
    result, inexact = restore(np.array([2.0**20, 3.0 * 2.0**120], np.float32), "float32", 140)
    np.testing.assert_array_equal(result, np.array([2.0**-120, 3.0 * 2.0**-20], np.float32))
    assert inexact == 0


@pytest.mark.parametrize(
    ("value", "k", "expected", "inexact"),
    [
        (1.0, 149, 2.0**-149, 0),
        (1.0, 150, 0.0, 1),
        (1.5, 149, 2.0**-148, 1),
        (5.0 * 2.0**-30, 120, 2.0**-148, 1),
        (3.0 * 2.0**-30, 119, 3.0 * 2.0**-149, 0),
        (2.0**100, -28, np.inf, 1),
        (2.0**100, -27, 2.0**127, 0),
        (2.0**-149, -270, 2.0**121, 0),
        (1.0, 10**9, 0.0, 1),
        (1.0, -(10**9), np.inf, 1),
        (-0.0, 1000, -0.0, 0),
        (np.inf, 16, np.inf, 0),
        (-np.inf, 700, -np.inf, 0),
        (np.nan, 16, np.nan, 0),
        (np.nan, 200, np.nan, 0),
    ],
)
def test_edges_of_float32(value: float, k: int, expected: float, inexact: int) -> None:
    """Results at the edge of float32 are rounded once, and counted where they are rounded."""
    result, count = restore(np.array([value, 0.0], np.float32), "float32", k)
    np.testing.assert_array_equal(result, np.array([expected, 0.0], np.float32))
    assert np.signbit(result[0]) == np.signbit(np.float32(value))
    assert count == inexact


@pytest.mark.parametrize(
    ("value", "k", "expected", "inexact"),
    [
        (1.0, 1074, 5e-324, 0),
        (1.0, 1075, 0.0, 1),
        (2.0**1000, 2000, 2.0**-1000, 0),
        (5e-324, -2000, 2.0**926, 0),
        (1.0, -1024, np.inf, 1),
        (np.nan, 3, np.nan, 0),
    ],
)
def test_edges_of_float64(value: float, k: int, expected: float, inexact: int) -> None:
    """The same holds in float64, where 2**-k itself may be out of range."""
    result, count = restore(np.array([value]), "float64", k)
    np.testing.assert_array_equal(result, np.array([expected]))
    assert count == inexact


@pytest.mark.parametrize("k", [1, -3, 127, -200])
def test_subnormals_lost_to_flushing_are_counted(k: int) -> None:
    """In a thread where the training lets subnormals be flushed to zero, each value lost so counts as inexact."""
    values = np.array([2.0**-149, -(2.0**-140), 2.0**-100], np.float32)
    found: list[tuple[np.ndarray, int]] = []

    def work() -> None:
        # The setting belongs to the thread, so it ends with it.
        torch.set_flush_denormal(True)
        found.append(restore(values, "float32", k))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((result, inexact),) = found
    exact = np.ldexp(values.astype(np.float64), -k)
    assert inexact == int((result.astype(np.float64) != exact).sum()) >= 2


def test_unknown_dtype() -> None:
    """An unknown dtype is refused with those that are known."""
    with pytest.raises(UsageError, match=r"'int8'.*float32, bfloat16, float16, float64"):
        restore(np.zeros(2, np.int8), "int8", 0)


@pytest.mark.parametrize("values", [np.zeros(2, np.float32), np.zeros((2, 2), np.uint16)])
def test_values_that_do_not_fit_their_dtype(values: np.ndarray) -> None:
    """bfloat16 that is not 1-D uint16 is refused."""
    with pytest.raises(UsageError, match="1-D uint16"):
        restore(values, "bfloat16", 0)
