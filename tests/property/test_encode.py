"""Codecs, widening and summaries on any bit patterns."""

from __future__ import annotations

import math
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradtap.encode.checksum import crc32c, split_crc
from gradtap.encode.codecs import CODECS, ChunkCodec
from gradtap.encode.histogram import bin_edges, tally
from gradtap.encode.summary import PieceSummary, merge, summarize
from gradtap.encode.widen import restore
from gradtap.errors import DamagedError

SPECIAL32 = [0, 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001]
BITS32 = arrays(np.uint32, st.integers(1, 60), elements=st.integers(0, 2**32 - 1) | st.sampled_from(SPECIAL32))
BITS64 = arrays(np.uint64, st.integers(1, 60), elements=st.integers(0, 2**64 - 1))


@given(BITS32, st.sampled_from(CODECS), st.integers(1, 50))
def test_codec_keeps_float32_bits(bits: np.ndarray, profile: str, repeat: int) -> None:
    """NaN payloads, signed zeros, subnormals and infinities come back bit for bit."""
    values = np.tile(bits, repeat).view(np.float32)
    codec = ChunkCodec(profile, 4)
    chunk = codec.encode(values)
    body, stored = split_crc(chunk.data)
    assert stored == chunk.crc == crc32c(body)
    assert codec.decode(body, values.size).tobytes() == values.tobytes()


@given(BITS64, st.sampled_from(CODECS), st.integers(1, 50))
def test_codec_keeps_float64_bits(bits: np.ndarray, profile: str, repeat: int) -> None:
    """The same in float64."""
    values = np.tile(bits, repeat).view(np.float64)
    codec = ChunkCodec(profile, 8)
    assert codec.decode(codec.encode(values).data[:-4], values.size).tobytes() == values.tobytes()


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_decode_or_are_damage(tail: bytes, header: bool) -> None:
    """Bytes that nobody encoded give an array of the right size or DamagedError, and nothing else."""
    good = ChunkCodec("exact", 4).encode(np.arange(50, dtype=np.float32)).data[:-4]
    size = 16 + len(tail)
    body = good[:12] + size.to_bytes(4, "little") + tail if header else tail
    with suppress(DamagedError):
        assert ChunkCodec("exact", 4).decode(body, 50).shape == (50,)


def nearest_single(value: Fraction) -> Fraction | float:
    """`value` rounded to float32, to nearest even, in whole numbers."""
    if value == 0:
        return Fraction(0)
    magnitude = abs(value)
    exponent = math.floor(math.log2(magnitude.numerator)) - math.floor(math.log2(magnitude.denominator)) - 2
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / unit) * unit
    if rounded >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return rounded if value > 0 else -rounded


@given(BITS32, st.integers(-300, 300))
def test_scaling_is_exact_or_counted(bits: np.ndarray, k: int) -> None:
    """Each result is the exact quotient rounded once, and the count is that of the rounded ones."""
    values = bits.view(np.float32)
    result, inexact = restore(values, "float32", k)
    rounded = 0
    for before, after in zip(values.tolist(), result.tolist(), strict=True):
        if not math.isfinite(before):
            assert after == before or (math.isnan(before) and math.isnan(after))
            continue
        exact = Fraction(before) / Fraction(2) ** k
        expected = nearest_single(exact)
        assert after == expected
        rounded += exact != expected
    assert inexact == rounded
    np.testing.assert_array_equal(np.signbit(result), np.signbit(values))


@given(arrays(np.uint16, st.integers(1, 60), elements=st.integers(0, 2**16 - 1)), st.integers(0, 24))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_widen_then_scale(dtype: str, bits: np.ndarray, k: int) -> None:
    """Half-precision values are scaled as the float32 values that they are."""
    wide = bits.view(np.float16).astype(np.float32) if dtype == "float16" else (bits.astype("u4") << 16).view("f4")
    held = bits.view(np.float16) if dtype == "float16" else bits
    result, inexact = restore(held, dtype, k)
    expected, count = restore(wide, "float32", k)
    np.testing.assert_array_equal(result, expected)
    assert inexact == count
    if dtype == "float16":
        assert inexact == 0


@given(BITS32)
def test_histogram_counts_between_its_edges(bits: np.ndarray) -> None:
    """Every finite value but the zeros is counted once, in the bin whose edges hold its magnitude."""
    values = bits.view(np.float32)
    finite = values[np.isfinite(values)].astype(np.float64)
    edges = bin_edges()
    expected = np.zeros(193, np.int64)
    for value in finite.tolist():
        if value == 0:
            expected[96] += 1
        elif value > 0:
            expected[np.searchsorted(edges[97:], value, side="right") - 1 + 97] += 1
        else:
            expected[np.searchsorted(edges[:97], value, side="left") - 1] += 1
    counts = tally(values)
    np.testing.assert_array_equal(counts.hist, expected)
    assert (counts.nan, counts.inf) == (int(np.isnan(values).sum()), int(np.isinf(values).sum()))


def _check(found: PieceSummary, values: np.ndarray) -> None:
    exact = values.astype(np.longdouble)
    scale = max(float(np.abs(exact).max()), 1e-300)
    assert found.count == values.size
    assert found.l2 == pytest.approx(float(np.sqrt((exact**2).sum())), rel=1e-12)
    assert found.l1 == pytest.approx(float(np.abs(exact).sum()), rel=1e-12)
    assert found.absmax == float(np.abs(exact).max())
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-12, abs=1e-14 * scale)
    assert found.std == pytest.approx(float(exact.std()), rel=1e-12, abs=1e-14 * scale)
    assert found.zeros == int((values == 0).sum())


FINITE32 = arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
FINITE64 = arrays(np.float64, st.integers(1, 200), elements=st.floats(-(2.0**900), 2.0**900))


@given(FINITE32 | FINITE64, st.lists(st.integers(0, 200), max_size=5))
def test_merged_pieces_are_the_whole(values: np.ndarray, cuts: list[int]) -> None:
    """Summaries of the pieces of a partition merge into the summary of the whole."""
    direct = summarize(values, "full")
    assert direct is not None
    _check(direct, values)
    bounds = [0, *sorted(min(cut, values.size) for cut in cuts), values.size]
    pieces = [summarize(values[a:b], "full") for a, b in pairwise(bounds)]
    merged = merge([piece for piece in pieces if piece is not None])
    _check(merged, values)
    np.testing.assert_array_equal(merged.hist, direct.hist)


@given(FINITE32, st.permutations(range(4)))
def test_order_of_merging_does_not_matter(values: np.ndarray, order: list[int]) -> None:
    """The same pieces in another order give the same numbers, bit for bit."""
    parts = [summarize(part, "basic") for part in np.array_split(values, 4)]
    known = [part for part in parts if part is not None]
    a, b = merge(known), merge([known[i] for i in order])
    np.testing.assert_array_equal([a.l1, a.mean], [b.l1, b.mean])
    assert (a.l2, a.std) == pytest.approx((b.l2, b.std), rel=1e-14)
