"""The signed histogram of log2 magnitudes, and the counts that come with it from the same pass over the bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOWEST = -64
HIGHEST = 31
SIDE = HIGHEST - LOWEST + 1
ZERO_BIN = SIDE
BINS = 2 * SIDE + 1

# Elements of one block: its index buffer (8 bytes each) stays in the cache of one core.
_BLOCK = 32 * 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tally:
    """Counts of one array. `hist` is int64, `BINS` long, without NaN and infinities; `inf` counts both signs."""

    hist: NDArray[np.int64]
    zeros: int
    nan: int
    inf_positive: int
    inf_negative: int

    @property
    def inf(self) -> int:
        """Infinite elements of either sign."""
        return self.inf_positive + self.inf_negative


def bin_edges() -> NDArray[np.float64]:
    """Edges of the `BINS` bins, ascending, float64, `BINS + 1` long: bin b holds values from edge b to edge b + 1.

    Bins 0 to 95 are negative (bin 0 from -inf to -2**31, bin 95 from -2**-63 to 0), bin 96 is zero alone (both of its
    edges are 0), bins 97 to 192 are positive. A power of two belongs to the bin of larger magnitudes.
    """
    positive = np.ldexp(1.0, np.arange(LOWEST + 1, HIGHEST + 1))
    half = np.concatenate([[0.0], positive, [np.inf]])
    return np.concatenate([-half[::-1], half]) + 0.0


def tally(values: NDArray[Any]) -> Tally:
    """Counts of a 1-D contiguous float32 or float64 array, by sign and binary exponent: floor(log2|x|).

    Exponents are clipped to `LOWEST` and `HIGHEST`. -0.0 counts as zero.
    """
    single = values.dtype == np.float32
    bits = values.view(np.uint32 if single else np.uint64)
    mantissa, exponents = (23, 256) if single else (52, 2048)
    counts = _top_bits(bits, mantissa, 2 * exponents)
    # Exponent field 0 holds zeros beside subnormals; they are told apart by their bits, since a comparison with zero
    # takes subnormals for zeros in a thread where denormals are flushed.
    sign_bit = 1 << (mantissa + exponents.bit_length() - 1)
    positive = _equal(bits, 0) if counts[0] else 0
    negative = _equal(bits, sign_bit) if counts[exponents] else 0
    counts[[0, exponents]] -= (positive, negative)
    special = int(counts[exponents - 1] + counts[-1])
    nan = int(np.count_nonzero(np.isnan(values))) if special else 0
    inf_negative = int(np.count_nonzero(values == -np.inf)) if special > nan else 0
    return Tally(
        hist=_fold(counts, exponents, positive + negative),
        zeros=positive + negative,
        nan=nan,
        inf_positive=special - nan - inf_negative,
        inf_negative=inf_negative,
    )


def _top_bits(bits: NDArray[Any], shift: int, length: int) -> NDArray[np.int64]:
    total = np.zeros(length, np.int64)
    # bincount takes no unsigned index: shifting straight into a small int64 buffer saves the cast of the whole array.
    buffer = np.empty(min(_BLOCK, bits.size), np.int64)
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        index = buffer[: block.size]
        np.right_shift(block, bits.dtype.type(shift), out=index, casting="unsafe")
        total += np.bincount(index, minlength=length)
    return total


def _equal(bits: NDArray[Any], pattern: int) -> int:
    return int(np.count_nonzero(bits == bits.dtype.type(pattern)))


def _fold(counts: NDArray[np.int64], exponents: int, zeros: int) -> NDArray[np.int64]:
    bias = exponents // 2 - 1
    hist = np.zeros(BINS, np.int64)
    hist[ZERO_BIN] = zeros
    # The last exponent is left out: it is that of NaN and infinities.
    place = np.clip(np.arange(exponents - 1) - bias, LOWEST, HIGHEST) - LOWEST
    np.add.at(hist, ZERO_BIN + 1 + place, counts[: exponents - 1])
    np.add.at(hist, ZERO_BIN - 1 - place, counts[exponents:-1])
    return hist
