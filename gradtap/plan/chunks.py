"""The chunks of a plan, by array or by rank, with their slots in the owner's journal record.

Only the chunks asked for are listed; all else is arithmetic.

Order of a rank's chunks: arrays in plan order, shard columns in C order, entries in C order. A chunk that lies
wholly in padding does not exist and has no slot.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import UsageError
from gradtap.plan.columns import all_chunks, column_chunks, unravel
from gradtap.types import ArrayPlan, ChunkPlan, PieceRange, SessionPlan


class _Same:
    """A plan as a cache key by identity: hashing its contents would cost more than most look-ups."""

    __slots__ = ("plan",)

    def __init__(self, plan: SessionPlan) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.plan is self.plan


class _Index:
    """First slot of each array for each rank, arrays of each parameter, and chunks of each rank."""

    def __init__(self, plan: SessionPlan) -> None:
        by_param: dict[int, list[int]] = defaultdict(list)
        self.bases: list[int | NDArray[np.int32]] = []
        self.totals = np.zeros(plan.world, np.int64)
        as_array: dict[int, NDArray[np.int64]] = {}
        for number, array in enumerate(plan.arrays):
            by_param[array.param].append(number)
            if _sole(array):
                rank = array.owners[0]
                self.bases.append(int(self.totals[rank]))
                self.totals[rank] += all_chunks(array)
                continue
            owners = as_array.setdefault(id(array.owners), np.asarray(array.owners, np.int64))
            self.bases.append(self.totals.astype(np.int32))
            counts = np.bincount(owners, weights=column_chunks(array), minlength=plan.world)
            self.totals += counts.astype(np.int64)
        self.by_param = {param: tuple(found) for param, found in by_param.items()}


def param_arrays(plan: SessionPlan, param: int) -> tuple[int, ...]:
    """Indices into `plan.arrays` of the arrays of parameter `param`, by their start; empty where it is not stored."""
    return _index(_Same(plan)).by_param.get(param, ())


def chunk_count(plan: SessionPlan, rank: int) -> int:
    """Number of chunks of `rank`, without listing them: checksums in its journal record."""
    _check_rank(plan, rank)
    return int(_index(_Same(plan)).totals[rank])


def array_chunks(plan: SessionPlan, array_index: int) -> tuple[ChunkPlan, ...]:
    """All chunks of one array, columns in C order, entries in C order. Cached for the last arrays asked for."""
    if not 0 <= array_index < len(plan.arrays):
        raise UsageError(f"array {array_index} is not in the plan; it has arrays 0 to {len(plan.arrays) - 1}")
    return _array_chunks(_Same(plan), array_index)


def rank_chunks(plan: SessionPlan, rank: int) -> tuple[ChunkPlan, ...]:
    """All chunks that `rank` writes, ordered by slot, which counts from 0 without gaps.

    Raises `UsageError` for a rank outside the plan's world.
    """
    _check_rank(plan, rank)
    return _rank_chunks(_Same(plan), rank)


def rank_pieces(plan: SessionPlan, rank: int) -> tuple[PieceRange, ...]:
    """Contiguous ranges that `rank` writes, by (param, start); adjacent ones of a parameter are joined."""
    found: list[PieceRange] = []
    for param, start, stop in sorted((plan.arrays[c.array].param, c.start, c.stop) for c in rank_chunks(plan, rank)):
        if found and found[-1].param == param and found[-1].stop == start:
            start = found.pop().start
        found.append(PieceRange(param=param, start=start, stop=stop))
    return tuple(found)


@lru_cache(maxsize=8)
def _index(key: _Same) -> _Index:
    return _Index(key.plan)


@lru_cache(maxsize=128)
def _array_chunks(key: _Same, array_index: int) -> tuple[ChunkPlan, ...]:
    array = key.plan.arrays[array_index]
    base = _index(key).bases[array_index]
    slots = {rank: base if isinstance(base, int) else int(base[rank]) for rank in set(array.owners)}
    found: list[ChunkPlan] = []
    for column, rank in enumerate(array.owners):
        before = len(found)
        found.extend(_column(array, array_index, column, slots[rank]))
        slots[rank] += len(found) - before
    return tuple(found)


@lru_cache(maxsize=8)
def _rank_chunks(key: _Same, rank: int) -> tuple[ChunkPlan, ...]:
    found: list[ChunkPlan] = []
    for array_index, array in enumerate(key.plan.arrays):
        for column in _columns_of(array.owners, rank):
            found.extend(_column(array, array_index, column, len(found)))
    return tuple(found)


def _column(array: ArrayPlan, array_index: int, column: int, slot: int) -> Iterator[ChunkPlan]:
    """Chunks of one shard column that hold elements; the first one has slot `slot`."""
    place = unravel(column, array.columns)
    numel, owner = array.chunk_numel, array.owners[column]
    for number, steps in enumerate(itertools.product(*_axes(array, place))):
        start = array.start + sum(step[1] for step in steps)
        yield ChunkPlan(
            array=array_index,
            column=place,
            entry=sum(step[0] for step in steps),
            start=start,
            stop=start + math.prod(step[2] for step in steps),
            numel=numel,
            owner=owner,
            slot=slot + number,
        )


def _axes(array: ArrayPlan, place: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    """For each axis, for each chunk position that holds elements: entry part, flat offset part, elements."""
    axes: list[list[tuple[int, int, int]]] = []
    entry_stride = flat_stride = 1
    parts = zip(array.shape, array.shard, array.chunk, array.shard_chunks, place, strict=True)
    for extent, shard, chunk, count, column in reversed(list(parts)):
        first = column * shard
        starts = range(first, min(first + shard, extent), chunk)
        axes.append([(i * entry_stride, at * flat_stride, min(chunk, extent - at)) for i, at in enumerate(starts)])
        entry_stride *= count
        flat_stride *= extent
    return axes[::-1]


def _columns_of(owners: tuple[int, ...], rank: int) -> Iterator[int]:
    at = -1
    try:
        while True:
            at = owners.index(rank, at + 1)
            yield at
    except ValueError:
        return


def _sole(array: ArrayPlan) -> bool:
    return len(array.owners) == 1 or array.owners.count(array.owners[0]) == len(array.owners)


def _check_rank(plan: SessionPlan, rank: int) -> None:
    if not 0 <= rank < plan.world:
        raise UsageError(f"rank {rank} is not in the plan; it has ranks 0 to {plan.world - 1}")
