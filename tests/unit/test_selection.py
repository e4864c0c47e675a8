"""The slice grammar, its refusals, and selections against NumPy on chosen cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradtap.boxes import flat_boxes
from gradtap.errors import SelectionError, UsageError
from gradtap.selection import Selection, parse_slice


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (None, ()),
        ("", ()),
        ("  ", ()),
        ("[]", ()),
        ("0:10, :, 3", (slice(0, 10), slice(None), 3)),
        ("[0:10, 3]", (slice(0, 10), 3)),
        ("...", (...,)),
        ("-1", (-1,)),
        ("::2", (slice(None, None, 2),)),
        ("::-1", (slice(None, None, -1),)),
        (" 1 : 2 : 3 , ... ,-4", (slice(1, 2, 3), ..., -4)),
        ("3,", (3,)),
        (":", (slice(None),)),
    ],
)
def test_grammar(text: str | None, key: tuple[Any, ...]) -> None:
    """A text means what it means between NumPy's brackets."""
    assert parse_slice(text) == key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "'a' in slice 'a'"),
        ("1.5", "'1.5'"),
        ("1,,2", "''"),
        (",", "''"),
        (", 1", "''"),
        ("1:2:3:4", "'1:2:3:4'"),
        ("None", "'None'"),
        ("1;2", "'1;2'"),
        ("[1", r"'\[1'"),
        ("[[1]]", r"'\[1\]'"),
        ("+1", r"'\+1'"),
        ("1_000", "'1_000'"),
        ("\u0663", "not understood"),
        ("9" * 5000, "not understood"),
        ("...,...", "more than one"),
        ("::0", "step of a slice is 0"),
        ("--1", "'--1'"),
        ("1 2", "'1 2'"),
    ],
)
def test_texts_outside_the_grammar(text: str, message: str) -> None:
    """Whatever else is refused, with the part that is not understood and a message of bearable length."""
    with pytest.raises(SelectionError, match=message) as caught:
        parse_slice(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "key",
    [
        (None,),
        (0, None),
        1.0,
        [0, 1],
        np.array([0, 1]),
        True,
        np.bool_(True),
        (slice(0.0, 2),),
        slice(None, True),
        ("1",),
        slice(None, None, 0),
        (..., ...),
        {},
    ],
)
def test_keys_that_are_not_basic_indexing(key: Any) -> None:
    """New axes, floats, masks, lists and arrays are no keys."""
    with pytest.raises(SelectionError):
        Selection.of(key, (4, 5))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ((4,), r"index 4 .*axis 0 of shape \(4, 5\); allowed are -4 to 3"),
        ((0, -6), r"index -6 .*axis 1 of shape \(4, 5\); allowed are -5 to 4"),
        ((0, 0, 0), r"3 axes, but shape \(4, 5\) has 2"),
        (":, ..., :, 0", r"3 axes, but shape \(4, 5\)"),
    ],
)
def test_keys_that_do_not_fit(key: Any, message: str) -> None:
    """An index out of range or an axis too many is refused with the shape."""
    with pytest.raises(SelectionError, match=message):
        Selection.of(key, (4, 5))


def test_index_into_an_empty_axis() -> None:
    """No index fits an axis of length 0."""
    with pytest.raises(SelectionError, match="the axis is empty"):
        Selection.of(0, (0,))


@pytest.mark.parametrize(
    ("key", "shape", "text"),
    [
        (None, (4, 5), ":, :"),
        (None, (), "..."),
        (-1, (4, 5), "3, :"),
        ("..., ::2", (4, 5), ":, 0:5:2"),
        ("..., 1:99", (4, 5), ":, 1:5"),
        ("::-1", (4,), "3::-1"),
        ("2:0:-1", (4,), "2:0:-1"),
        ("3:1", (4,), "0:0"),
        ("3:2:-1", (4,), "3:4"),
        (np.int64(2), (4,), "2"),
        (slice(np.int32(1), None), (4,), "1:4"),
    ],
)
def test_canonical_text(key: Any, shape: tuple[int, ...], text: str) -> None:
    """One selection has one text, with one part for each axis."""
    assert str(Selection.of(key, shape)) == text


