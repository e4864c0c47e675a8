"""Arrays of parameters whose owners hold n-d blocks."""

from __future__ import annotations

import pytest

from gradtap.config import Settings
from gradtap.errors import UsageError
from gradtap.plan.chunks import rank_chunks
from gradtap.plan.planner import plan_session
from gradtap.types import Box, Ownership, ParamSpec, SessionPlan


def _plan(shape: tuple[int, ...], boxes: tuple[Box, ...], ranks: tuple[int, ...] | None = None) -> SessionPlan:
    spec = ParamSpec(name="w", shape=shape, dtype="float32")
    owned = Ownership(kind="boxes", ranks=ranks or tuple(range(len(boxes))), boxes=boxes)
    return plan_session([spec], [owned], world=len(boxes), settings=Settings())


def test_columns_of_a_matrix_are_one_array_with_a_chunk_for_each_row() -> None:
    """Two ranks with half of the columns each write every second run of the rows."""
    plan = _plan((3, 8), (((0, 3), (0, 4)), ((0, 3), (4, 8))))
    (array,) = plan.arrays
    assert (array.name, array.shape, array.chunk) == ("w", (3, 8), (1, 4))
    assert [(c.start, c.stop) for c in rank_chunks(plan, 1)] == [(4, 8), (12, 16), (20, 24)]


def test_a_mesh_of_two_dimensions_with_an_uneven_end() -> None:
    """Blocks may end short at the end of an axis, as torch's chunks do."""
    boxes = (((0, 3), (0, 2)), ((0, 3), (2, 4)), ((3, 5), (0, 2)), ((3, 5), (2, 4)))
    plan = _plan((5, 4), boxes)
    assert [(c.start, c.stop) for c in rank_chunks(plan, 3)] == [(14, 16), (18, 20)]


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ((((0, 3), (0, 4)), ((0, 3), (3, 8))), "cover the shape"),
        ((((0, 3), (0, 4)), ((0, 2), (4, 8))), "cover the shape"),
        ((((0, 2), (0, 4)), ((1, 3), (0, 4)), ((0, 2), (4, 8)), ((0, 2), (4, 8))), "cover the shape|regular grid"),
        ((((0, 3), (0, 4)), ((0, 3), (0, 4))), "regular grid"),
        ((((0, 3), (0, 8)),) * 1 + ((((0, 0), (0, 0))),), "cover the shape"),
    ],
)
def test_blocks_that_overlap_or_leave_gaps_are_refused(boxes: tuple[Box, ...], words: str) -> None:
    """Each element has one owner, or the plan is refused with the parameter's name."""
    with pytest.raises(UsageError, match=words):
        _plan((3, 8), boxes)
