"""Histograms counted from values, against NumPy's and against the stored kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
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


@pytest.mark.parametrize("bins", [0, -1, MOST_BINS + 1])
def test_a_number_of_bins_out_of_range_is_refused(bins: int) -> None:
    """With the range that is allowed."""
    with pytest.raises(UsageError, match="1 to 512"):
        count_linear(np.zeros(3), bins)


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
