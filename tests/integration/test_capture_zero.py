"""DeepSpeed ZeRO-1 and ZeRO-2, really run on two and three CPU ranks: what is captured is what the engine holds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from gradtap import flags
from tests.support.capture_cells import key, scale_of
from tests.support.capture_results import CellResult, distance
from tests.support.capture_trainings import LEARNING_RATE
from tests.support.launch import launch

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
MATRIX = [
    {"engine": engine, "dtype": dtype, "offload": offload, "accumulation": accumulation, "clip": clip, "rule": rule}
    for engine, dtype, offload, (accumulation, clip, rule) in itertools.product(
        ["zero1", "zero2"], list(TOLERANCE), [False, True], [(1, 0.0, "even"), (2, 0.5, "always")]
    )
]
THROUGH_ACCELERATE = [
    {"engine": "zero1", "through": "accelerate", "accumulation": 2, "clip": 0.5, "offload": True},
    {"engine": "zero2", "through": "accelerate", "accumulation": 2, "clip": 0.5, "rule": "even"},
    {"engine": "zero2", "through": "accelerate", "accumulation": 1, "dtype": "bfloat16"},
    {"engine": "zero2", "through": "accelerate", "accumulation": 2, "dtype": "float16"},
]
FP32_ACCUMULATION = [
    {"engine": "zero2", "dtype": "bfloat16", "fp32_accumulation": True, "accumulation": 2, "clip": 0.5},
    {"engine": "zero2", "dtype": "float16", "fp32_accumulation": True, "accumulation": 2, "offload": True},
    {"engine": "zero1", "dtype": "float16", "fp32_accumulation": True, "accumulation": 2, "rule": "even"},
]
REORDERED = [
    {"engine": engine, "accumulation": 2, "zero": zero, "no_held": True, "offload": offload}
    for engine in ("zero1", "zero2")
    for offload in (False, True)
    for zero in (
        {"round_robin_gradients": True},
        {"parameter_alignment": True},
        {"round_robin_gradients": True, "parameter_alignment": True},
    )
]
LATE = [
    {"engine": engine, "accumulation": 2, "offload": offload, "rule": "late"}
    for engine in ("zero1", "zero2")
    for offload in (False, True)
]
OTHER = [
    {"engine": "zero2", "accumulation": 2, "backward": "direct"},
    {"engine": "zero2", "accumulation": 2, "more": {"managed_gradient_accumulation": False}, "unmanaged": True},
    {"engine": "zero2", "accumulation": 2, "backward": "unscaled"},
    {"engine": "zero2", "accumulation": 2, "through": "accelerate", "ragged": 3},
    {
        "engine": "zero2",
        "accumulation": 2,
        "offload": True,
        "dtype": "float16",
        "fp32_accumulation": True,
        "rule": "late",
    },
    {"engine": "zero2", "dtype": "float16", "scale": 1000.0},
    {"engine": "zero2", "dtype": "float16", "scale": 2.0**40},
]
CELLS = [*MATRIX, *THROUGH_ACCELERATE, *FP32_ACCUMULATION, *REORDERED, *LATE, *OTHER]
THREE = [
    {"engine": "zero1", "accumulation": 1},
    {"engine": "zero2", "accumulation": 2, "offload": True, "dtype": "bfloat16"},
    {"engine": "zero2", "accumulation": 2, "clip": 0.5, "dtype": "float16"},
    {"engine": "zero2", "zero": {"round_robin_gradients": True, "parameter_alignment": True}, "no_held": True},
]
TARGET = "tests.support.capture_cells:run"
REFUSALS = {
    "sum": "UnsupportedError: gradient_allreduce_op 'sum'",
    "bf16 accumulation of fp32": "UnsupportedError: gradient accumulation in bfloat16 of a float32 model",
    "twice": "AttachError: gradtap is attached to this DeepSpeedEngine already",
    "not prepared": "AttachError: attach needs an Accelerator after prepare, and it holds no DeepSpeed engine yet",
}
STALE_SIDE = "side.weight"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, CellResult], list[dict[str, str]]]:
    """All cells and refusals, run by two processes in one launch."""
    folder = tmp_path_factory.mktemp("two")
    results = launch(TARGET, processes=2, folder=folder, args={"cells": CELLS, "refuse": True}, timeout=220)
    cells = {key(cell): CellResult(cell, results, folder) for cell in CELLS}
    return cells, [result["refusals"] for result in results]


@pytest.fixture(scope="module")
def two(launched: tuple[dict[str, CellResult], list[dict[str, str]]]) -> dict[str, CellResult]:
    """The cells of the two processes."""
    return launched[0]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellResult]:
    """A few cells, run by three processes: partitions end elsewhere, and the last is padded."""
    folder = tmp_path_factory.mktemp("three")
    results = launch(TARGET, processes=3, folder=folder, args={"cells": THREE}, timeout=220)
    return {key(cell): CellResult(cell, results, folder) for cell in THREE}


def _id(cell: dict[str, Any]) -> str:
    return key(cell)


def _dtype(cell: dict[str, Any]) -> str:
    return str(cell.get("dtype", "float32"))


def _doubtful(result: CellResult, step: dict[str, Any]) -> set[str]:
    """Parameters that no backward of the window reached first: their content is the engine's business."""
    names = [spec["name"] for spec in result.ranks[0]["params"]]
    return {name for name, micro in zip(names, step["touched"], strict=True) if micro != 0}


