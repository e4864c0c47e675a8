"""The one array of a parameter whose owners hold n-d blocks that cut other axes than the first.

Chunks stay contiguous in the parameter, so a block of columns has a chunk for each of its rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from gradtap.errors import UsageError
from gradtap.plan.arrays import ArrayMaker
from gradtap.plan.layout import Grid, divisors, shared_grid
from gradtap.types import ArrayPlan, Ownership, ParamSpec

_MAX_COLUMNS = 1 << 20


def block_array(maker: ArrayMaker, spec: ParamSpec, owned: Ownership) -> ArrayPlan:
    """One n-d array whose shard columns end at each boundary between owners, on every axis.

    Raises `UsageError` where the blocks do not lie on one regular grid, or overlap.
    """
    extents = _extents(spec, owned)
    axis = max((i for i, extent in enumerate(extents) if extent < spec.shape[i]), default=0)
    tail = shared_grid(spec.shape[axis:], extents[axis], maker.itemsize, maker.limits)
    if tail is None:
        raise _irregular(spec)
    most = maker.limits.column_chunks(math.prod(tail.chunk) * maker.itemsize) // tail.entries
    head = _head(spec.shape[:axis], extents[:axis], most)
    grid = Grid(shape=spec.shape, shard=(*head, *tail.shard), chunk=(*(1 for _ in head), *tail.chunk))
    if math.prod(grid.columns) > _MAX_COLUMNS:
        raise _irregular(spec)
    return maker.array(maker.base, grid, _owners(spec, owned, grid))


def _extents(spec: ParamSpec, owned: Ownership) -> list[int]:
    """For each axis the greatest length of which every block's start is a multiple."""
    starts = ([box[axis][0] for box in owned.boxes] for axis in range(len(spec.shape)))
    return [math.gcd(*found) or extent for found, extent in zip(starts, spec.shape, strict=True)]


def _head(shape: Sequence[int], extents: Sequence[int], most: int) -> tuple[int, ...]:
    """Rows of one shard column on the axes before the one that chunks cut: as many as fit, the last axis first."""
    found: list[int] = []
    whole = True
    for length, extent in zip(reversed(shape), reversed(extents), strict=True):
        fitting = max(each for each in divisors(extent) if each <= max(1, most)) if whole else 1
        found.append(fitting)
        whole, most = whole and fitting == length, most // fitting
    return tuple(reversed(found))


def _owners(spec: ParamSpec, owned: Ownership, grid: Grid) -> tuple[int, ...]:
    owners = np.full(grid.columns, -1, np.int64)
    for rank, box in zip(owned.ranks, owned.boxes, strict=True):
        place = tuple(slice(a // s, -(-b // s)) for (a, b), s in zip(box, grid.shard, strict=True))
        ends = ((b, n, s) for (_, b), n, s in zip(box, spec.shape, grid.shard, strict=True))
        if any(b % s and b != n for b, n, s in ends) or (owners[place] >= 0).any():
            raise _irregular(spec)
        owners[place] = rank
    if (owners < 0).any():
        raise _irregular(spec)
    return tuple(itertools.chain.from_iterable(owners.reshape(1, -1).tolist()))


def _irregular(spec: ParamSpec) -> UsageError:
    return UsageError(
        f"the owners' blocks of {spec.name!r} (shape {spec.shape}) do not lie on one regular grid; shard it on "
        "dimension 0, or evenly"
    )
