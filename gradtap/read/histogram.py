"""The histogram of one gradient: the stored one, or counted anew from its values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradtap.encode.counting import Histogram, check_count, count_linear, count_log2
from gradtap.encode.histogram import ZERO_BIN, bin_edges
from gradtap.errors import IncompleteError, UsageError, nearest
from gradtap.read.request import GradRequest

SCALES = ("log2", "linear")
BINS_DEFAULT = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradHistogram:
    """The histogram of a gradient, or of a slice of it, at a step.

    Stored ones have `source` "summary" and know only the sum of both infinities.
    """

    name: str
    step: int
    attempt: int
    slice: str
    dtype_captured: str
    flags: tuple[str, ...]
    histogram: Histogram


def histogram_of(wanted: GradRequest, *, bins: int | None, scale: str, stored: bool) -> GradHistogram:
    """The histogram of what `wanted` asks for; read from the summaries where `stored` and the scale is log2.

    Raises `UsageError` for an unknown scale, or bins that it does not have, and as `GradRequest.read`.
    """
    check_bins(bins, scale)
    if scale == "linear":
        found = count_linear(wanted.read().values, BINS_DEFAULT if bins is None else bins)
    elif not stored:
        found = count_log2(wanted.read().values)
    else:
        found = stored_histogram(wanted)
    return GradHistogram(
        name=wanted.param.name,
        step=wanted.steps[0],
        attempt=wanted.attempts[0],
        slice=str(wanted.where),
        dtype_captured=wanted.dtype_captured,
        flags=wanted.flags,
        histogram=found,
    )


def check_bins(bins: int | None, scale: str) -> None:
    """Raise `UsageError` for an unknown scale, or a number of bins that it does not have."""
    if scale not in SCALES:
        raise UsageError(f"scale is {scale!r}; allowed are {', '.join(SCALES)}{nearest(scale, SCALES)}")
    if scale == "log2" and bins is not None:
        raise UsageError(f"bins is {bins}, but scale log2 has a bin for each power of two; use scale linear")
    if bins is not None:
        check_count(bins)


def stored_histogram(wanted: GradRequest) -> Histogram:
    """The histogram that was stored with the capture. Reads summaries alone.

    Raises `IncompleteError` where none was, by the session or of this parameter.
    """
    place = wanted.places[0]
    summaries = place.reader.summaries
    if "hist" not in summaries.stats:
        raise IncompleteError(
            f"session {place.reader.session.name} stored no histograms (summary='none' or 'basic'); give slice='...' "
            "to count the values themselves"
        )
    at = np.array([place.capture], np.int64)
    column = summaries.names_of("hist").index(wanted.param.name)
    counts = summaries.histogram(place.capture, column)
    if counts is None:
        raise IncompleteError(
            f"no histogram of {wanted.param.name!r} was taken at step {place.step}: the selection of session "
            f"{place.reader.session.name} left it out; ask for another step or parameter"
        )
    nan, inf = (
        int(summaries.rows(stat, at, np.array([summaries.names_of(stat).index(wanted.param.name)]))[0, 0])
        for stat in ("nan", "inf")
    )
    return Histogram(edges=bin_edges(), counts=counts, scale="log2", zero=ZERO_BIN, nan=nan, inf=inf, source="summary")