def _check_held(result: CellResult) -> None:
    for step in result.steps:
        held = result.given(step["step"], "held")
        assert set(held) == set(result.stored)
        for name, value in result.assembled(step["step"]).items():
            np.testing.assert_array_equal(value, held[name].reshape(value.shape), err_msg=f"{name} at {step['step']}")


def _check_reference(result: CellResult) -> None:
    tolerance = TOLERANCE[_dtype(result.cell)]
    for step in result.steps:
        reference = result.given(step["step"], "reference")
        factor = scale_of(step) * step["factor"]
        certain = set(result.stored) - _doubtful(result, step)
        stored = {name: value * factor for name, value in result.assembled(step["step"]).items() if name in certain}
        assert "conv.weight" in stored
        whole = np.concatenate([value.ravel() for value in stored.values()])
        assert distance(whole, np.concatenate([reference[name].ravel() for name in stored])) < tolerance, step["step"]
        for name, value in stored.items():
            # A few elements of one parameter may cancel in half precision; nothing may be wrong by much.
            assert distance(value, reference[name]) < 4 * tolerance, (name, step["step"])


@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.get("no_held")], ids=_id)
def test_captured_bits_are_those_that_the_engine_holds(two: dict[str, CellResult], cell: dict[str, Any]) -> None:
    """The owners' pieces, put together, equal the engine's own account of each full gradient, bit for bit."""
    _check_held(two[key(cell)])


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.get("scale") != 2.0**40], ids=_id)
def test_stored_value_is_the_mean_gradient(two: dict[str, CellResult], cell: dict[str, Any]) -> None:
    """Captured bits x 2**-k x factor equal the mean gradient that one process computes in float64."""
    _check_reference(two[key(cell)])


@pytest.mark.parametrize("cell", THREE, ids=_id)
def test_three_ranks_with_uneven_cuts_give_whole_gradients(three: dict[str, CellResult], cell: dict[str, Any]) -> None:
    """With three ranks, whose cuts fall inside rows, pieces cover every parameter once and hold the right values."""
    result = three[key(cell)]
    if not cell.get("no_held"):
        _check_held(result)
    _check_reference(result)
    owns = [own for own in result.ranks[0]["ownership"] if own is not None]
    assert any(0 < bound < own["bounds"][-1] for own in owns for bound in own["bounds"])
    assert any(len(set(own["bounds"])) < len(own["bounds"]) for own in owns), "an owner of nothing was expected"


def test_all_ranks_compute_the_same_ownership(two: dict[str, CellResult], three: dict[str, CellResult]) -> None:
    """Each rank works out every rank's ranges by itself, and all come to the same."""
    for result in (*two.values(), *three.values()):
        for rank in result.ranks[1:]:
            assert rank["ownership"] == result.ranks[0]["ownership"]
            assert rank["params"] == result.ranks[0]["params"]


def test_no_call_into_torch_distributed_during_capture(two: dict[str, CellResult]) -> None:
    """Reading gradients, facts and outcome calls no collective and sends nothing; the engine itself is seen calling."""
    for result in two.values():
        for rank in result.ranks:
            assert rank["collectives"] == []
            assert rank["collectives_elsewhere"] > 0


def test_nothing_is_left_behind(two: dict[str, CellResult]) -> None:
    """After `remove` the engine has as many hooks and patched methods as before `install`, and in between more."""
    for result in two.values():
        before, during, after = result.ranks[0]["marks"]
        assert after == before
        assert during["hooks"] == before["hooks"] + len(result.stored)
        assert set(during["engine"]) - set(before["engine"]) == {"_take_model_step", "backward"}


def test_params_are_named_and_ordered_as_in_the_model(two: dict[str, CellResult]) -> None:
    """Names have no wrapper's prefix though a child is called `module`; tied, frozen and shapes are told."""
    for result in two.values():
        specs = result.ranks[0]["params"]
        assert [spec["name"] for spec in specs] == [
            "scale", "embed.weight", "frozen.weight", "frozen.bias", "conv.weight", "conv.bias", "module.weight",
            "module.bias", "side.weight", "out.weight", "out.bias",
        ]  # fmt: skip
        by_name = {spec["name"]: spec for spec in specs}
        assert by_name["embed.weight"]["aliases"] == ["head.weight"]
        assert by_name["frozen.weight"]["status"] == "frozen"
        assert by_name["conv.weight"]["shape"] == [3, 1, 3, 2]
        assert by_name["scale"]["shape"] == [1]


def test_dtype_is_that_of_the_buffer(two: dict[str, CellResult]) -> None:
    """A parameter's dtype is the one in which its gradient is captured: float32 with offload or fp32 accumulation."""
    for result in two.values():
        cell = result.cell
        wide = cell.get("offload") or cell.get("fp32_accumulation")
        expected = "float32" if wide else _dtype(cell)
        assert {spec["dtype"] for spec in result.stored.values()} == {expected}
        assert {name for step in result.steps for name in step["dtypes"]} == {f"torch.{expected}"}


