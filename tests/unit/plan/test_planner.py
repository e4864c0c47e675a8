"""Ownership to arrays on known cases."""

from __future__ import annotations

from collections import Counter

import pytest

from gradtap.config import Settings
from gradtap.errors import UsageError
from gradtap.plan.chunks import rank_chunks
from gradtap.plan.planner import plan_session
from gradtap.types import ArrayPlan, Ownership, OwnershipKind, ParamSpec, ParamStatus, SessionPlan


def spec(name: str, *shape: int, dtype: str = "float32", status: ParamStatus = "captured") -> ParamSpec:
    """A parameter."""
    return ParamSpec(name=name, shape=shape, dtype=dtype, status=status)


def plan_one(shape: tuple[int, ...], kind: OwnershipKind, ranks: int, bounds: tuple[int, ...] = ()) -> SessionPlan:
    """The plan of one parameter "w" on ranks from 0."""
    owned = Ownership(kind=kind, ranks=tuple(range(ranks)), bounds=bounds)
    return plan_session([spec("w", *shape)], [owned], world=ranks, settings=Settings())


def names(plan: SessionPlan) -> list[str]:
    """Array names, in plan order."""
    return [array.name for array in plan.arrays]


def test_whole() -> None:
    """A parameter of one rank is one array of its own shape, all columns its rank's."""
    owned = Ownership(kind="whole", ranks=(2,))
    plan = plan_session([spec("w", 40, 50, dtype="bfloat16")], [owned], world=3, settings=Settings())
    assert plan.arrays == (
        ArrayPlan(
            name="w", param=0, start=0, stop=2000, shape=(40, 50), dtype="float32",
            time=4096, shard=(40, 50), chunk=(40, 50), owners=(2,),
        ),
    )  # fmt: skip


def test_not_stored() -> None:
    """Frozen, unoptimized and empty parameters get no array, and need no ownership."""
    params = [spec("a", 3, status="frozen"), spec("b", 3, status="unoptimized"), spec("c", 0, 4), spec("d", 2)]
    plan = plan_session(params, [None, None, None, Ownership(kind="whole", ranks=(0,))], world=1, settings=Settings())
    assert [array.param for array in plan.arrays] == [3] and plan.params == tuple(params)


def test_float64() -> None:
    """A float64 gradient is stored as float64, with half the elements in a chunk."""
    owned = [Ownership(kind="whole", ranks=(0,))] * 2
    params = [spec("a", 2**20, dtype="float64"), spec("b", 2**20, dtype="float16")]
    plan = plan_session(params, owned, world=1, settings=Settings())
    assert [(a.dtype, a.chunk) for a in plan.arrays] == [("float64", (2**16,)), ("float32", (2**17,))]


def test_scalar_of_any_kind() -> None:
    """A scalar is one entry of the first rank, whatever the kind of ownership."""
    for kind in ("whole", "rows", "flat", "cuts"):
        plan = plan_one((), kind, 1 if kind == "whole" else 4, (0, 1, 1, 1, 1) if kind == "cuts" else ())
        assert [(a.name, a.shape, a.shard, a.owners) for a in plan.arrays] == [("w", (), (), (0,))]


def test_rows() -> None:
    """Equal row blocks: rank r writes column r, and a rank without rows writes nothing."""
    array = plan_one((5, 8), "rows", 4).arrays[0]
    assert (array.shape, array.shard, array.owners) == ((5, 8), (2, 8), (0, 1, 2))


def test_rows_without_grid() -> None:
    """Row blocks of a prime number of small rows become pieces, named by their start."""
    plan = plan_one((32003, 4096), "rows", 8)
    assert names(plan) == [f"w@{4001 * 4096 * i}" for i in range(8)]
    assert [a.stop for a in plan.arrays] == [min(4001 * (i + 1), 32003) * 4096 for i in range(8)]


def test_flat_of_whole_rows() -> None:
    """A flat split at rows keeps the shape."""
    array = plan_one((1024, 768), "flat", 8).arrays[0]
    assert (array.name, array.shape, array.shard) == ("w", (1024, 768), (128, 768))


def test_flat_inside_rows() -> None:
    """A flat split inside rows is stored flat, under another name than the parameter's."""
    array = plan_one((3, 1000), "flat", 4).arrays[0]
    assert (array.name, array.shape, array.shard, array.owners) == ("w@flat", (3000,), (750,), (0, 1, 2, 3))


def test_flat_without_grid() -> None:
    """A flat split into ranges of a large prime length becomes pieces."""
    assert names(plan_one((1_000_003 * 4,), "flat", 4)) == [f"w@{1_000_003 * i}" for i in range(4)]


def test_flat_all_on_first_rank() -> None:
    """One element on many ranks is whole on the first."""
    array = plan_one((1,), "flat", 1000).arrays[0]
    assert (array.name, array.owners) == ("w", (0,))


def test_cuts_one_owner() -> None:
    """Cuts with one rank that holds anything are no cuts."""
    plan = plan_one((10, 10), "cuts", 3, (0, 0, 100, 100))
    assert [(a.name, a.owners) for a in plan.arrays] == [("w", (1,))]


