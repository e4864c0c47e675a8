"""Where values fall among the 193 bins."""

from __future__ import annotations

import numpy as np
import pytest

from gradtap.encode.histogram import BINS, ZERO_BIN, bin_edges, tally


def _only_bin(value: float, dtype: type) -> int:
    hist = tally(np.array([value], dtype)).hist
    (place,) = np.flatnonzero(hist)
    return int(place)


def test_layout() -> None:
    """There are 193 bins, and zero is the middle one."""
    assert (BINS, ZERO_BIN) == (193, 96)
    assert tally(np.zeros(1, np.float32)).hist.shape == (193,)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("value", "place"),
    [
        (0.0, 96),
        (-0.0, 96),
        (1.0, 161),
        (1.999, 161),
        (2.0, 162),
        (0.999, 160),
        (-1.0, 31),
        (2.0**31, 192),
        (2.0**100, 192),
        (2.0**30, 191),
        (-(2.0**31), 0),
        (-(2.0**100), 0),
        (2.0**-64, 97),
        (2.0**-63, 98),
        (2.0**-120, 97),
        (-(2.0**-64), 95),
        (-(2.0**-100), 95),
        (1e-44, 97),
        (-1e-44, 95),
    ],
)
def test_bins(value: float, place: int, dtype: type) -> None:
    """A value lies in the bin of its sign and of floor(log2|x|) from -64 to 31; subnormals in the lowest."""
    assert _only_bin(value, dtype) == place


def test_edges_are_those_of_the_bins() -> None:
    """Each positive bin begins at its lower edge and ends before the next; negative bins mirror it."""
    edges = bin_edges()
    assert edges.shape == (194,)
    assert (np.diff(edges[:97]) > 0).all() and (np.diff(edges[97:]) > 0).all()
    assert (edges[0], edges[96], edges[97], edges[193]) == (-np.inf, 0.0, 0.0, np.inf)
    assert not np.signbit(edges[97])
    for place in range(98, 193):
        assert _only_bin(edges[place], np.float64) == place
        assert _only_bin(np.nextafter(edges[place], 0), np.float64) == place - 1
    for place in range(1, 96):
        assert _only_bin(edges[place], np.float64) == place - 1
        assert _only_bin(np.nextafter(edges[place], 0), np.float64) == place


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values_are_counted_apart(dtype: type) -> None:
    """NaN and infinities are in no bin; zeros of both signs are counted, and so is what lies beyond one block."""
    values = np.ones(100_000, dtype)
    values[[3, 40_000, 99_999]] = np.nan
    values[[5, 6]] = np.inf
    values[70_000] = -np.inf
    values[[0, 1]] = (0.0, -0.0)
    values[2] = 1e-42
    counts = tally(values)
    assert (counts.zeros, counts.nan, counts.inf_positive, counts.inf_negative, counts.inf) == (2, 3, 2, 1, 3)
    assert int(counts.hist.sum()) == 100_000 - 6
    assert (counts.hist[ZERO_BIN], counts.hist[97], counts.hist[161]) == (2, 1, 100_000 - 9)


def test_nan_with_sign_bit() -> None:
    """A NaN whose sign bit is set is a NaN, and no infinity."""
    counts = tally(np.array([0xFFC00001, 0x7F800001, 0xFF800000], np.uint32).view(np.float32))
    assert (counts.nan, counts.inf_positive, counts.inf_negative) == (2, 0, 1)


def test_nothing() -> None:
    """An empty array has an empty histogram."""
    assert tally(np.zeros(0, np.float32)).hist.sum() == 0
