"""DistributedDataParallel, really run on two CPU ranks, bare and through Accelerate; and how ranks meet at attach."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gradtap import flags
from tests.support.capture_cells import key
from tests.support.capture_results import CellResult, distance
from tests.support.launch import launch

BARE = [
    {"engine": "ddp", "accumulation": 1},
    {"engine": "ddp", "accumulation": 2, "clip": 0.5, "rule": "even"},
    {"engine": "ddp", "accumulation": 2, "bucket_view": True, "optimizer": "sgd"},
    {"engine": "ddp", "accumulation": 2, "bucket_view": True, "rule": "late", "clip": 0.5},
]
THROUGH_ACCELERATE = [
    {"engine": "ddp", "through": "accelerate", "accumulation": 1, "clip": 0.5},
    {"engine": "ddp", "through": "accelerate", "accumulation": 2, "clip": 0.5, "rule": "even"},
    {"engine": "ddp", "through": "accelerate", "accumulation": 2, "mixed": "bf16"},
]
CELLS = [*BARE, *THROUGH_ACCELERATE]
Outcome = tuple[dict[str, CellResult], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All cells, the meetings and the refusals, run by two processes in one launch."""
    folder = tmp_path_factory.mktemp("ddp")
    target = "tests.support.capture_cells:run_torch"
    results = launch(target, processes=2, folder=folder, args={"cells": CELLS}, timeout=120)
    return {key(cell): CellResult(cell, results, folder) for cell in CELLS}, results


@pytest.mark.parametrize("cell", CELLS, ids=key)
def test_captured_bits_are_the_gradients_on_every_rank(ran: Outcome, cell: dict[str, Any]) -> None:
    """Each rank's source gives every stored parameter whole, with the bits of `param.grad`, zeros where it is None."""
    result = ran[0][key(cell)]
    escaped = cell.get("clip") and not cell.get("through")
    for step in result.steps:
        first = result.pieces(step["step"], 0)
        for rank in range(2):
            pieces, held = result.pieces(step["step"], rank), result.given(step["step"], "held", rank)
            assert set(pieces) == set(result.stored)
            for name, by_start in pieces.items():
                assert list(by_start) == [0]
                np.testing.assert_array_equal(by_start[0], held.get(name, np.zeros(1)).ravel() + 0 * by_start[0])
                np.testing.assert_array_equal(by_start[0], first[name][0])
        if not escaped:
            assert not step["flags"] & flags.MODIFIED_AFTER_BACKWARD


@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.get("clip") or cell.get("through")], ids=key)
def test_captured_value_is_the_mean_gradient_before_clipping(ran: Outcome, cell: dict[str, Any]) -> None:
    """What is captured equals the mean gradient computed by one process, though the loop clips through Accelerate."""
    result = ran[0][key(cell)]
    tolerance = 2e-2 if cell.get("mixed") else 1e-5
    for step in result.steps:
        reference = result.given(step["step"], "reference")
        for name, value in result.assembled(step["step"]).items():
            if name in reference:
                assert distance(value, reference[name]) < tolerance, (name, step["step"])
            else:
                assert not value.any()


@pytest.mark.parametrize("cell", [cell for cell in BARE if cell.get("clip")], ids=key)
def test_clipping_that_escapes_is_flagged(ran: Outcome, cell: dict[str, Any]) -> None:
    """Clipping by torch's own function changes the gradient before the hook: the step is flagged, the norm unknown."""
    for step in ran[0][key(cell)].steps:
        assert step["flags"] & flags.MODIFIED_AFTER_BACKWARD
        assert math.isnan(step["clip_limit"]) and math.isnan(step["outcome"]["norm_engine"])


@pytest.mark.parametrize("cell", [cell for cell in THROUGH_ACCELERATE if cell.get("clip")], ids=key)
def test_intercepted_clipping_tells_limit_norm_and_coefficient(ran: Outcome, cell: dict[str, Any]) -> None:
    """The norm that Accelerate's clipping returned is that of the captured values, and the coefficient follows."""
    result = ran[0][key(cell)]
    for step in result.steps:
        norm = math.sqrt(sum(float((value**2).sum()) for value in result.assembled(step["step"]).values()))
        assert step["clip_limit"] == 0.5
        assert math.isclose(step["outcome"]["norm_engine"], norm, rel_tol=1e-5)
        assert math.isclose(step["outcome"]["clip_coef"], min(1.0, 0.5 / norm), rel_tol=1e-4)
        assert step["outcome"]["state"] == "applied"


