"""The bytes of a gradient in each format, read back by the libraries that own the format."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradtap.errors import UsageError
from gradtap.query.cast import cast, dtype_named
from gradtap.query.formats import FORMATS, GradHead, Payload, encode, length_of
from gradtap.types import GradSlice

ODD = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-40, 3.4e38, 0.1, 70000.0], np.float32)


def asked(
    values: np.ndarray, *, stacked: bool = False, captured: str = "float32", name: str = "a.weight", **options: Any
) -> tuple[GradSlice, GradHead]:
    steps = tuple(range(1, len(values) + 1)) if stacked else (7,)
    facts: dict[str, Any] = {
        "name": name,
        "steps": steps,
        "attempts": tuple(1 for _ in steps),
        "dtype_captured": captured,
        "flags": ("nonfinite",),
        "factor": tuple(1.0 for _ in steps),
    }
    grad = GradSlice(values=values, complete=bool(options.get("complete", True)), **facts)
    head = GradHead(
        run="0" * 32,
        shape=values.shape,
        dtype=values.dtype.name,
        stacked=stacked,
        slice="...",
        **({"complete": True} | options),
        **facts,
    )
    return grad, head


def made(values: np.ndarray, format: str, dtype: str = "stored", **options: Any) -> Payload:
    grad, head = asked(values, **options)
    return encode(grad, head, format=format, dtype=dtype)


def read_back(payload: Payload) -> np.ndarray:
    """What the format's own library reads."""
    body = bytes(payload)
    if payload.format == "raw":
        kind = ml_dtypes.bfloat16 if payload.dtype == "bfloat16" else payload.dtype
        return np.frombuffer(body, kind).reshape(payload.head.shape)
    if payload.format == "npy":
        return np.asarray(np.load(io.BytesIO(body)))
    if payload.dtype == "bfloat16":
        # The library's reader for NumPy knows bfloat16 in files alone.
        (name, tensor), *_ = safetensors.deserialize(body)
        assert (name, tensor["dtype"]) == (payload.head.name, "BF16")
        return np.frombuffer(tensor["data"], ml_dtypes.bfloat16).reshape(tensor["shape"])
    return np.asarray(safetensors.numpy.load(body)[payload.head.name])


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


SHAPED = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    elements=st.floats(width=32),
)


@pytest.mark.parametrize("format", ["raw", "npy", "safetensors"])
@settings(deadline=None)
@given(values=SHAPED)
def test_stored_values_come_back_bit_for_bit(format: str, values: np.ndarray) -> None:
    """Of any shape, NaN, infinities, -0 and subnormals included, and as long as was said before."""
    payload = made(values, format)
    assert same(read_back(payload), values) and payload.rounded == 0
    assert payload.nbytes == len(bytes(payload)) == length_of(payload.head, format=format, dtype="stored")


@pytest.mark.parametrize("format", ["raw", "npy", "safetensors"])
def test_values_that_are_not_contiguous_come_back(format: str) -> None:
    """A transposed view is written in row-major order of what it shows."""
    values = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    assert same(read_back(made(values, format)), np.ascontiguousarray(values))


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16"])
def test_native_bfloat16_is_torchs(dtype: str) -> None:
    """Raw and safetensors carry the bits that torch's own cast gives."""
    values = np.concatenate([ODD, np.random.default_rng(1).standard_normal(500).astype(np.float32)])
    want = torch.from_numpy(values).to(torch.bfloat16)
    for format in ("raw", "safetensors"):
        payload = made(values, format, dtype)
        back = read_back(payload)
        assert payload.dtype == "bfloat16"
        both = np.isnan(values)
        assert np.array_equal(back.view(np.uint16)[~both], want.view(torch.uint16).numpy()[~both])
        assert np.isnan(back.astype(np.float32)[both]).all()


def test_torch_loads_what_was_written() -> None:
    """safetensors' reader for torch gives a bfloat16 tensor."""
    from safetensors.torch import load

    tensor = load(bytes(made(ODD, "safetensors", "bf16")))["a.weight"]
    assert tensor.dtype == torch.bfloat16 and tensor.shape == (10,)


