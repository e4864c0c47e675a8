"""ZeRO-0, ZeRO-3 and BF16_Optimizer, really run: the store holds the engine's bits and the reference's gradient."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from tests.support.capture_cells import key
from tests.support.launch import launch
from tests.support.recorded import STEPS, micros_of
from tests.support.tiny_model import uses_side

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}
"""Relative L2 error of a whole gradient against the float64 reference, by the dtype that the engine computes in."""

SINGLE = 4
"""One small parameter may be off by so many times more."""

SPLIT = {"stage3_param_persistence_threshold": 30}
"""Some parameters stay whole on every rank, most do not."""

SIDE = "side.weight"


def cell(name: str, stage: int, dtype: str, accumulation: int, clip: float, side: str, **more: Any) -> dict[str, Any]:
    """One configuration. `side` says in which micro-batches the side branch runs."""
    made = {"through": "native", "offload": False, "deepspeed": True, **({"zero": SPLIT} if stage == 3 else {})}
    named = {"name": name, "stage": stage, "dtype": dtype, "accumulation": accumulation, "clip": clip, "side": side}
    return made | named | more


def matrix() -> list[dict[str, Any]]:
    """ZeRO-3 with and without offload, and ZeRO-0, by dtype, accumulation and clipping."""
    cells = []
    for (kind, stage, offload), dtype, (accumulation, clip, side) in itertools.product(
        (("zero3", 3, False), ("zero3-cpu", 3, True), ("zero0", 0, False)),
        TOLERANCE,
        ((1, 0.0, "even"), (3, 0.05, "late")),
    ):
        cells.append(
            cell(
                f"{kind}-{dtype}-acc{accumulation}-clip{clip}", stage, dtype, accumulation, clip, side, offload=offload
            )
        )
    return cells


def others() -> list[dict[str, Any]]:
    """BF16_Optimizer, other accumulation dtypes, unmanaged accumulation, Accelerate, ragged windows, overflow."""
    wide: dict[str, Any] = {"fp32_accumulation": True}
    unmanaged: dict[str, Any] = {"more": {"managed_gradient_accumulation": False}}
    through: dict[str, Any] = {"through": "accelerate"}
    return [
        cell("bf16-optimizer-acc1", 1, "bfloat16", 1, 0.0, "even", **wide),
        cell("bf16-optimizer-acc3-clip", 1, "bfloat16", 3, 0.05, "late", **wide),
        cell("zero3-bf16-wide", 3, "bfloat16", 3, 0.05, "always", **wide),
        cell("zero3-fp16-wide-cpu", 3, "float16", 3, 0.0, "always", offload=True, **wide),
        cell("zero0-unmanaged", 0, "float32", 2, 0.05, "always", **unmanaged),
        cell("zero1-unmanaged", 1, "float32", 2, 0.05, "always", **unmanaged),
        cell("zero3-unmanaged", 3, "float32", 2, 0.05, "always", **unmanaged),
        cell("zero3-cpu-unmanaged", 3, "bfloat16", 2, 0.0, "always", offload=True, **unmanaged),
        cell("zero3-overflow", 3, "float16", 2, 0.05, "always", scale_power=20),
        cell("zero3-accelerate", 3, "bfloat16", 2, 0.05, "always", **through),
        cell("zero3-ragged", 3, "float32", 3, 0.0, "always", ragged=2, **through),
    ]


def three() -> list[dict[str, Any]]:
    """A few of them with three ranks: parts end elsewhere, and some ranks hold nothing of a small parameter."""
    return [
        cell("zero3-three", 3, "float32", 2, 0.05, "always"),
        cell("zero3-cpu-three", 3, "bfloat16", 1, 0.0, "even", offload=True),
        cell("zero0-three", 0, "float32", 2, 0.05, "even"),
        cell("bf16-optimizer-three", 1, "bfloat16", 2, 0.0, "always", fp32_accumulation=True),
    ]


class Stages:
    """The cells of one launch, run once, and what came of each."""

    def __init__(self, folder: Path, cells: list[dict[str, Any]], processes: int) -> None:
        self.folder, self.cells = folder, {each["name"]: each for each in cells}
        env = {"GRADTAP_MAX_TIME": "4", "GRADTAP_CAPACITY": "4", "GRADTAP_FOLLOW_INTERVAL": "0.05"}
        found = launch(
            "tests.support.recorded:run_cells",
            processes=processes,
            folder=folder,
            args={"cells": cells},
            env=env,
            timeout=300,
        )
        self.facts = {each["name"]: result["facts"] for each, result in zip(cells, found[0], strict=True)}

    def run(self, name: str) -> Any:
        """The store of a cell."""
        return gradtap.open(self.folder / f"{name}.gradtap")

    def check(self, name: str) -> None:
        """Assert everything that holds for a cell."""
        this, run = self.cells[name], self.run(name)
        arrays = np.load(self.folder / f"{name}.npz")
        assert list(run.steps) == list(range(1, STEPS + 1))
        stored = [param.name for param in run.params if param.stored]
        assert sorted(stored) == sorted({key.split("/")[2] for key in arrays.files if key.startswith("engine/1/")})
        for step, facts in zip(run.steps, self.facts[name], strict=True):
            values = {param: np.asarray(run.grad(param, step)) for param in stored}
            for param, value in values.items():
                if self._old_copy(this, param, step):
                    assert np.array_equal(value, np.asarray(run.grad(param, step - 1))), "the last window's, whole"
                    continue
                held = arrays[f"engine/{step}/{param}"].reshape(value.shape)
                assert np.array_equal(value, held, equal_nan=True), f"{param} at step {step}: not the engine's bits"
            if facts["applied"]:
                assert set(run.ledger.row(step)["flags"]) == flags_of(this, step), f"step {step}"
                self._check_reference(this, run, arrays, step, values)
            self._check_row(this, run.ledger.row(step), step, facts)

    @staticmethod
    def _old_copy(this: dict[str, Any], param: str, step: int) -> bool:
        """Whether the engine answers from the optimizer's own copy, which it has unscaled already in the last step."""
        offloaded = this["stage"] == 3 and this["offload"]
        return offloaded and param == SIDE and step > 1 and "untouched" in flags_of(this, step)

    @staticmethod
    def _check_reference(this: dict[str, Any], run: Any, arrays: Any, step: int, values: dict[str, Any]) -> None:
        factor, tolerance = run.ledger.row(step)["factor"], TOLERANCE[this["dtype"]]
        # Late under ZeRO-3: old content is added. Untouched: there is no reference.
        doubtful = {SIDE} if flags_of(this, step) else set()
        whole = []
        for param in values.keys() - doubtful:
            wanted = arrays[f"reference/{step}/{param}"].reshape(values[param].shape)
            difference = values[param] * factor - wanted
            error = np.linalg.norm(difference) / np.linalg.norm(wanted)
            assert error <= SINGLE * tolerance, f"{param} at step {step}: relative error {error:.2g}"
            whole.append((np.square(difference).sum(), np.square(wanted).sum()))
        off, wanted_square = np.sum(whole, axis=0)
        assert math.sqrt(off / wanted_square) <= tolerance, f"step {step}"

    @staticmethod
    def _check_row(this: dict[str, Any], row: Any, step: int, facts: dict[str, Any]) -> None:
        micros = micros_of(this, step)
        assert row["micro_seen"] == micros
        assert row["accum_engine"] == this["accumulation"] and row["divisor"] == this["accumulation"]
        assert row["factor"] == this["accumulation"] / micros
        assert row["loss_scale"] == facts["loss_scale"]
        assert row["k"] == (round(math.log2(facts["loss_scale"])) if this["stage"] else 0)
        assert row["state"] == ("applied" if facts["applied"] else "skipped-overflow")
        assert row["clip_limit"] == this["clip"]
        if not facts["applied"]:
            return
        if not Stages._old_copy(this, SIDE, step):
            assert row["norm"] == pytest.approx(facts["held_norm"], rel=1e-5)
        if math.isnan(facts["norm"]):
            # DeepSpeed drops the norm of its own clipping in float32 without ZeRO.
            assert this["stage"] == 0 and this["dtype"] == "float32" and math.isnan(row["norm_engine"])
            return
        assert row["norm_engine"] == pytest.approx(facts["norm"])
        if not (flags_of(this, step) and this["offload"]):
            assert row["norm"] == pytest.approx(facts["norm"], rel=2e-2)
        clipped = facts["norm"] if this["stage"] else facts["norm"] / facts["loss_scale"]
        wanted = min(1.0, this["clip"] / (clipped + 1e-6)) if this["clip"] else 1.0
        assert row["clip_coef"] == pytest.approx(wanted, rel=1e-4)


