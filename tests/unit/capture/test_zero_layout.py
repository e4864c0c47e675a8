"""The arithmetic of ZeRO ownership, against counting element by element."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtap.capture import zero_layout

GROUP = st.tuples(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 4),
)


def _lay_out(sizes: list[tuple[int, int]], members: int, tail: int) -> tuple[list[tuple[int, int]], int]:
    places, at = [], 0
    for numel, gap in sizes:
        places.append((at, numel))
        at += numel + gap
    return places, -(-(at + tail) // members)


@given(GROUP)
@settings(deadline=None)
def test_bounds_give_every_element_to_the_member_whose_partition_holds_it(
    group: tuple[list[tuple[int, int]], int, int],
) -> None:
    """Element e of a parameter at offset o belongs to member (o + e) // partition, with gaps and tails of any size."""
    sizes, members, tail = group
    places, partition = _lay_out(sizes, members, tail)
    for offset, numel in places:
        bounds = zero_layout.owner_bounds(offset, numel, partition, members)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, members + 1)
        for member in range(members):
            owned = set(range(bounds[member], bounds[member + 1]))
            assert owned == {e for e in range(numel) if (offset + e) // partition == member}


@given(GROUP)
@settings(deadline=None)
def test_place_in_partition_agrees_with_the_bounds(group: tuple[list[tuple[int, int]], int, int]) -> None:
    """A member's range starts at the right position of its partition, and is empty where it owns nothing."""
    sizes, members, tail = group
    places, partition = _lay_out(sizes, members, tail)
    for offset, numel in places:
        bounds = zero_layout.owner_bounds(offset, numel, partition, members)
        for member in range(members):
            start, stop, position = zero_layout.place_in_partition(offset, numel, partition, member)
            assert stop - start == bounds[member + 1] - bounds[member]
            if start < stop:
                assert start == bounds[member]
                assert member * partition + position == offset + start


def test_running_offsets_leave_no_gap() -> None:
    """Without offsets from the engine, each parameter begins where the one before ends."""
    assert zero_layout.running_offsets([3, 1, 5]) == [0, 3, 4]


def test_cover_splits_over_fragments() -> None:
    """A range that meets three fragments is read from all three, in order, at the right places."""
    assert zero_layout.cover([4, 2, 5], 3, 5) == [(0, 3, 1), (1, 0, 2), (2, 0, 2)]


def test_cover_of_missing_elements_raises() -> None:
    """Fragments that end too early are an error, never a short gradient."""
    with pytest.raises(ValueError, match="do not cover 3 to 8"):
        zero_layout.cover([4, 2], 3, 5)
