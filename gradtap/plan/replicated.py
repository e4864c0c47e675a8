"""Parameters that several ranks hold whole: which rank writes which shard column. One writer for each, by bytes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, MutableMapping, Sequence

from gradtap.plan.arrays import ArrayMaker
from gradtap.plan.columns import column_numels
from gradtap.plan.layout import Grid, sole_grid
from gradtap.types import ArrayPlan, ParamSpec

_PARTS_PER_RANK = 4
_LEAST_COLUMN_CHUNKS = 8


def replicated_arrays(
    params: Sequence[tuple[ArrayMaker, ParamSpec]], ranks: Iterable[int], loads: MutableMapping[int, int]
) -> list[ArrayPlan]:
    """One N-d array for each of `params`, all held by all of `ranks`.

    Columns go, largest first, to the rank with the fewest bytes so far; `loads` (rank -> bytes of a capture)
    says where to begin and is brought up to date.
    """
    grids = _grids(params, len(set(ranks)))
    columns: list[tuple[int, int, int]] = []
    for index, ((maker, _), grid) in enumerate(zip(params, grids, strict=True)):
        columns.extend((-n * maker.itemsize, index, c) for c, n in enumerate(column_numels(grid)))
    owners = [[0] * math.prod(grid.columns) for grid in grids]
    heap = [(loads.get(rank, 0), rank) for rank in set(ranks)]
    heapq.heapify(heap)
    for negative, index, column in sorted(columns):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load - negative, rank))
        owners[index][column] = rank
    loads.update({rank: load for load, rank in heap})
    return [
        maker.array(maker.base, grid, tuple(own)) for (maker, _), grid, own in zip(params, grids, owners, strict=True)
    ]


def _grids(params: Sequence[tuple[ArrayMaker, ParamSpec]], ranks: int) -> list[Grid]:
    if ranks == 1:
        return [sole_grid(spec.shape, maker.itemsize, maker.limits) for maker, spec in params]
    # Columns far below a rank's fair share, so that the fullest rank is near the mean; but not so small
    # that a model of moderate size becomes thousands of files.
    fair = sum(spec.numel * maker.itemsize for maker, spec in params) // ranks
    return [
        sole_grid(
            spec.shape,
            maker.itemsize,
            maker.limits,
            max(fair // _PARTS_PER_RANK, _LEAST_COLUMN_CHUNKS * maker.limits.chunk),
        )
        for maker, spec in params
    ]