def test_cuts_inside_rows() -> None:
    """Cuts inside rows become one piece for each owner; ranks without elements have none."""
    plan = plan_one((10, 10), "cuts", 4, (0, 15, 15, 40, 100))
    assert [(a.name, a.start, a.stop, a.owners) for a in plan.arrays] == [
        ("w@0", 0, 15, (0,)),
        ("w@15", 15, 40, (2,)),
        ("w@40", 40, 100, (3,)),
    ]


def test_cuts_at_rows() -> None:
    """Cuts at rows that fit one grid keep the shape; else they are pieces."""
    plan = plan_one((12, 10), "cuts", 3, (0, 20, 60, 120))
    assert [(a.name, a.shard, a.owners) for a in plan.arrays] == [("w", (2, 10), (0, 1, 1, 2, 2, 2))]
    assert names(plan_one((100, 10), "cuts", 2, (0, 30, 1000))) == ["w@0", "w@30"]


def test_cuts_same_rank_again() -> None:
    """Neighbouring ranges of one rank are one piece; a rank that comes back later has two."""
    owned = Ownership(kind="cuts", ranks=(0, 0, 1, 0), bounds=(0, 3, 7, 11, 100))
    plan = plan_session([spec("w", 10, 10)], [owned], world=2, settings=Settings())
    assert [(a.name, a.stop, a.owners) for a in plan.arrays] == [
        ("w@0", 7, (0,)),
        ("w@7", 11, (1,)),
        ("w@11", 100, (0,)),
    ]


def test_replicated_is_balanced() -> None:
    """Replicas share the bytes of all their parameters; the fullest rank is within a third of the mean."""
    params = [spec("wte", 50257, 768), *(spec(f"h{i}", 768, 3072) for i in range(24)), spec("ln", 768)]
    owned = [Ownership(kind="replicated", ranks=tuple(range(8)))] * len(params)
    plan = plan_session(params, owned, world=8, settings=Settings())
    assert [a.name for a in plan.arrays] == [p.name for p in params]
    loads = Counter[int]()
    for rank in range(8):
        loads[rank] = sum(c.stop - c.start for c in rank_chunks(plan, rank))
    assert sum(loads.values()) == sum(p.numel for p in params)
    assert max(loads.values()) <= 4 / 3 * sum(loads.values()) / 8


def test_replicated_fills_up_owned() -> None:
    """Replicated bytes go to the ranks that own least otherwise."""
    params = [spec("own", 1000), spec("a", 10), spec("b", 10)]
    both = Ownership(kind="replicated", ranks=(0, 1))
    plan = plan_session(params, [Ownership(kind="whole", ranks=(0,)), both, both], world=2, settings=Settings())
    assert [a.owners for a in plan.arrays] == [(0,), (1,), (1,)]


def test_names_of_repeated_layers() -> None:
    """Layers of one shape differ in name and parameter only, pieces included."""
    owned = Ownership(kind="cuts", ranks=(0, 1), bounds=(0, 3, 8))
    plan = plan_session([spec("a", 4, 2), spec("_b", 4, 2)], [owned, owned], world=2, settings=Settings())
    assert [(a.name, a.param) for a in plan.arrays] == [("a@0", 0), ("a@3", 0), ("%5Fb@0", 1), ("%5Fb@3", 1)]


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        (None, "'w' is captured but has no ownership"),
        (Ownership(kind="whole", ranks=(0, 1)), "owned whole by 2 ranks"),
        (Ownership(kind="whole", ranks=(2,)), "each must lie in 0 to 1"),
        (Ownership(kind="replicated", ranks=()), "at least one"),
        (Ownership(kind="rows", ranks=(1, 1)), "name a rank twice"),
        (Ownership(kind="cuts", ranks=(0, 1), bounds=(0, 5, 11)), "rise from 0 to 12"),
        (Ownership(kind="cuts", ranks=(0, 1), bounds=(1, 5, 12)), "rise from 0 to 12"),
        (Ownership(kind="cuts", ranks=(0, 1), bounds=(0, 12)), "one more than ranks"),
        (Ownership(kind="cuts", ranks=(0, 1, 0), bounds=(0, 9, 5, 12)), "rise from 0 to 12"),
        (Ownership(kind="odd", ranks=(0,)), "allowed are whole"),  # type: ignore[arg-type]
    ],
)
def test_bad_ownership(owned: Ownership | None, message: str) -> None:
    """Ownership that does not give each element one rank of the world is refused, naming the parameter."""
    with pytest.raises(UsageError, match=message):
        plan_session([spec("w", 3, 4)], [owned], world=2, settings=Settings())


def test_bad_arguments() -> None:
    """A missing ownership, an unknown dtype and an empty world are refused."""
    whole = Ownership(kind="whole", ranks=(0,))
    with pytest.raises(UsageError, match="1 parameters, but ownership of 0"):
        plan_session([spec("w", 3)], [], world=1, settings=Settings())
    with pytest.raises(UsageError, match="dtype of 'w' is 'int8'"):
        plan_session([spec("w", 3, dtype="int8")], [whole], world=1, settings=Settings())
    with pytest.raises(UsageError, match="world is 0"):
        plan_session([], [], world=0, settings=Settings())