def flags_of(this: dict[str, Any], step: int) -> set[str]:
    """What a step must be marked with, and nothing else."""
    reached = [micro for micro in range(this["accumulation"]) if uses_side(step, micro, this["side"])]
    if not reached:
        return {"untouched"}
    return {"late-touch"} if this["stage"] == 3 and reached[0] > 0 and step > 1 else set()


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(tmp_path_factory.mktemp("stages"), [*matrix(), *others()], 2)


@pytest.mark.parametrize("name", [each["name"] for each in [*matrix(), *others()]])
def test_other_stages(stages: Stages, name: str) -> None:
    """Each engine's store is bit-equal to what the engine holds x 2**-k, near the float64 reference, facts right."""
    stages.check(name)


def test_three_ranks(tmp_path: Path) -> None:
    """Three ranks cut parameters at other places, and one of them is smaller than the world; numbers stay right."""
    found = Stages(tmp_path, three(), 3)
    for name in found.cells:
        found.check(name)


def test_untouched_under_zero3_keeps_old_content_and_says_so(stages: Stages) -> None:
    """What no backward reached holds the last window's gradient under ZeRO-3, zeros under ZeRO-0; both are marked."""
    old = stages.run("zero3-float32-acc1-clip0.0")
    assert "untouched" in old.grad(SIDE, 3).flags and "untouched" not in old.grad(SIDE, 2).flags
    assert np.array_equal(np.asarray(old.grad(SIDE, 3)), np.asarray(old.grad(SIDE, 2)))
    clean = stages.run("zero0-float32-acc1-clip0.0")
    assert "untouched" in clean.grad(SIDE, 3).flags and not np.asarray(clean.grad(SIDE, 3)).any()
    wide = stages.run("bf16-optimizer-acc1")
    assert "untouched" in wide.grad(SIDE, 3).flags and not np.asarray(wide.grad(SIDE, 3)).any()


