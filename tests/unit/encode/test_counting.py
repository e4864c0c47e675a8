"""Histograms counted from values, against NumPy's and against the stored kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradtap.encode.counting import MOST_BINS, count_linear, count_log2
from gradtap.encode.histogram import ZERO_BIN
from gradtap.errors import UsageError

VALUES = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
    elements=st.floats(width=32),
)


@settings(deadline=None)
@given(VALUES, st.integers(1, 40))
def test_linear_bins_lose_no_value(values: np.ndarray, bins: int) -> None:
    """Every value is in exactly one bin or counted apart, and each bin has what lies between its edges."""
    found = count_linear(values, bins)
    flat = values.astype(np.float64).reshape(-1)
    finite = flat[np.isfinite(flat)]
    assert found.total == values.size and len(found.counts) == bins and len(found.edges) == bins + 1
    assert (found.nan, found.posinf, found.neginf) == (
        np.isnan(flat).sum(),
        (flat == np.inf).sum(),
        (flat == -np.inf).sum(),
    )
    assert (np.diff(found.edges) >= 0).all()
    for at in range(bins):
        low, high = found.edges[at], found.edges[at + 1]
        inside = (finite >= low) & ((finite <= high) if at == bins - 1 else (finite < high))
        assert found.counts[at] == inside.sum()


def test_linear_bins_are_numpys_on_plain_values() -> None:
    """The same edges to rounding, the same counts."""
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    counts, edges = np.histogram(values.astype(np.float64), 16)
    found = count_linear(values, 16)
    assert np.array_equal(found.counts, counts) and np.allclose(found.edges, edges)


@pytest.mark.parametrize("value", [0.0, 1.0, -1e20, 1.7e308])
def test_equal_values_share_one_bin(value: float) -> None:
    """Around one value, however large, the edges rise and one bin has it all."""
    found = count_linear(np.full(5, value), 4)
    assert (np.diff(found.edges) > 0).all() and sorted(found.counts.tolist()) == [0, 0, 0, 5]


def test_the_widest_doubles_do_not_overflow() -> None:
    """From the smallest to the largest double, all edges are finite."""
    top = np.finfo(np.float64).max
    assert np.isfinite(count_linear(np.array([-top, top]), 3).edges).all()


@settings(deadline=None)
@given(st.floats(-1e308, 1e308), st.integers(1, 5), st.integers(1, 20))
def test_edges_of_close_values_stay_between_them(low: float, apart: int, bins: int) -> None:
    """The first edge is the smallest value and the last one the largest, a few doubles apart."""
    high = low
    for _ in range(apart):
        high = math.nextafter(high, math.inf)
    found = count_linear(np.array([high, low]), bins)
    assert (found.edges[0], found.edges[-1]) == (low, high)
    assert (np.diff(found.edges) >= 0).all() and found.counts.sum() == 2


def test_edges_that_rounding_puts_above_the_largest_are_held() -> None:
    """Two neighbouring doubles between which nineteen bins have no room."""
    low, high = -6.343264208759925e230, -6.3432642087599245e230
    found = count_linear(np.array([low, high]), 19)
    assert (found.edges[0], found.edges[-1]) == (low, high) and found.counts[-1] == 1


@pytest.mark.parametrize("values", [[], [np.nan] * 3, [np.inf, -np.inf, np.nan]])
def test_without_a_finite_value_all_bins_are_empty(values: list[float]) -> None:
    """The edges go from 0 to 1, and what is not finite is counted apart."""
    found = count_linear(np.array(values, np.float32), 4)
    assert found.edges.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0] and found.counts.tolist() == [0] * 4
    assert found.total == found.nan + found.inf == len(values)


@settings(deadline=None)
@given(VALUES, st.integers(1, MOST_BINS))
def test_linear_counts_are_numpys_for_the_same_edges(values: np.ndarray, bins: int) -> None:
    """Of the finite values alone."""
    found = count_linear(values, bins)
    finite = values[np.isfinite(values)].astype(np.float64)
    assert np.array_equal(found.counts, np.histogram(finite, found.edges)[0])


@pytest.mark.parametrize("bins", [0, -1, MOST_BINS + 1])
def test_a_number_of_bins_out_of_range_is_refused(bins: int) -> None:
    """With the range that is allowed."""
    with pytest.raises(UsageError, match="1 to 512"):
        count_linear(np.zeros(3), bins)


@settings(deadline=None)
@given(VALUES)
def test_log2_bins_hold_powers_of_two(values: np.ndarray) -> None:
    """Every finite value lies within its bin by magnitude, zeros of either sign in their own."""
    found = count_log2(values)
    flat = values.reshape(-1)
    assert found.total == values.size and found.zero == ZERO_BIN
    assert found.counts[ZERO_BIN] == (flat == 0).sum()
    assert found.counts[:ZERO_BIN].sum() == ((flat < 0) & np.isfinite(flat)).sum()
    assert (found.nan, found.posinf, found.neginf) == (
        np.isnan(flat).sum(),
        (flat == np.inf).sum(),
        (flat == -np.inf).sum(),
    )