def test_a_format_without_bfloat16_gives_the_same_numbers() -> None:
    """npy and JSON carry it as float32, rounded as bfloat16 is."""
    values = np.linspace(-3, 3, 11, dtype=np.float32)
    npy = made(values, "npy", "native", captured="bfloat16")
    assert npy.dtype == "float32"
    assert same(read_back(npy), values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert json.loads(bytes(made(values, "json", "bf16")))["values"] == read_back(npy).tolist()
    assert npy.rounded == made(values, "raw", "bf16").rounded > 0


def test_all_bfloat16_patterns_survive_widening_and_back() -> None:
    """Stored as float32, asked for as native: the captured bits, none rounded."""
    bits = np.arange(65536, dtype=np.uint16)
    bits = bits[~np.isnan(bits.view(ml_dtypes.bfloat16).astype(np.float32))]
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    payload = made(wide, "raw", "native", captured="bfloat16")
    assert np.array_equal(np.frombuffer(bytes(payload), np.uint16), bits) and payload.rounded == 0


def test_rounded_counts_what_changed() -> None:
    """Half precision cannot hold a subnormal, a tenth, or what is above its range; NaN, infinities and zeros it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, rounded = cast(ODD, "float16")
    assert rounded == 5
    assert np.isnan(found[0]) and np.isposinf(found[7]) and np.signbit(found[3])
    assert cast(ODD, "float64")[1] == cast(ODD, "float32")[1] == 0


def test_metadata_of_safetensors_says_what_it_is() -> None:
    """Run, step, attempt, flags and slice are beside the tensor."""
    body = bytes(made(ODD, "safetensors"))
    length = int.from_bytes(body[:8], "little")
    about = json.loads(body[8 : 8 + length])["__metadata__"]
    assert (about["run"], about["step"], about["attempt"]) == ("0" * 32, "7", "1")
    assert (json.loads(about["flags"]), about["schema"], about["slice"]) == (["nonfinite"], "gradtap.grad/1", "...")
    assert (8 + length) % 8 == 0


def test_json_has_the_same_numbers() -> None:
    """Each value parses back to the same float32; what JSON lacks is null and counted."""
    body = json.loads(bytes(made(ODD, "json")))
    back = np.array([np.nan if v is None else v for v in body["values"]], np.float32)
    finite = np.isfinite(ODD)
    assert same(back[finite], ODD[finite]) and np.isnan(back[~finite]).all()
    assert body["nonfinite"] == {"nan": 1, "posinf": 1, "neginf": 1}
    assert (body["schema"], body["step"], body["dtype"], body["complete"]) == ("gradtap.grad/1", 7, "float32", True)


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_every_float32_survives_json(values: np.ndarray) -> None:
    """Parsed as doubles and narrowed: the same bits, and nothing was counted as lost."""
    body = json.loads(bytes(made(values, "json")))
    assert same(np.array(body["values"], np.float32), values) and not any(body["nonfinite"].values())


def test_an_unknown_factor_is_no_lost_value() -> None:
    """It is null in every format, and not counted among the values."""
    grad, head = asked(np.zeros(2, np.float32))
    head = replace(head, factor=(float("nan"),))
    body = json.loads(bytes(encode(grad, head, format="json", dtype="stored")))
    assert body["factor"] is None and not any(body["nonfinite"].values())
    file = bytes(encode(grad, head, format="safetensors", dtype="stored"))
    assert json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]["factor"] == "null"


@pytest.mark.parametrize("dtype", ["stored", "bf16", "f2", "f4", "f8"])
@pytest.mark.parametrize("format", ["raw", "npy", "safetensors"])
@settings(deadline=None)
@given(values=SHAPED)
def test_the_length_is_known_in_every_dtype(format: str, dtype: str, values: np.ndarray) -> None:
    """To the byte, for any shape, stacked or not."""
    for stacked in (False, True)[: 1 + bool(values.ndim and len(values))]:
        payload = made(values, format, dtype, stacked=stacked)
        assert payload.nbytes == len(bytes(payload)) == length_of(payload.head, format=format, dtype=dtype)


@pytest.mark.parametrize("format", ["raw", "npy", "safetensors"])
def test_the_body_is_little_endian_whatever_the_memory_is(format: str) -> None:
    """Values in big-endian memory are swapped, not passed on."""
    little = np.arange(6, dtype="<f4").reshape(2, 3)
    grad, _ = asked(little.astype(">f4"))
    payload = encode(grad, asked(little)[1], format=format, dtype="stored")
    assert bytes(payload) == bytes(made(little, format))


def test_a_stack_says_its_steps() -> None:
    """The first axis is that of the steps, which are listed."""
    values = np.zeros((3, 2), np.float32)
    body = json.loads(bytes(made(values, "json", stacked=True)))
    assert body["steps"] == [1, 2, 3] and body["attempts"] == [1, 1, 1] and len(body["values"]) == 3


def test_a_scalar_is_a_number() -> None:
    """No axis, no list."""
    assert json.loads(bytes(made(np.array(2.5, np.float32), "json")))["values"] == 2.5


def test_a_partial_gradient_says_so() -> None:
    """Its length is not promised where the header depends on it."""
    head = asked(ODD, complete=None)[1]
    assert length_of(head, format="safetensors", dtype="stored") is None
    assert length_of(head, format="raw", dtype="stored") == ODD.nbytes
    for whole in (True, False):
        read = asked(ODD, complete=whole)[0]
        assert json.loads(bytes(encode(read, head, format="json", dtype="stored")))["complete"] is whole
    assert length_of(head, format="json", dtype="stored") is None


@pytest.mark.parametrize("format", FORMATS)
def test_odd_names_are_carried(format: str) -> None:
    """Unicode, quotes and slashes."""
    payload = made(ODD, format, name='über/"w".0')
    if format != "json":
        assert read_back(payload).shape == (10,)
    else:
        assert json.loads(bytes(payload))["name"] == 'über/"w".0'


def test_values_are_not_copied_without_need() -> None:
    """The body of stored values is the memory of the gradient itself."""
    grad, head = asked(ODD)
    part = encode(grad, head, format="npy", dtype="stored").parts[-1]
    assert np.shares_memory(np.frombuffer(part, np.uint8), ODD)


def test_typos_are_answered_with_near_names() -> None:
    """Of dtypes and formats; native of several captured dtypes is refused with what to do."""
    with pytest.raises(UsageError, match="did you mean float32"):
        dtype_named("flaot32")
    with pytest.raises(UsageError, match="did you mean safetensors"):
        made(ODD, "safetensor")
    with pytest.raises(UsageError, match="bfloat16, float32; use stored"):
        made(ODD, "raw", "native", captured="bfloat16, float32")


def test_bfloat16_is_known_from_the_first() -> None:
    """The length of raw bfloat16 is told in a process that has not seen the dtype yet."""
    script = (
        "from gradtap.query.formats import GradHead, length_of\n"
        "head = GradHead(run='', name='w', shape=(3,), dtype='float32', dtype_captured='bfloat16', steps=(1,), "
        "attempts=(1,), flags=(), factor=(1.0,), complete=True, stacked=False, slice='...')\n"
        "print([length_of(head, format=f, dtype='native') for f in ('raw', 'npy', 'json')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[6, 140, None]", done.stderr
