"""Where a DTensor's placements put its elements: rank to n-d block, and from that who writes what. No communication.

Placements are applied from the left, as torch does: each splits what the ones before it have left on its axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import UnsupportedError
from gradtap.types import Box, Ownership

_Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One mesh axis: `axis` is the tensor's axis that it splits, None for replicas.

    `factor` above 1 is torch's `_StridedShard`: the axis is in that many parts already, and each part is split.
    """

    axis: int | None
    factor: int = 1


def split_of(placement: Any, name: str) -> Split:
    """The `Split` of a torch placement of parameter `name`. Raises `UnsupportedError` for Partial and unknown ones."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return Split(axis=None)
    if kind == "Shard":
        return Split(axis=int(placement.dim))
    if kind == "_StridedShard":
        return Split(axis=int(placement.dim), factor=int(placement.split_factor))
    raise UnsupportedError(
        f"parameter {name} is placed as {placement}; only Shard and Replicate hold true values: a partial sum is no "
        "gradient. Redistribute it to Shard or Replicate"
    )


def block_of(shape: Sequence[int], mesh: Sequence[int], place: Sequence[int], splits: Sequence[Split]) -> Box | None:
    """The block that the rank at `place` of a mesh of shape `mesh` holds; None where its elements are no one block."""
    spans: list[_Spans] = [((0, extent),) for extent in shape]
    for count, at, split in zip(mesh, place, splits, strict=True):
        if split.axis is not None:
            spans[split.axis] = _part(spans[split.axis], count, at, split.factor)
    if any(len(each) > 1 for each in spans):
        return None
    return tuple(each[0] if each else (0, 0) for each in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which block each rank holds (`held`; those with nothing are left out), and all holders of each block."""

    held: dict[int, Box]
    holders: dict[Box, list[int]]


def layout_of(shape: Sequence[int], ranks: NDArray[np.int64], splits: Sequence[Split], name: str) -> Layout:
    """The blocks of parameter `name` over a mesh of `ranks`. Raises `UnsupportedError` where one is no one block."""
    held: dict[int, Box] = {}
    holders: dict[Box, list[int]] = {}
    for place in itertools.product(*map(range, ranks.shape)):
        box = block_of(shape, ranks.shape, place, splits)
        if box is None:
            raise UnsupportedError(
                f"parameter {name} of shape {tuple(shape)} is split unevenly on one axis by two mesh dimensions, so a "
                "rank holds rows that are not together; make the axis divisible by both"
            )
        if all(stop > start for start, stop in box):
            held[int(ranks[place])] = box
            holders.setdefault(box, []).append(int(ranks[place]))
    return Layout(held=held, holders=holders)


def owners_of(shape: Sequence[int], layout: Layout, turn: int) -> Ownership:
    """Who writes a parameter.

    Of replicas one writes: the one in turn, so that their loads are about equal. Where all ranks hold all of it, each
    writes a share.
    """
    whole = tuple((0, extent) for extent in shape)
    if list(layout.holders) == [whole]:
        return _of_replicas(layout.holders[whole])
    return _of_boxes(shape, sorted((box, some[turn % len(some)]) for box, some in layout.holders.items()))


def runs_of(box: Box, shape: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """The flat starts, ascending, of the contiguous runs of a block within `shape`, and the length of each."""
    axis = max((i for i, (span, extent) in enumerate(zip(box, shape, strict=True)) if span != (0, extent)), default=0)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    starts = np.zeros(1, np.int64)
    for (start, stop), stride in list(zip(box, strides, strict=True))[:axis]:
        starts = (starts[:, None] + np.arange(start, stop, dtype=np.int64) * stride).ravel()
    if not shape:
        return starts, 1
    start, stop = box[axis]
    return starts + start * strides[axis], (stop - start) * strides[axis]


def _of_replicas(ranks: list[int]) -> Ownership:
    if len(ranks) == 1:
        return Ownership(kind="whole", ranks=(ranks[0],))
    return Ownership(kind="replicated", ranks=tuple(sorted(ranks)))


def _of_boxes(shape: Sequence[int], chosen: Sequence[tuple[Box, int]]) -> Ownership:
    ranks = tuple(rank for _, rank in chosen)
    boxes = tuple(box for box, _ in chosen)
    if all(span == (0, extent) for box in boxes for span, extent in zip(box[1:], shape[1:], strict=True)):
        row = math.prod(shape[1:])
        bounds = (*(box[0][0] * row for box in boxes), math.prod(shape))
        return Ownership(kind="cuts", ranks=ranks, bounds=bounds)
    return Ownership(kind="boxes", ranks=ranks, boxes=boxes)


def _part(spans: _Spans, count: int, at: int, factor: int) -> _Spans:
    """Part `at` of `count`; with a factor, that part of each of `factor` parts."""
    total = sum(stop - start for start, stop in spans)
    if factor == 1:
        return _taken(spans, *_chunk(total, count, at))
    found: list[tuple[int, int]] = []
    for number in range(factor):
        start, stop = _chunk(total, factor, number)
        inner = _chunk(stop - start, count, at)
        found.extend(_taken(spans, start + inner[0], start + inner[1]))
    return _joined(found)


def _chunk(total: int, count: int, at: int) -> tuple[int, int]:
    # As torch.chunk: equal parts, the last ones short or empty.
    size = -(-total // count)
    return min(at * size, total), min((at + 1) * size, total)


def _taken(spans: _Spans, start: int, stop: int) -> _Spans:
    found, before = [], 0
    for first, last in spans:
        low, high = max(start, before), min(stop, before + last - first)
        if low < high:
            found.append((first + low - before, first + high - before))
        before += last - first
    return _joined(found)


def _joined(spans: Sequence[tuple[int, int]]) -> _Spans:
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)
