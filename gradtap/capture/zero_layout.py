"""Who owns which elements under ZeRO-1 and ZeRO-2: pure arithmetic on offsets, no torch.

The parameters of a group lie one after another in a flat buffer (with gaps where the engine aligns them); member r of
the data-parallel group owns `partition` elements of it, from `r * partition`.
"""

from __future__ import annotations

from collections.abc import Sequence


def running_offsets(numels: Sequence[int]) -> list[int]:
    """Offsets of parameters that lie one after another without gaps."""
    offsets, total = [], 0
    for numel in numels:
        offsets.append(total)
        total += numel
    return offsets


def owner_bounds(offset: int, numel: int, partition: int, members: int) -> tuple[int, ...]:
    """Bounds of the `members` owners' ranges of a parameter: member i holds elements `[b[i], b[i + 1])`."""
    return tuple(min(max(member * partition - offset, 0), numel) for member in range(members + 1))


def place_in_partition(offset: int, numel: int, partition: int, member: int) -> tuple[int, int, int]:
    """(start, stop, position): elements `[start, stop)` of the parameter lie at `position` of the member's partition.

    `start == stop` where the member holds nothing of it.
    """
    left, right = member * partition, (member + 1) * partition
    first, last = max(offset, left), min(offset + numel, right)
    if first >= last:
        return 0, 0, 0
    return first - offset, last - offset, first - left


def cover(sizes: Sequence[int], position: int, count: int) -> list[tuple[int, int, int]]:
    """Pieces of consecutive fragments of `sizes` elements that cover `[position, position + count)`.

    Each is (fragment, offset within it, elements). Raises `ValueError` where the fragments end before.
    """
    pieces, left = [], 0
    for index, size in enumerate(sizes):
        first, last = max(position, left), min(position + count, left + size)
        if first < last:
            pieces.append((index, first - left, last - first))
        left += size
    if sum(piece[2] for piece in pieces) != count:
        raise ValueError(f"fragments of {left} elements in all do not cover {position} to {position + count}")
    return pieces