def test_equal_selections() -> None:
    """Keys that select the same elements in the same order make equal selections with equal hashes."""
    a, b = Selection.of("-1, 0:4:3", (4, 5)), Selection.of((3, slice(0, 5, 3)), (4, 5))
    assert a == b and hash(a) == hash(b) and str(a) == str(b)
    assert a != Selection.of("-1, 0:3", (4, 5))


def test_sizes() -> None:
    """Shape, number of elements and bytes are those of the answer."""
    found = Selection.of("1:3, 0", (4, 5, 6))
    assert (found.shape, found.numel, found.nbytes(4)) == ((2, 6), 12, 48)
    assert (Selection.of((), ()).shape, Selection.of((), ()).numel) == ((), 1)
    assert Selection.of("2:2", (4, 5)).nbytes(8) == 0


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scatter_of_one_element(shape: tuple[int, ...]) -> None:
    """A parameter of one element is scattered whole, whatever its number of axes."""
    out = np.full(shape, np.nan, np.float32)
    Selection.of(None, shape).scatter(0, np.array([7.0], np.float32), out)
    np.testing.assert_array_equal(out, np.full(shape, 7.0, np.float32))


def test_scatter_into_a_scalar_answer() -> None:
    """One element of a matrix lands in a 0-d answer."""
    out = np.zeros(())
    picked = Selection.of("1, 2", (3, 4))
    picked.scatter(5, np.array([5.0, 6.0, 7.0]), out)
    assert out == 6.0
    assert picked.touches(6, 7)
    assert not picked.touches(0, 6) and not picked.touches(7, 12)


def test_scatter_converts() -> None:
    """The answer may have another dtype."""
    out = np.zeros(4, np.float64)
    Selection.of("::-1", (4,)).scatter(0, np.arange(4, dtype=np.float32), out)
    np.testing.assert_array_equal(out, np.array([3.0, 2.0, 1.0, 0.0]))


def test_touches_between_steps() -> None:
    """A range that falls between two strided indices touches nothing, though it lies among them."""
    picked = Selection.of("::4", (16,))
    assert not picked.touches(5, 8)
    assert picked.touches(5, 9)
    assert not picked.touches(4, 4)


def test_empty_selection_touches_nothing() -> None:
    """An empty selection needs no chunk."""
    assert not Selection.of("3:3", (4, 5)).touches(0, 20)
    assert not Selection.of(None, (0, 5)).touches(0, 0)


@pytest.mark.parametrize(("start", "size", "out"), [(18, 3, (4, 5)), (-1, 3, (4, 5)), (0, 3, (5, 4))])
def test_scatter_that_does_not_fit(start: int, size: int, out: tuple[int, ...]) -> None:
    """A range beyond the parameter or an answer of another shape is refused, not clipped."""
    with pytest.raises(UsageError):
        Selection.of(None, (4, 5)).scatter(start, np.zeros(size), np.zeros(out))


@pytest.mark.parametrize(
    ("start", "stop", "count"), [(0, 120, 1), (0, 60, 1), (7, 8, 1), (23, 97, 5), (7, 7, 0), (30, 36, 1)]
)
def test_few_boxes(start: int, stop: int, count: int) -> None:
    """A run takes at most twice as many boxes as axes, less one; whole rows take one."""
    assert len(list(flat_boxes((4, 5, 6), start, stop))) == count


def test_boxes_of_a_huge_array_are_few() -> None:
    """The work for a run of a trillion elements depends on the number of axes, not on the size."""
    assert len(list(flat_boxes((10**6, 10**3, 10**3), 12_345_678, 10**12 - 1))) == 5
