"""Histograms counted from values: by sign and power of two, or in equal bins. NaN and infinities are counted apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradtap.encode.histogram import ZERO_BIN, bin_edges, tally
from gradtap.errors import UsageError

MOST_BINS = 512
LARGEST = float(np.finfo(np.float64).max)

Scale = Literal["log2", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """`counts` (int64, n) of the finite values between `edges` (float64, n + 1, ascending).

    A bin holds its lower edge, the last one its upper too. `zero` is the index of the bin of the value 0 alone, None
    where there is none. `inf` counts both infinities; `posinf` and `neginf` are None where only their sum is known.
    `source`: "summary" for a stored histogram, "values" for one counted anew.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    scale: Scale
    nan: int
    inf: int
    source: Literal["summary", "values"]
    zero: int | None = None
    posinf: int | None = None
    neginf: int | None = None

    @property
    def total(self) -> int:
        """All values, those that are not finite too."""
        return int(self.counts.sum()) + self.nan + self.inf


def count_log2(values: NDArray[Any]) -> Histogram:
    """The 193 bins of a stored histogram, counted from float32 or float64 values of any shape."""
    found = tally(np.ascontiguousarray(values).reshape(-1))
    return Histogram(
        edges=bin_edges(),
        counts=found.hist,
        scale="log2",
        nan=found.nan,
        inf=found.inf,
        source="values",
        zero=ZERO_BIN,
        posinf=found.inf_positive,
        neginf=found.inf_negative,
    )


def count_linear(values: NDArray[Any], bins: int) -> Histogram:
    """Equal bins from the smallest finite value to the largest, as `numpy.histogram` makes them.

    Where all are equal, or none is finite, they span at least 1 about the value, or from 0 to 1. Raises `UsageError`
    for fewer than 1 bins or more than 512.
    """
    check_count(bins)
    flat = np.asarray(values, np.float64).reshape(-1)
    finite = flat[np.isfinite(flat)]
    counts, edges = np.histogram(finite, _edges(finite, bins))
    posinf, neginf = int(np.count_nonzero(flat == np.inf)), int(np.count_nonzero(flat == -np.inf))
    return Histogram(
        edges=edges.astype(np.float64),
        counts=counts.astype(np.int64),
        scale="linear",
        nan=int(np.count_nonzero(np.isnan(flat))),
        inf=posinf + neginf,
        source="values",
        posinf=posinf,
        neginf=neginf,
    )


def check_count(bins: int) -> None:
    """Raise `UsageError` for fewer equal bins than 1 or more than 512."""
    if not 1 <= bins <= MOST_BINS:
        raise UsageError(f"bins is {bins}; allowed are 1 to {MOST_BINS}")


def _edges(finite: NDArray[np.float64], bins: int) -> NDArray[np.float64]:
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low == high:
        # Half of one, or what a large value can be told apart by.
        half = max(0.5, abs(low) * 2.0**-20)
        low, high = max(low - half, -LARGEST), min(high + half, LARGEST)
    # Halves first: the difference of two large doubles overflows.
    share = np.linspace(0.0, 1.0, bins + 1)
    edges = low * (1.0 - share) + high * share
    edges[0], edges[-1] = low, high
    # Between doubles that are close, a rounded sum can lie outside of both, or below the one before it.
    return np.maximum.accumulate(np.clip(edges, low, high))
