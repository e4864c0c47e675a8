"""Numbers that stand for one piece of a gradient, and their exact or stable merging. Histogram bins: `histogram`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from gradtap.encode.histogram import Tally, tally
from gradtap.errors import UsageError

SummaryLevel = Literal["none", "basic", "full"]
STATS: tuple[str, ...] = ("l2", "l1", "absmax", "mean", "std", "zeros", "nan", "inf", "hist")
"""Names of the stored statistics: five of float64, three of int64, and the histogram (int64, `histogram.BINS`)."""

# Elements of one block: its float64 copy (8 bytes each) stays in the cache of one core.
_BLOCK = 32 * 1024
# Squares of magnitudes within 2**-500 to 2**500, and sums of 2**22 of them, are normal doubles.
_SAFE_EXPONENT = 500


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PieceSummary:
    """Statistics of `count` elements.

    `l2` is the square root of the sum of squares, `l1` the sum of magnitudes, `std` the population's (divisor
    `count`), `inf` counts both signs. As in NumPy a NaN makes the first five NaN, an infinity makes l2, l1 and absmax
    infinite, mean infinite (NaN for both signs) and std NaN. Of no elements: 0, and NaN for mean and std.
    `hist` is int64, `histogram.BINS` long, without NaN and infinities; None below level "full".
    """

    count: int
    l2: float
    l1: float
    absmax: float
    mean: float
    std: float
    zeros: int
    nan: int
    inf: int
    hist: NDArray[np.int64] | None


@overload
def summarize(values: NDArray[Any], level: Literal["none"]) -> None: ...
@overload
def summarize(values: NDArray[Any], level: Literal["basic", "full"]) -> PieceSummary: ...
@overload
def summarize(values: NDArray[Any], level: str) -> PieceSummary | None: ...
def summarize(values: NDArray[Any], level: str) -> PieceSummary | None:
    """Statistics of a 1-D contiguous float32 or float64 array, accumulated in float64; None for level "none".

    "basic" leaves out the histogram. Gives the same numbers for the same values, however often it is asked.
    Raises `UsageError` for an unknown level or another kind of array.
    """
    if level not in get_args(SummaryLevel):
        raise UsageError(f"summary is {level!r}; allowed are {', '.join(get_args(SummaryLevel))}")
    if values.ndim != 1 or values.dtype not in (np.float32, np.float64):
        raise UsageError(f"a summary of {values.dtype} {values.shape} was asked for; it must be 1-D float32 or float64")
    if level == "none":
        return None
    counts = tally(values)
    with np.errstate(all="ignore"):
        l2, l1, absmax, mean, std = _broken(counts) if counts.nan or counts.inf else _moments(values)
    return PieceSummary(
        count=values.size,
        l2=l2,
        l1=l1,
        absmax=absmax,
        mean=mean,
        std=std,
        zeros=counts.zeros,
        nan=counts.nan,
        inf=counts.inf,
        hist=counts.hist if level == "full" else None,
    )


def merge(summaries: Iterable[PieceSummary]) -> PieceSummary:
    """Statistics of all elements of disjoint pieces together; of no elements for no pieces.

    Counts, histogram and absmax are exact. Mean and standard deviation join as the sums of squared deviations do in
    Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (The American Statistician 37, 1983),
    taken over all pieces at once, so their order does not matter; nothing is subtracted from a large sum of squares.
    `hist` is None where a non-empty piece has none.
    """
    parts = [part for part in summaries if part.count]
    count = sum(part.count for part in parts)
    mean, std = _join_moments(parts, count)
    return PieceSummary(
        count=count,
        l2=_root_of_squares([part.l2 for part in parts]),
        l1=_total([part.l1 for part in parts]),
        absmax=math.nan if any(math.isnan(p.absmax) for p in parts) else max((p.absmax for p in parts), default=0.0),
        mean=mean,
        std=std,
        zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        hist=_join_histograms(parts),
    )


def _broken(counts: Tally) -> tuple[float, float, float, float, float]:
    size = math.nan if counts.nan else math.inf
    one_sign = not counts.nan and not (counts.inf_positive and counts.inf_negative)
    mean = (math.inf if counts.inf_positive else -math.inf) if one_sign else math.nan
    return size, size, size, mean, math.nan


def _moments(values: NDArray[Any]) -> tuple[float, float, float, float, float]:
    if not values.size:
        return 0.0, 0.0, 0.0, math.nan, math.nan
    absmax = max(float(values.max()), -float(values.min()))
    exponent = _scale_exponent(absmax)
    sums: list[float] = []
    magnitudes: list[float] = []
    deviations: list[float] = []
    counts: list[int] = []
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK].astype(np.float64)
        if exponent:
            np.ldexp(block, -exponent, out=block)
        sums.append(float(block.sum()))
        magnitudes.append(float(np.abs(block).sum()))
        counts.append(block.size)
        block -= sums[-1] / block.size
        # einsum, not dot: BLAS would start threads of its own beside the training's.
        deviations.append(float(np.einsum("i,i->", block, block)))
    mean = math.fsum(sums) / values.size
    between = [n * (s / n - mean) ** 2 for s, n in zip(sums, counts, strict=True)]
    squares = math.fsum(deviations + between)
    # Sum of squares = squared deviations + n x mean**2: both terms are positive, so nothing cancels.
    l2 = math.sqrt(squares + values.size * mean * mean)
    std = math.sqrt(squares / values.size)
    l1 = _raise(math.fsum(magnitudes), exponent)
    return _raise(l2, exponent), l1, absmax, _raise(mean, exponent), _raise(std, exponent)


def _scale_exponent(absmax: float) -> int:
    exponent = math.frexp(absmax)[1]
    return exponent if absmax and abs(exponent) > _SAFE_EXPONENT else 0


def _raise(value: float, exponent: int) -> float:
    return float(np.ldexp(value, exponent)) if exponent else value


def _join_moments(parts: Sequence[PieceSummary], count: int) -> tuple[float, float]:
    if not parts:
        return math.nan, math.nan
    weights = [part.count / count for part in parts]
    mean = _total([w * part.mean for w, part in zip(weights, parts, strict=True)])
    if not math.isfinite(mean):
        return mean, math.nan
    spread = [math.sqrt(w) * part.std for w, part in zip(weights, parts, strict=True)]
    between = [math.sqrt(w) * (part.mean - mean) for w, part in zip(weights, parts, strict=True)]
    return mean, _root_of_squares(spread + between)


def _join_histograms(parts: Sequence[PieceSummary]) -> NDArray[np.int64] | None:
    present = [part.hist for part in parts if part.hist is not None]
    if len(present) < len(parts) or not present:
        return None
    joined: NDArray[np.int64] = np.sum(present, axis=0, dtype=np.int64)
    return joined


def _root_of_squares(values: Sequence[float]) -> float:
    # hypot scales by itself, but answers infinity for infinity and NaN together.
    return math.nan if any(math.isnan(v) for v in values) else math.hypot(*values)


def _total(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return float(sum(values))
    try:
        return math.fsum(values)
    except OverflowError:
        return float(sum(values))
