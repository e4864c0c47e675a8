"""FSDP1, FSDP2, hybrid sharding and tensor parallel, really run: what the store holds is what the engine held."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from tests.support.launch import launch
from tests.support.sharded import STEPS
from tests.support.tiny_model import uses_side

TOLERANCE = {False: 1e-5, True: 3e-2}
"""Relative L2 error of all gradients of a step together against the float64 reference, without and with bf16."""

ENV = {"GRADTAP_MAX_TIME": "4", "GRADTAP_CAPACITY": "4", "GRADTAP_FOLLOW_INTERVAL": "0.05"}
Cell = dict[str, Any]


def _cells(*cells: Cell) -> list[Cell]:
    return [{"name": "-".join(f"{k}={v}" for k, v in cell.items() if k != "strategy"), **cell} for cell in cells]


TWO = _cells(
    {"engine": "fsdp2", "accumulation": 3, "side": "even"},
    {"engine": "fsdp2", "accumulation": 3, "no_sync": True, "mixed": True, "clip": 0.05},
    {"engine": "fsdp2", "accumulation": 2, "offload": True, "side": "late", "late": True},
    {"engine": "fsdp2", "mixed": True, "checkpointing": "reentrant"},
    {"engine": "fsdp2", "columns": True, "checkpointing": "plain"},
    {"engine": "fsdp1", "accumulation": 3, "no_sync": True, "mixed": True, "clip": 0.05, "late": True},
    {"engine": "fsdp1", "orig": True, "accumulation": 3, "side": "late", "clip": 0.05},
    {"engine": "fsdp1", "side": "even", "checkpointing": "reentrant"},
    {"engine": "fsdp1", "orig": True, "strategy": "NO_SHARD", "clip": 0.05, "side": "even"},
    {"engine": "fsdp1", "strategy": "NO_SHARD", "accumulation": 3},
    {"engine": "acc-fsdp1", "accumulation": 3, "clip": 0.05, "side": "even"},
    {"engine": "acc-fsdp2", "accumulation": 3, "clip": 0.05, "side": "late"},
    {"engine": "acc-fsdp2"},
    {"engine": "tp"},
)
THREE = _cells(
    {"engine": "fsdp2", "accumulation": 1, "side": "even"},
    {"engine": "fsdp1", "orig": True, "side": "even", "clip": 0.05},
    {"engine": "fsdp1", "accumulation": 3, "no_sync": True, "optimizer": "sgd"},
)
FOUR = _cells(
    {"engine": "fsdp2", "hsdp": True, "accumulation": 3, "no_sync": True, "side": "even"},
    {"engine": "fsdp1", "hsdp": True, "strategy": "HYBRID_SHARD", "orig": True, "clip": 0.05},
    {"engine": "fsdp2-tp", "accumulation": 3},
)
REFUSED = {
    "partial": "a partial sum is no gradient",
    "ignored by FSDP2": "leave it out of ignored_params, or freeze it",
    "ignored by FSDP1": "let FSDP hold it, or freeze it",
    "part of the world": "over ranks [",
    "many runs": "weight; at most 16384 are supported: shard large weights on dimension 0",
    "not reduced: partial gradient": "the gradient of weight is placed as",
    "not reduced": "set_requires_gradient_sync(True)",
    "not reduced FSDP1": "outside no_sync()",
}


class Ran:
    """The cells of one launch, run once."""

    def __init__(self, folder: Path, cells: list[Cell], processes: int, refuse: list[str]) -> None:
        self.folder = folder
        args = {"cells": cells, "refuse": refuse}
        target = "tests.support.sharded:run"
        self.ranks = launch(target, processes=processes, folder=folder, args=args, env=ENV, timeout=300)

    def of(self, cell: Cell) -> tuple[Any, Any, Any]:
        """The run, the arrays of the spy, and what rank 0 says of a cell."""
        name = cell["name"]
        run = gradtap.open(self.folder / f"{name}.gradtap")
        return run, np.load(self.folder / f"{name}.npz"), self.ranks[0][name]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    two = Ran(tmp_path_factory.mktemp("two"), TWO, 2, list(REFUSED))
    three = Ran(tmp_path_factory.mktemp("three"), THREE, 3, [])
    four = Ran(tmp_path_factory.mktemp("four"), FOUR, 4, ["strided"])
    return {"2": two, "3": three, "4": four}


ALL = [("2", cell) for cell in TWO] + [("3", cell) for cell in THREE] + [("4", cell) for cell in FOUR]
each = pytest.mark.parametrize(("ranks", "cell"), ALL, ids=[f"{n}:{cell['name']}" for n, cell in ALL])


def _escapes(cell: Cell) -> bool:
    return bool(cell.get("clip")) and cell["engine"] == "fsdp2"


@each
def test_the_store_holds_the_bits_of_the_engine(ran: dict[str, Ran], ranks: str, cell: Cell) -> None:
    """Every stored gradient equals, bit for bit, what the engine's own collectives put together at the same moment."""
    run, arrays, told = ran[ranks].of(cell)
    assert list(run.steps) == told["steps"] and len(told["steps"]) == STEPS
    stored = [param.name for param in run.params if param.stored]
    assert len(stored) > 5 and not any("_fsdp" in name or "_checkpoint" in name for name in stored)
    for step in run.steps:
        for name in stored:
            np.testing.assert_array_equal(np.asarray(run.grad(name, step)), arrays[f"engine/{step}/{name}"], name)