def test_a_late_parameter_under_zero3_is_wrong_and_says_so(stages: Stages) -> None:
    """From its second window on, what a later micro-batch reached first differs from the reference, with the flag."""
    name = "zero3-float32-acc3-clip0.05"
    run, arrays = stages.run(name), np.load(stages.folder / f"{name}.npz")
    for step in run.steps:
        wanted = arrays[f"reference/{step}/{SIDE}"]
        off = np.linalg.norm(np.asarray(run.grad(SIDE, step)) - wanted) / np.linalg.norm(wanted)
        assert (off > 1e-2) == ("late-touch" in run.grad(SIDE, step).flags) == (step > 1)


def test_overflow_under_zero3_is_recorded_and_marked(stages: Stages) -> None:
    """Skipped steps are in the store with what overflowed, at falling loss scales, and later ones are applied."""
    run = stages.run("zero3-overflow")
    states = list(run.ledger["state"])
    assert states[0] == "skipped-overflow" and states[-1] == "applied"
    assert run.ledger["loss_scale"][0] == 2.0**20 > run.ledger["loss_scale"][-1]
    assert "nonfinite" in run.ledger.row(1)["flags"]


def test_names_shapes_and_dtypes(stages: Stages) -> None:
    """Partitioned parameters keep names and whole shapes, tied ones their alias; the dtype is the buffer's."""
    run = stages.run("zero3-bfloat16-acc1-clip0.0")
    params = {param.name: param for param in run.params}
    assert params["embed.weight"].aliases == ("head.weight",) and params["conv.weight"].shape == (3, 1, 3, 2)
    assert params["frozen.weight"].status == "frozen" and params["frozen.weight"].shape == (7, 7)
    assert params["scale"].shape == (1,) and params["scale"].dtype == "bfloat16"
    for name in ("zero3-bf16-wide", "bf16-optimizer-acc1"):
        assert {param.dtype for param in stages.run(name).params if param.stored} == {"float32"}


def test_zero0_in_fp16_says_that_the_loss_was_never_scaled(stages: Stages) -> None:
    """The ledger has the scale that the step divides by, k is 0, and the session says that the loss was not scaled."""
    run = stages.run("zero0-float16-acc1-clip0.0")
    row = run.ledger.row(1)
    assert row["loss_scale"] == 4096.0 and row["k"] == 0 and row["factor"] == 1.0
    settings = {name: stages.run(name).sessions[0].settings for name in stages.cells}
    assert settings["zero0-float16-acc1-clip0.0"]["loss_scaled"] is False
    assert settings["zero3-float16-acc1-clip0.0"]["loss_scaled"] is True


def test_no_collective_and_nothing_left_behind(tmp_path: Path) -> None:
    """Reading these engines calls no collective, patches two methods and one hook a parameter, and leaves none."""
    cells: list[dict[str, Any]] = [
        {"engine": "zero3", "accumulation": 2, "zero": SPLIT},
        {"engine": "zero0", "dtype": "float16"},
        {"engine": "zero1", "dtype": "bfloat16", "fp32_accumulation": True},
    ]
    results = launch(
        "tests.support.capture_cells:run", processes=2, folder=tmp_path, args={"cells": cells}, timeout=120
    )
    for name, result in ((key(each), result) for each in cells for result in results):
        found = result[name]
        assert found["collectives"] == [] and found["collectives_elsewhere"] > 0
        before, during, after = found["marks"]
        assert after == before
        stored = [spec for spec in found["params"] if spec["status"] == "captured"]
        assert during["hooks"] == before["hooks"] + len(stored)
        assert set(during["engine"]) - set(before["engine"]) == {"_take_model_step", "backward"}


def test_a_leaf_modules_unused_expert_has_true_zeros(tmp_path: Path) -> None:
    """ZeRO-3 fills in zeros for what a leaf module did not use: they are stored, and no step is called untouched."""
    launch("tests.support.leaf_training:run", processes=2, folder=tmp_path, timeout=120)
    run = gradtap.open(tmp_path / "run.gradtap")
    for step in (1, 2, 3):
        used, unused = (f"leaf.experts.{which}.weight" for which in (step % 2, 1 - step % 2))
        assert np.asarray(run.grad(used, step)).any()
        assert not np.asarray(run.grad(unused, step)).any()
        assert run.ledger.row(step)["flags"] == ()


@pytest.mark.gpu
def test_zero3_with_states_on_nvme(tmp_path: Path) -> None:
    """With optimizer states swapped to files the gradient is read from the same views."""
    swap = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    found = Stages(tmp_path, [cell("zero3-nvme", 3, "float32", 2, 0.05, "always", zero=SPLIT | swap)], 2)
    found.check("zero3-nvme")
