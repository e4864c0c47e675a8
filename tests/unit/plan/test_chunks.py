"""Chunks of a small plan, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradtap.config import Settings
from gradtap.errors import UsageError
from gradtap.plan.chunks import array_chunks, chunk_count, param_arrays, rank_chunks, rank_pieces
from gradtap.plan.planner import plan_session
from gradtap.types import ArrayPlan, ChunkPlan, Ownership, ParamSpec, PieceRange, SessionPlan

PARAMS = (
    ParamSpec(name="a", shape=(5, 3), dtype="float32"),
    ParamSpec(name="b", shape=(2,), dtype="float32"),
    ParamSpec(name="c", shape=(), dtype="float32"),
)


@pytest.fixture
def plan() -> SessionPlan:
    """Array a: two columns of 2 x 2 entries, some of them padding; b and c one entry each."""
    one = ArrayPlan(
        name="a", param=0, start=0, stop=15, shape=(5, 3), dtype="float32",
        time=8, shard=(4, 4), chunk=(1, 2), owners=(1, 0),
    )  # fmt: skip
    two = replace(one, name="b", param=1, stop=2, shape=(2,), shard=(2,), chunk=(2,), owners=(1,))
    three = replace(one, name="c", param=2, stop=1, shape=(), shard=(), chunk=(), owners=(0,))
    return SessionPlan(world=2, params=PARAMS, arrays=(one, two, three))


def test_array_chunks(plan: SessionPlan) -> None:
    """Chunks come by column and entry, cut at the array's end; those in padding alone do not exist."""
    found = [(c.column, c.entry, c.start, c.stop, c.owner, c.slot) for c in array_chunks(plan, 0)]
    assert found == [
        *(((0, 0), 2 * r + h, 3 * r + 2 * h, 3 * r + 2 + h, 1, 2 * r + h) for r in range(4) for h in range(2)),
        ((1, 0), 0, 12, 14, 0, 0),
        ((1, 0), 1, 14, 15, 0, 1),
    ]
    assert {c.numel for c in array_chunks(plan, 0)} == {2}


def test_slots_go_on(plan: SessionPlan) -> None:
    """A rank's slots count on from array to array."""
    assert array_chunks(plan, 1)[0].slot == 8
    scalar = ChunkPlan(array=2, column=(), entry=0, start=0, stop=1, numel=1, owner=0, slot=2)
    assert array_chunks(plan, 2) == (scalar,)
    assert [c.slot for c in rank_chunks(plan, 1)] == list(range(9)) and chunk_count(plan, 1) == 9
    assert rank_chunks(plan, 0)[-1] == scalar and chunk_count(plan, 0) == 3


def test_rank_pieces(plan: SessionPlan) -> None:
    """Neighbouring chunks of one parameter and rank are one piece."""
    assert rank_pieces(plan, 1) == (PieceRange(param=0, start=0, stop=12), PieceRange(param=1, start=0, stop=2))
    assert rank_pieces(plan, 0) == (PieceRange(param=0, start=12, stop=15), PieceRange(param=2, start=0, stop=1))


def test_param_arrays() -> None:
    """Arrays of a parameter come by start; a parameter that is not stored has none."""
    params = [*PARAMS[:2], ParamSpec(name="d", shape=(4,), dtype="float32", status="frozen")]
    owned = [Ownership(kind="cuts", ranks=(0, 1), bounds=(0, 4, 15)), Ownership(kind="whole", ranks=(0,)), None]
    plan = plan_session(params, owned, world=2, settings=Settings())
    assert [param_arrays(plan, i) for i in range(3)] == [(0, 1), (2,), ()]


def test_cached(plan: SessionPlan) -> None:
    """Asking again gives the same object: a reader asks for each read."""
    assert array_chunks(plan, 0) is array_chunks(plan, 0) and rank_chunks(plan, 1) is rank_chunks(plan, 1)


def test_out_of_range(plan: SessionPlan) -> None:
    """A rank or an array that the plan does not have is an error, not an empty answer."""
    for ask in (rank_chunks, rank_pieces, chunk_count, array_chunks):
        for wrong in (-1, 3):
            with pytest.raises(UsageError, match="not in the plan"):
                ask(plan, wrong)