@each
def test_the_value_is_the_mean_gradient_before_clipping(ran: dict[str, Ran], ranks: str, cell: Cell) -> None:
    """The gradient is that of one process in float64; clipping that escaped is flagged instead."""
    run, arrays, _ = ran[ranks].of(cell)
    for step in run.steps:
        found, wanted = [], []
        for name in [param.name for param in run.params if param.stored]:
            value = np.asarray(run.grad(name, step)).ravel()
            found.append(value)
            wanted.append(arrays.get(f"reference/{step}/{name}", np.zeros(value.shape)).ravel())
        flagged = "modified-after-backward" in run.ledger.row(step)["flags"]
        assert flagged == _escapes(cell)
        if not flagged:
            whole = np.concatenate(wanted)
            error = np.linalg.norm(np.concatenate(found) - whole) / np.linalg.norm(whole)
            assert error < TOLERANCE[bool(cell.get("mixed"))], f"step {step}: {error:.2g}"


@each
def test_the_ledger_tells_micro_batches_and_first_touch(ran: dict[str, Ran], ranks: str, cell: Cell) -> None:
    """Micro-batches are counted, reducing or not; a parameter that none reached is marked, and no other is."""
    run, _, _ = ran[ranks].of(cell)
    names = [param.name for param in run.params]
    micros = cell.get("accumulation", 1)
    assert list(run.ledger["micro_seen"]) == [micros] * STEPS
    for step in run.steps:
        touched = dict(zip(names, run.ledger.row(step)["touched"], strict=True))
        stored = [param.name for param in run.params if param.stored and param.name != "side.weight"]
        assert all(touched[name] == 0 for name in stored), touched
        if "side.weight" in touched:
            reached = [m for m in range(micros) if uses_side(step, m, cell.get("side", "always"))]
            assert touched["side.weight"] == (reached[0] if reached else -1)
            assert ("untouched" in run.ledger.row(step)["flags"]) == (not reached)


