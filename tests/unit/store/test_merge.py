"""Ranks' rows become one row: checked against NumPy on the whole values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradtap.encode.summary import summarize
from gradtap.store.ledger_fields import FIELDS_BY_NAME, SUMMARY_STATS, stat_dtype, stat_fill
from gradtap.store.merge import merge_field, merge_stats


def rows_of(pieces: list[np.ndarray]) -> dict[str, np.ndarray]:
    """One row of statistics of the pieces side by side."""
    summaries = [summarize(piece, "full") for piece in pieces]
    return {stat: np.array([[getattr(s, stat) for s in summaries]]).astype(stat_dtype(stat)) for stat in SUMMARY_STATS}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 2**16))
def test_pieces_merge_to_what_the_whole_gives(sizes: list[int], seed: int) -> None:
    """However a parameter is cut, the merged statistics are those of the whole."""
    whole = np.random.default_rng(seed).standard_normal(sum(sizes)).astype(np.float32)
    pieces = np.split(whole, np.cumsum(sizes)[:-1])
    merged = merge_stats(rows_of(pieces), np.zeros(len(sizes), int), np.array(sizes, float), 1)
    direct = rows_of([whole])
    for stat in SUMMARY_STATS:
        assert np.allclose(merged[stat], direct[stat], rtol=1e-12, atol=1e-12), stat


def test_parameters_do_not_mix() -> None:
    """Pieces of several parameters, interleaved over ranks, go to their own."""
    a, b = np.array([3.0, 4.0], np.float32), np.array([1.0], np.float32)
    merged = merge_stats(rows_of([a, b, b]), np.array([1, 0, 0]), np.array([2.0, 1.0, 1.0]), 2)
    assert np.allclose(merged["l2"], [[np.sqrt(2), 5.0]])
    assert np.array_equal(merged["hist"].sum(axis=2), [[2, 2]])


def test_nan_and_infinity_stay_visible() -> None:
    """A NaN in one piece makes the whole NaN and is counted; an infinity makes the norm infinite."""
    pieces = [np.array([np.nan, 1.0], np.float32), np.array([2.0], np.float32), np.array([np.inf], np.float32)]
    merged = merge_stats(rows_of(pieces), np.array([0, 0, 1]), np.array([2.0, 1.0, 1.0]), 2)
    assert np.isnan(merged["l2"][0, 0]) and np.isnan(merged["absmax"][0, 0]) and merged["nan"][0, 0] == 1
    assert merged["l2"][0, 1] == np.inf and merged["inf"][0, 1] == 1


def test_a_piece_not_taken_makes_the_whole_not_taken() -> None:
    """Where one piece was left out, sums of the others are not passed off as the parameter's."""
    rows = rows_of([np.array([1.0], np.float32), np.array([1.0], np.float32)])
    for stat, values in rows.items():
        values[0, 1] = stat_fill(stat)
    merged = merge_stats(rows, np.zeros(2, int), np.ones(2), 1)
    assert np.isnan(merged["l2"][0, 0]) and np.isnan(merged["std"][0, 0])
    assert merged["zeros"][0, 0] == -1 and (merged["hist"] == -1).all()


def test_ledger_fields_merge_by_their_rule() -> None:
    """Sums, maxima, flags and the first touch over ranks."""
    pair = [np.array([1, 5]), np.array([4, 2])]
    assert list(merge_field(FIELDS_BY_NAME["raw_bytes"], pair)) == [5, 7]
    assert list(merge_field(FIELDS_BY_NAME["micro_seen"], pair)) == [4, 5]
    assert list(merge_field(FIELDS_BY_NAME["flags"], [p.astype(np.uint64) for p in pair])) == [5, 7]
    assert list(merge_field(FIELDS_BY_NAME["step"], pair)) == [1, 5]
    touched = [np.array([[-1, 2, -1]], np.int32), np.array([[1, 0, -1]], np.int32)]
    assert merge_field(FIELDS_BY_NAME["touched"], touched).tolist() == [[1, 0, -1]]


def test_unknown_seconds_do_not_hide_known_ones() -> None:
    """A rank that does not know how long it took does not make the merged value unknown."""
    seconds = [np.array([np.nan, np.nan]), np.array([0.5, np.nan])]
    merged = merge_field(FIELDS_BY_NAME["seconds"], seconds)
    assert merged[0] == 0.5 and np.isnan(merged[1])
