"""Selections of random keys from random shapes, assembled from random pieces, are NumPy's."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from gradtap.boxes import flat_boxes
from gradtap.selection import Selection, parse_slice

SHAPES = array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


@st.composite
def _shapes_and_keys(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(SHAPES)
    return shape, draw(basic_indices(shape, allow_newaxis=False, allow_ellipsis=True))


@st.composite
def _partitions(draw: st.DrawFn, numel: int) -> list[tuple[int, int]]:
    cuts = draw(st.lists(st.integers(0, numel), max_size=8))
    return list(pairwise([0, *sorted(cuts), numel]))


@given(_shapes_and_keys(), st.data())
def test_scattered_pieces_are_the_numpy_answer(case: tuple[tuple[int, ...], Any], data: st.DataObject) -> None:
    """Pieces of a partition, scattered in any order, give array[key]; untouched ones change nothing."""
    shape, key = case
    array = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    flat = array.reshape(-1)
    picked = Selection.of(key, shape)
    expected = array[key]
    out = np.full(picked.shape, -1.0)
    for start, stop in data.draw(_partitions(array.size).flatmap(st.permutations)):
        wanted = np.isin(flat[start:stop], expected)
        assert picked.touches(start, stop) == bool(wanted.any())
        before = out.copy()
        picked.scatter(start, flat[start:stop], out)
        if not wanted.any():
            np.testing.assert_array_equal(out, before)
    assert picked.shape == np.shape(expected)
    np.testing.assert_array_equal(out, expected)


@given(_shapes_and_keys())
def test_text_round_trip(case: tuple[tuple[int, ...], Any]) -> None:
    """The canonical text parses back to the same selection, and so does its NumPy key."""
    shape, key = case
    picked = Selection.of(key, shape)
    assert Selection.of(parse_slice(str(picked)), shape) == picked
    assert Selection.of(f"[{picked}]", shape) == picked
    assert Selection.of(picked.key, shape) == picked
    assert str(Selection.of(str(picked), shape)) == str(picked)


@given(_shapes_and_keys())
def test_hull_bounds_the_selection(case: tuple[tuple[int, ...], Any]) -> None:
    """The hull runs from the first selected element to the last."""
    shape, key = case
    picked = np.arange(math.prod(shape)).reshape(shape)[key]
    expected = (int(np.min(picked)), int(np.max(picked)) + 1) if np.size(picked) else (0, 0)
    assert Selection.of(key, shape).hull == expected


@given(SHAPES, st.data())
def test_boxes_are_the_run(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The boxes of a run hold its elements, each once and in order, and are few."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    array = np.arange(numel).reshape(shape)
    boxes = list(flat_boxes(shape, start, stop))
    found = [array[tuple(map(slice, box.lows, box.highs))].reshape(-1) for box in boxes]
    np.testing.assert_array_equal(np.concatenate([np.zeros(0, int), *found]), np.arange(start, stop))
    assert [box.offset + start for box in boxes] == [int(part[0]) for part in found]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.text(alphabet="0123456789:,.-[] aN", max_size=30))
def test_any_text_parses_or_is_refused(text: str) -> None:
    """No text makes the parser fail in another way than by refusing it."""
    try:
        key = parse_slice(text)
    except ValueError:
        return
    assert all(part is ... or isinstance(part, int | slice) for part in key)