def test_micro_batches_are_counted_with_and_without_an_announced_backward(ran: Outcome) -> None:
    """A window's micro-batches are counted by Accelerate's backward, or by autograd's own callback in a bare loop."""
    for result in ran[0].values():
        accumulation = result.cell["accumulation"]
        for step in result.steps:
            assert step["micro_seen"] == accumulation
            assert step["divisor"] == (accumulation if result.cell.get("through") else 1)
            assert (step["factor"], step["k"]) == (1.0, 0)


def test_first_touch_and_its_flag(ran: Outcome) -> None:
    """The side branch's first micro-batch is told; a step in which it never ran has the flag, no other has."""
    for result in ran[0].values():
        names = [spec["name"] for spec in result.ranks[0]["params"]]
        rule = result.cell.get("rule", "always")
        for step in result.steps:
            micro = {"always": 0, "late": 1, "even": -1 if step["step"] % 2 else 0}[rule]
            assert step["touched"][names.index("side.weight")] == micro
            assert step["touched"][names.index("frozen.weight")] == -1
            assert bool(step["flags"] & flags.UNTOUCHED) == (micro < 0)
            assert not step["flags"] & flags.LATE_TOUCH


def test_step_numbers_are_left_to_the_caller_from_a_fresh_optimizer(ran: Outcome) -> None:
    """With nothing restored the optimizer cannot tell its step, and goes on not telling it."""
    for result in ran[0].values():
        assert [step["next_step"] for step in result.steps] == [None] * 3


def test_every_rank_owns_a_replica(ran: Outcome) -> None:
    """Every stored parameter is replicated over both ranks, 0-d ones too."""
    for result in ran[0].values():
        for spec, own in zip(result.ranks[0]["params"], result.ranks[0]["ownership"], strict=True):
            if spec["status"] == "captured":
                assert own == {"kind": "replicated", "ranks": [0, 1], "bounds": [], "boxes": []}
        assert result.stored["scale"]["shape"] == []
        assert result.ranks[1]["facts"]["rank"] == 1
        assert result.ranks[1]["facts"]["name"] == "ddp"


def test_no_call_into_torch_distributed_and_nothing_left_behind(ran: Outcome) -> None:
    """Capture and meetings call no collective; hooks and patched methods are gone after `remove`."""
    for result in ran[0].values():
        for rank in result.ranks:
            assert rank["collectives"] == []
            before, during, after = rank["marks"]
            assert before == after
            assert during["optimizer"] == [1, 1]
            assert during["hooks"] == before["hooks"] + len(result.stored)


def test_ranks_meet_through_the_store_alone(ran: Outcome) -> None:
    """Rank 0's word reaches the others with set, get and wait only, without a collective."""
    assert [result["meetings"]["good"] for result in ran[1]] == ["here", "here"]


def test_a_rank_that_cannot_attach_is_named_to_all(ran: Outcome) -> None:
    """When rank 1 refuses, rank 0 raises with rank 1's reason at once."""
    refused = [result["meetings"]["refused"] for result in ran[1]]
    assert refused[1] == "AttachError: this rank has no gradients"
    assert "rank 1" in refused[0] and "this rank has no gradients" in refused[0]


def test_attach_on_the_main_rank_only_times_out_with_the_usual_causes(ran: Outcome) -> None:
    """Rank 0 alone gives up in time and says that rank 1 did not attach, and why that happens."""
    told = ran[1][0]["meetings"]["late"]
    assert "rank 1 of 2 did not attach within 0.3 s" in told
    assert "main rank only" in told


def test_a_bare_model_among_several_processes_is_refused(ran: Outcome) -> None:
    """A model without its DDP wrapper is refused where there are several processes: its gradients need not agree."""
    for result in ran[1]:
        assert "DistributedDataParallel object itself" in result["refusals"]["bare model"]
