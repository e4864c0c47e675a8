"""DTensor placements to owners: as torch computes them, and each element written once by one that holds it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from gradtap.capture.dtensor_layout import block_of, layout_of, owners_of, runs_of, split_of
from gradtap.config import Settings
from gradtap.errors import UnsupportedError
from gradtap.plan.chunks import rank_chunks
from gradtap.plan.planner import plan_session
from gradtap.types import ParamSpec

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """A shape, a mesh and placements, strided shards with the factor that FSDP gives them."""
    shape = draw(SHAPES)
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    placements: list[Any] = [
        draw(st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))) for _ in mesh
    ]
    if len(mesh) == 2 and isinstance(placements[0], Shard) and placements[0] == placements[1] and mesh[1] > 1:
        placements[0] = _StridedShard(placements[0].dim, split_factor=mesh[1])
    return shape, mesh, placements


@given(layouts())
def test_blocks_are_those_of_torch(layout: tuple[tuple[int, ...], tuple[int, ...], list[Any]]) -> None:
    """Shape and offset of every rank's block equal torch's own."""
    shape, mesh, placements = layout
    splits = [split_of(placement, "w") for placement in placements]
    for place in itertools.product(*map(range, mesh)):
        box = block_of(shape, mesh, place, splits)
        if box is None:
            continue
        local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
        assert tuple(stop - start for start, stop in box) == local
        if math.prod(local):
            assert tuple(start for start, _ in box) == offset


@given(layouts(), st.integers(0, 5))
def test_each_element_is_written_once_by_one_that_holds_it(
    drawn: tuple[tuple[int, ...], tuple[int, ...], list[Any]], turn: int
) -> None:
    """The chunks of all ranks cover the parameter once, each within its rank's runs."""
    shape, mesh, placements = drawn
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    try:
        layout = layout_of(shape, ranks, [split_of(each, "w") for each in placements], "w")
    except UnsupportedError:
        assume(False)
    owned = owners_of(shape, layout, turn)
    spec = ParamSpec(name="w", shape=shape, dtype="float32")
    plan = plan_session([spec], [owned], world=math.prod(mesh), settings=Settings())
    count = np.zeros(spec.numel, np.int64)
    for rank in range(plan.world):
        mine = np.zeros(spec.numel, np.bool_)
        if rank in layout.held:
            starts, length = runs_of(layout.held[rank], shape)
            for start in starts:
                mine[start : start + length] = True
        for chunk in rank_chunks(plan, rank):
            count[chunk.start : chunk.stop] += 1
            assert mine[chunk.start : chunk.stop].all()
    assert (count == 1).all()


def test_runs_of_a_block() -> None:
    """A block of two rows and two columns in a matrix of four columns is two runs of two."""
    starts, length = runs_of(((1, 3), (2, 4)), (3, 4))
    assert (starts.tolist(), length) == ([6, 10], 2)


def test_a_partial_sum_is_no_placement() -> None:
    """A Partial placement is refused by the parameter's name."""
    from torch.distributed.tensor import Partial

    with pytest.raises(UnsupportedError, match="w is placed as"):
        split_of(Partial(), "w")