def test_ledger_facts_are_the_engines(two: dict[str, CellResult]) -> None:
    """Step, scale, micro-batches, divisor, limit and rate are what the configuration says, on every rank."""
    for result in two.values():
        cell = result.cell
        accumulation, scale = (
            cell.get("accumulation", 1),
            cell.get("scale", 1024.0 if _dtype(cell) == "float16" else 1.0),
        )
        assert [step["step"] for step in result.steps] == [1, 2, 3]
        for rank in result.ranks:
            for step in rank["steps"]:
                ragged = step["step"] == cell.get("ragged")
                assert step["micro_seen"] == (1 if ragged else accumulation)
                assert (step["accum_engine"], step["accum_loop"]) == (accumulation,) * 2
                assert step["divisor"] == (1.0 if cell.get("backward") == "unscaled" else accumulation)
                assert step["loss_scale"] == scale
                assert step["clip_limit"] == cell.get("clip", 0.0)
                assert step["learning_rates"] == [LEARNING_RATE]
                assert step["k"] == round(math.log2(scale))
                assert math.isclose(2.0 ** step["k"] / scale, step["factor"] / (accumulation if ragged else 1))
                assert step["window_open"] and step["ended"]


def test_outcome_gives_the_unscaled_norm_and_the_clip_coefficient(two: dict[str, CellResult]) -> None:
    """The engine's norm equals that of the captured values unscaled, and the coefficient follows from it."""
    for result in two.values():
        if result.cell.get("scale") == 2.0**40:
            continue
        for step in result.steps:
            outcome = step["outcome"]
            assert outcome["state"] == "applied"
            if result.cell.get("offload") and step["flags"] & flags.UNTOUCHED:
                continue  # the engine leaves stale gradients out of its norm, though it applies them
            squares = sum(float((value**2).sum()) for value in result.assembled(step["step"]).values())
            assert math.isclose(outcome["norm_engine"], math.sqrt(squares) / step["loss_scale"], rel_tol=5e-3)
            limit = result.cell.get("clip", 0.0)
            expected = min(1.0, limit / outcome["norm_engine"]) if limit else 1.0
            assert math.isclose(outcome["clip_coef"], expected, rel_tol=1e-5)
            assert outcome["clip_coef"] < 1.0 or not limit


def test_overflow_is_captured_and_told(two: dict[str, CellResult]) -> None:
    """A step that the engine skips for overflow is captured all the same, and its outcome says so."""
    result = two[key(OTHER[-1])]
    assert [step["outcome"]["state"] for step in result.steps] == ["skipped-overflow"] * 3
    assert [step["step"] for step in result.steps] == [1, 2, 3]
    assert not all(np.isfinite(value).all() for value in result.assembled(1).values())


def test_untouched_parameters_are_flagged(two: dict[str, CellResult]) -> None:
    """Where the side branch ran in no micro-batch its parameter has no first touch, and the step has the flag."""
    for result in two.values():
        for step in result.steps:
            expected = result.cell.get("rule") == "even" and step["step"] % 2 == 1
            assert bool(step["flags"] & flags.UNTOUCHED) == expected
            assert (STALE_SIDE in _doubtful(result, step)) == (expected or result.cell.get("rule") == "late")


def test_late_touch_is_flagged_only_where_old_content_is_added(two: dict[str, CellResult]) -> None:
    """ZeRO-2 with offload adds old content to a late parameter, from the second window on; only there is the flag."""
    for result in two.values():
        cell = result.cell
        for step in result.steps:
            expected = cell in LATE and cell["engine"] == "zero2" and cell["offload"] and step["step"] > 1
            assert bool(step["flags"] & flags.LATE_TOUCH) == expected


@pytest.mark.parametrize("cell", LATE, ids=_id)
def test_late_parameter_is_wrong_exactly_where_flagged(two: dict[str, CellResult], cell: dict[str, Any]) -> None:
    """The late parameter equals the reference unless the step has the flag; with the flag it does not."""
    result = two[key(cell)]
    for step in result.steps:
        value = result.assembled(step["step"])[STALE_SIDE]
        off = distance(value, result.given(step["step"], "reference")[STALE_SIDE])
        assert (off > 1e-2) == bool(step["flags"] & flags.LATE_TOUCH)


@pytest.mark.parametrize("case", REFUSALS)
def test_real_engines_that_are_not_supported_are_refused(
    launched: tuple[dict[str, CellResult], list[dict[str, str]]], case: str
) -> None:
    """Each engine that is not read yet is refused on every rank, by name, with what is supported and what to do."""
    for refusals in launched[1]:
        assert refusals[case].startswith(REFUSALS[case])
        assert ": " in refusals[case].removeprefix(REFUSALS[case])
        if "UnsupportedError" in refusals[case]:
            assert "supported with DeepSpeed are ZeRO stages 0 to 3" in refusals[case]
