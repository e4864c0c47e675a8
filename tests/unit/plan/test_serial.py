"""Plans as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradtap.config import Settings
from gradtap.errors import DamagedError
from gradtap.plan.planner import plan_session
from gradtap.plan.serial import (
    canonical_json,
    first_difference,
    owners_of,
    pieces_attribute,
    plan_from_json,
    plan_to_json,
    runs,
)
from gradtap.types import Ownership, ParamSpec, SessionPlan

PARAMS = (
    ParamSpec(name="a", shape=(4, 2), dtype="bfloat16", aliases=("tied",)),
    ParamSpec(name="b", shape=(3, 1000), dtype="float32"),
    ParamSpec(name="c", shape=(), dtype="float64"),
    ParamSpec(name="d", shape=(9,), dtype="float32", status="frozen"),
    ParamSpec(name="e", shape=(8, 2), dtype="float32"),
)


@pytest.fixture
def plan() -> SessionPlan:
    """One parameter of each form: pieces, flat, N-d, not stored, row columns."""
    every = tuple(range(4))
    owned = [
        Ownership(kind="cuts", ranks=(1, 2), bounds=(0, 3, 8)),
        Ownership(kind="flat", ranks=every),
        Ownership(kind="replicated", ranks=every),
        None,
        Ownership(kind="rows", ranks=every),
    ]
    return plan_session(PARAMS, owned, world=4, settings=Settings())


def test_round_trip(plan: SessionPlan) -> None:
    """A plan comes back from its JSON text, which is the same each time."""
    text = canonical_json(plan_to_json(plan))
    assert plan_from_json(json.loads(text)) == plan
    assert canonical_json(plan_to_json(plan_from_json(json.loads(text)))) == text


def test_canonical_json() -> None:
    """Keys are sorted, no spaces, ASCII; NaN is refused."""
    assert canonical_json({"b": [1, 2], "a": "é"}) == b'{"a":"\\u00e9","b":[1,2]}'
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))


def test_owners_are_runs(plan: SessionPlan) -> None:
    """Owners are written as runs of [first rank, columns of each, ranks], which read back as they were."""
    owners = (3, 3, 4, 4, 5, 5, 5, 1)
    large = replace(plan.arrays[0], owners=owners)
    assert plan_to_json(replace(plan, arrays=(large,)))["arrays"][0]["owners"] == [[3, 2, 2], [5, 3, 1], [1, 1, 1]]
    assert owners_of(runs(owners), len(owners)) == owners


def test_a_small_file_makes_no_large_tuple() -> None:
    """A run that claims a trillion columns is refused before it is expanded."""
    with pytest.raises(DamagedError, match="owners are listed"):
        owners_of([[0, 10**12, 1]], 4)


def test_pieces_attribute(plan: SessionPlan) -> None:
    """Only parameters that are not one array of their own shape are listed."""
    assert pieces_attribute(plan) == {
        "a": {"arrays": ["a@0", "a@3"], "starts": [0, 3], "stops": [3, 8], "shape": [4, 2]},
        "b": {"arrays": ["b@flat"], "starts": [0], "stops": [3000], "shape": [3, 1000]},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"shard": [3, 2]},
        {"owners": [[1, 2]]},
        {"chunk": [0]},
        {"shard": [1, 2, 3]},
        {"param": 99},
        {"time": 0},
        {"owners": 7},
    ],
)
def test_damaged(plan: SessionPlan, change: dict[str, object]) -> None:
    """A plan that contradicts itself is damage, not another plan."""
    found = json.loads(canonical_json(plan_to_json(plan)))
    found["arrays"][0].update(change)
    with pytest.raises(DamagedError, match="session's plan"):
        plan_from_json(found)


def test_missing_key(plan: SessionPlan) -> None:
    """A plan without a key is damage."""
    found = plan_to_json(plan)
    del found["arrays"][0]["time"]
    with pytest.raises(DamagedError, match="time"):
        plan_from_json(found)


def test_first_difference(plan: SessionPlan) -> None:
    """The first parameter that differs in name or shape is said; other differences do not count."""
    assert first_difference(plan, replace(plan, world=2, arrays=())) is None
    other = replace(plan, params=(PARAMS[0], replace(PARAMS[1], shape=(3, 999)), *PARAMS[2:]))
    said = first_difference(plan, other)
    assert said == "parameter 1 is 'b' of shape (3, 1000) in the first and 'b' of shape (3, 999) in the second"
    assert first_difference(plan, replace(plan, params=PARAMS[:4])) == (
        "parameter 4 is 'e' of shape (8, 2) in the first and absent in the second"
    )
