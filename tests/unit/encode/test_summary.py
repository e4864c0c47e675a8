"""The statistics of a piece against plain definitions, and their merging."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradtap.encode.summary import STATS, PieceSummary, merge, summarize
from gradtap.errors import UsageError

RNG = np.random.default_rng(11)


def _of(values: np.ndarray, level: str = "full") -> PieceSummary:
    found = summarize(values, level)
    assert found is not None
    return found


def test_by_hand() -> None:
    """The statistics of five numbers are those that a person computes."""
    found = _of(np.array([3.0, -4.0, 0.0, -0.0, 1.0], np.float32))
    assert found.count == 5
    assert found.l2 == pytest.approx(math.sqrt(26), rel=1e-15)
    assert found.l1 == 8.0
    assert found.absmax == 4.0
    assert found.mean == 0.0
    assert found.std == pytest.approx(math.sqrt(26 / 5), rel=1e-15)
    assert (found.zeros, found.nan, found.inf) == (2, 0, 0)
    assert found.hist is not None and found.hist.sum() == 5


def test_levels() -> None:
    """Basic leaves out the histogram only, none gives nothing, another level is refused."""
    values = np.arange(10, dtype=np.float32)
    assert summarize(values, "none") is None
    assert _of(values, "basic").hist is None
    assert _of(values, "basic").l1 == 45.0
    with pytest.raises(UsageError, match=r"'all'.*none, basic, full"):
        summarize(values, "all")


def test_other_arrays() -> None:
    """An array that is not 1-D float is refused."""
    with pytest.raises(UsageError, match="1-D float32 or float64"):
        summarize(np.zeros((2, 2), np.float32), "full")
    with pytest.raises(UsageError, match="float16"):
        summarize(np.zeros(2, np.float16), "none")


def test_stats_are_fields() -> None:
    """Each stored statistic is a field of the summary, under its name."""
    found = _of(np.ones(3, np.float32))
    assert all(hasattr(found, name) for name in STATS)


def test_squares_beyond_float32() -> None:
    """The largest float32 value squared does not overflow."""
    top = float(np.finfo(np.float32).max)
    found = _of(np.full(4, top, np.float32))
    assert (found.l2, found.l1, found.absmax, found.mean, found.std) == (2 * top, 4 * top, top, top, 0.0)


@pytest.mark.parametrize("size", [1e300, 1e-300, 5e-324])
def test_squares_beyond_float64(size: float) -> None:
    """float64 values whose squares leave the range still have their norm, mean and deviation."""
    found = _of(np.array([3 * size, -4 * size, 0.0, 0.0]))
    assert found.l2 == pytest.approx(5 * size, rel=1e-14)
    assert found.l1 == pytest.approx(7 * size, rel=1e-14)
    assert found.absmax == 4 * size
    # A quarter of the least subnormal has no bits left of it.
    if size > 1e-310:
        assert found.mean == pytest.approx(-size / 4, rel=1e-14)
        assert found.std == pytest.approx(size * math.sqrt(25 / 4 - 1 / 16), rel=1e-14)


def test_norm_beyond_float64_is_infinite() -> None:
    """A norm that float64 cannot hold is infinite, without a warning; what it can hold stays finite."""
    found = _of(np.full(16, 1e308))
    assert (found.l1, found.l2) == (math.inf, math.inf)
    assert found.mean == pytest.approx(1e308, rel=1e-14)
    assert found.inf == 0


def test_deviation_beside_a_large_mean() -> None:
    """A small deviation is not lost beside a mean a million times as large."""
    values = (1000 + 1e-3 * RNG.standard_normal(200_000)).astype(np.float32)
    exact = values.astype(np.longdouble)
    assert _of(values).std == pytest.approx(float(exact.std()), rel=1e-12)
    assert _of(values).mean == pytest.approx(float(exact.mean()), rel=1e-15)


@pytest.mark.parametrize(
    ("special", "mean", "size"),
    [
        ([np.nan], np.nan, np.nan),
        ([np.inf], np.inf, np.inf),
        ([-np.inf], -np.inf, np.inf),
        ([np.inf, -np.inf], np.nan, np.inf),
        ([np.inf, np.nan], np.nan, np.nan),
    ],
)
def test_special_values(special: list[float], mean: float, size: float) -> None:
    """NaN and infinities go where NumPy takes them, in one piece and through a merge."""
    piece, rest = np.array([1.0, *special], np.float32), np.array([2.0, -3.0], np.float32)
    for found in (_of(np.concatenate([piece, rest])), merge([_of(piece), _of(rest)])):
        np.testing.assert_equal([found.l2, found.l1, found.absmax], [size] * 3)
        np.testing.assert_equal([found.mean, found.std], [mean, np.nan])
        assert (found.nan, found.inf) == (int(np.isnan(special).sum()), int(np.isinf(special).sum()))


def test_infinities_of_both_signs_meet_in_a_merge() -> None:
    """Two pieces with infinities of opposite sign have no mean together, but an infinite norm."""
    found = merge([_of(np.array([np.inf, 1.0])), _of(np.array([-np.inf, 1.0]))])
    assert math.isnan(found.mean) and found.l2 == math.inf and found.inf == 2


def test_nothing() -> None:
    """No elements have no mean, and add nothing to a merge."""
    empty = _of(np.zeros(0, np.float32))
    assert (empty.count, empty.l2, empty.l1, empty.absmax) == (0, 0.0, 0.0, 0.0)
    assert math.isnan(empty.mean) and math.isnan(empty.std)
    for nothing in (merge([]), merge([empty])):
        assert nothing.count == 0 and nothing.l2 == 0.0 and math.isnan(nothing.mean)
    assert merge([empty, _of(np.full(2, 3.0))]).mean == 3.0


def test_merge_without_a_histogram() -> None:
    """Where one piece has no histogram, the whole has none: a partial one would pass for all."""
    values = np.ones(3, np.float32)
    assert merge([_of(values), _of(values, "basic")]).hist is None


def test_merge_of_large_values() -> None:
    """Norms near the end of float64 merge without overflow."""
    found = merge([_of(np.full(2, 1e308)), _of(np.full(2, -1e308))])
    assert found.mean == 0.0
    assert found.std == pytest.approx(1e308, rel=1e-14)
    assert found.absmax == 1e308
    assert found.l1 == math.inf
