"""Arrays of parameters whose owner follows from the element: whole, rows, flat, cuts. Replicas are elsewhere.

N-d blocks are in `plan.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtap.plan.arrays import ArrayMaker
from gradtap.plan.blocks import block_array
from gradtap.plan.layout import Grid, shared_grid, sole_grid
from gradtap.plan.naming import flat_name, piece_name
from gradtap.plan.ownership import OwnedRange, owned_ranges
from gradtap.types import ArrayPlan, Ownership, ParamSpec

_COLUMNS_PER_OWNER = 4


def owned_arrays(maker: ArrayMaker, spec: ParamSpec, owned: Ownership) -> list[ArrayPlan]:
    """The arrays of one stored parameter: N-d where a grid fits the owners' ranges, else flat, else pieces."""
    if owned.kind == "boxes":
        return [block_array(maker, spec, owned)]
    ranges = owned_ranges(spec, owned)
    if len(ranges) == 1:
        grid = sole_grid(spec.shape, maker.itemsize, maker.limits)
        return [maker.array(maker.base, grid, (ranges[0].rank,) * math.prod(grid.columns))]
    array = _blocks(maker, spec.shape, maker.base, ranges)
    if array is None and owned.kind == "flat":
        array = _blocks(maker, (spec.numel,), flat_name(maker.base), ranges)
    return [array] if array is not None else [_piece(maker, each) for each in ranges]


def _blocks(maker: ArrayMaker, shape: tuple[int, ...], name: str, ranges: Sequence[OwnedRange]) -> ArrayPlan | None:
    """One array whose shard columns end at each boundary between owners; None where no regular grid does."""
    row = math.prod(shape[1:])
    step = math.gcd(*(each.start for each in ranges[1:]))
    if step % row:
        return None
    extent = step // row
    if -(-shape[0] // extent) > _COLUMNS_PER_OWNER * len(ranges):
        return None
    grid = shared_grid(shape, extent, maker.itemsize, maker.limits)
    return None if grid is None else maker.array(name, grid, _column_owners(grid, row, ranges))


def _column_owners(grid: Grid, row: int, ranges: Sequence[OwnedRange]) -> tuple[int, ...]:
    first, *others = grid.columns
    width = math.prod(others)
    owners: list[int] = []
    for each in ranges:
        stop = min(first, -(-each.stop // (grid.shard[0] * row)))
        owners.extend([each.rank] * (stop * width - len(owners)))
    return tuple(owners)


def _piece(maker: ArrayMaker, each: OwnedRange) -> ArrayPlan:
    grid = sole_grid((each.stop - each.start,), maker.itemsize, maker.limits)
    owners = (each.rank,) * math.prod(grid.columns)
    return maker.array(piece_name(maker.base, each.start), grid, owners, start=each.start)