@each
def test_clipping_is_told_where_the_engine_has_a_way_of_its_own(ran: dict[str, Ran], ranks: str, cell: Cell) -> None:
    """Limit, norm and coefficient are known where the call was intercepted, and are not made up elsewhere."""
    run, _, _ = ran[ranks].of(cell)
    for step in run.steps:
        row = run.ledger.row(step)
        if not cell.get("clip") or _escapes(cell):
            assert math.isnan(row["clip_limit"]) and math.isnan(row["clip_coef"])
            continue
        assert row["clip_limit"] == cell["clip"]
        assert row["norm_engine"] == pytest.approx(row["norm"], rel=2e-2 if cell.get("mixed") else 1e-5)
        assert row["clip_coef"] == pytest.approx(min(1.0, cell["clip"] / (row["norm_engine"] + 1e-6)), rel=1e-4)


@each
def test_nothing_is_left_and_no_collective_is_called(ran: dict[str, Ran], ranks: str, cell: Cell) -> None:
    """Hooks and patches are those from before attach, on every rank; attach, capture and close call no collective."""
    for rank in ran[ranks].ranks:
        before, after = rank[cell["name"]]["marks"]
        assert before == after
        assert rank[cell["name"]]["collectives"] == []


def test_hooks_are_there_while_attached(ran: dict[str, Ran]) -> None:
    """The counts that show nothing left do count: during an attachment they are higher."""
    for cell in TWO:
        told = ran["2"].ranks[0][cell["name"]]
        assert told["during"]["steps"] == told["marks"][0]["steps"] + 2
        assert told["during"]["patched"] > told["marks"][0]["patched"]


def test_frozen_and_tied_parameters(ran: dict[str, Ran]) -> None:
    """A frozen parameter is listed and not stored; a tied one is stored once, with its alias, in every mode."""
    for cell in TWO:
        if cell["engine"] == "tp":
            continue
        params = {param.name: param for param in ran["2"].of(cell)[0].params}
        assert params["frozen.weight"].status == "frozen"
        assert params["embed.weight"].aliases == ("head.weight",)
        assert params["module.weight"].shape == (11, 24)


def test_each_element_has_one_writer(ran: dict[str, Ran]) -> None:
    """Of hybrid replicas one rank writes each parameter, and both take their turn; column blocks have two writers."""
    for cell in FOUR[:2]:
        owners = ran["4"].ranks[0][cell["name"]]["owners"]
        writers = [tuple(ranks) for kind, ranks in owners.values() if kind in ("cuts", "whole")]
        assert {rank for ranks in writers for rank in ranks} == {0, 1, 2, 3}
        assert all({rank // 2 for rank in ranks} in ({0}, {1}) for ranks in writers)
    columns = ran["2"].ranks[0][TWO[4]["name"]]["owners"]
    assert columns["module.weight"] == ["boxes", [0, 1]]
    parallel = ran["4"].ranks[0][FOUR[2]["name"]]["owners"]
    assert parallel["down.weight"] == ["boxes", [0, 1, 2, 3]] and parallel["up.weight"][0] == "cuts"


def test_a_rank_may_hold_nothing(ran: dict[str, Ran]) -> None:
    """With three ranks the scale of one element lies on one of them, and is read whole."""
    for cell in THREE:
        run, _, told = ran["3"].of(cell)
        assert run.grad("scale", 1).shape == (1,) and np.asarray(run.grad("scale", 1)).all()
        assert told["owners"]["scale"][0] in ("cuts", "whole")


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_true_gradient_is_refused_by_name(ran: dict[str, Ran], case: str) -> None:
    """At attach, or at the step where only that tells, with the parameter's or the module's name and what to do."""
    for rank in ran["2"].ranks:
        told = rank["refusals"][case]
        assert told.startswith("CaptureError" if case.startswith("not reduced") else "UnsupportedError")
        assert REFUSED[case] in told, told


def test_rows_that_are_not_together_are_refused(ran: dict[str, Ran]) -> None:
    """Two mesh dimensions that split one axis unevenly are refused on every rank, or told to it by another."""
    for rank in ran["4"].ranks:
        assert "weight" in rank["refusals"]["strided"] and "divisible" in rank["refusals"]["strided"]
