"""The whole way, on real engines: what the store holds is what the engine held, and what one process computes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from tests.support.launch import launch
from tests.support.recorded import STEPS, micros_of
from tests.support.tiny_model import uses_side

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}
"""Relative L2 error of a whole gradient against the float64 reference, by the dtype that the engine computes in."""

OVERFLOW = "zero2-overflow"
"""A loss scale so large that the first steps overflow and are skipped."""

SINGLE = 4
"""One small parameter may be off by so many times more."""

SMALL = {"GRADTAP_MAX_TIME": "4", "GRADTAP_CAPACITY": "4", "GRADTAP_FOLLOW_INTERVAL": "0.05"}
"""Every run crosses shard and growth boundaries."""


def zero_cells() -> list[dict[str, Any]]:
    """ZeRO-1 and -2 in a native loop, by offload, dtype, accumulation and clipping."""
    cells = []
    for stage, offload, dtype, accumulation, clip in itertools.product(
        (1, 2), (False, True), TOLERANCE, (1, 3), (0.0, 0.05)
    ):
        name = f"zero{stage}-{'cpu' if offload else 'no'}-{dtype}-acc{accumulation}-clip{clip}"
        side = "always" if accumulation == 1 else "late" if clip else "even"
        cells.append(cell(name, stage, "native", dtype, offload, accumulation, clip, side))
    cells.append(cell(OVERFLOW, 2, "native", "float16", False, 2, 0.05, "always", scale_power=20))
    return cells


def accelerate_cells() -> list[dict[str, Any]]:
    """ZeRO and DDP through Accelerate."""
    return [
        cell("acc-zero1-fp32", 1, "accelerate", "float32", False, 2, 0.05, "even"),
        cell("acc-zero2-fp32", 2, "accelerate", "float32", False, 3, 0.05, "even"),
        cell("acc-zero2-cpu-bf16", 2, "accelerate", "bfloat16", True, 2, 0.05, "always"),
        cell("acc-zero2-fp16", 2, "accelerate", "float16", False, 2, 0.05, "always"),
        cell("ddp-fp32-acc1", 0, "accelerate", "float32", False, 1, 0.0, "even", scalar=True),
        cell("ddp-fp32-acc3-clip", 0, "accelerate", "float32", False, 3, 0.05, "even", scalar=True),
        cell("ddp-bf16-acc2", 0, "accelerate", "bfloat16", False, 2, 0.0, "always", scalar=True),
    ]


def plain_cells() -> list[dict[str, Any]]:
    """Plain torch in one process, bare and through Accelerate, by dtype, accumulation and clipping; a ragged loader."""
    cells = []
    for through, dtype, accumulation, clip in itertools.product(
        ("native", "accelerate"), ("float32", "bfloat16"), (1, 3), (0.0, 0.05)
    ):
        name = f"torch-{through}-{dtype}-acc{accumulation}-clip{clip}"
        side = "always" if accumulation == 1 else "late" if clip else "even"
        cells.append(cell(name, 0, through, dtype, False, accumulation, clip, side, scalar=True))
    for dtype, clip in (("float32", 0.0), ("float32", 0.05), ("bfloat16", 0.0)):
        name = f"torch-ragged-{dtype}-clip{clip}"
        cells.append(cell(name, 0, "accelerate", dtype, False, 3, clip, "always", scalar=True, ragged=2))
    return cells


def cell(
    name: str,
    stage: int,
    through: str,
    dtype: str,
    offload: bool,
    accumulation: int,
    clip: float,
    side: str,
    **more: Any,
) -> dict[str, Any]:
    """One configuration. `side` says in which micro-batches the side branch runs."""
    return {
        "name": name,
        "stage": stage,
        "through": through,
        "dtype": dtype,
        "offload": offload,
        "accumulation": accumulation,
        "clip": clip,
        "side": side,
        **more,
    }


class Recorded:
    """The cells of one launch, run once, and what came of each."""

    def __init__(self, folder: Path, cells: list[dict[str, Any]], processes: int) -> None:
        self.folder = folder
        self.cells = {each["name"]: each for each in cells}
        found = launch(
            f"tests.support.recorded:{'run_cells' if processes > 1 else 'run_plain_cells'}",
            processes=processes,
            folder=folder,
            args={"cells": cells},
            env=SMALL,
            timeout=400,
        )
        self.facts = {each["name"]: result["facts"] for each, result in zip(cells, found[0], strict=True)}

    def check(self, name: str) -> None:
        """Assert everything that holds for a cell."""
        this = self.cells[name]
        run = gradtap.open(self.folder / f"{name}.gradtap")
        arrays = np.load(self.folder / f"{name}.npz")
        assert list(run.steps) == list(range(1, STEPS + 1))
        stored = [param.name for param in run.params if param.stored]
        assert sorted(stored) == sorted({key.split("/")[2] for key in arrays.files if key.startswith("engine/1/")})
        for step in run.steps:
            if not all(np.isfinite(arrays[f"engine/{step}/{param}"]).all() for param in stored):
                self._check_overflow(run, arrays, step, stored)
                continue
            flags = self._flags(this, step)
            assert set(run.ledger.row(step)["flags"]) == flags, f"step {step}"
            assert set(run.grad("side.weight", step).flags) == flags, f"step {step}"
            assert set(run.grad("out.bias", step).flags) == flags - {"untouched"}, f"step {step}"
            pairs = [self._check_gradient(run, arrays, this, step, param) for param in stored]
            values, wanted = (np.concatenate([pair[i] for pair in pairs if pair]) for i in (0, 1))
            error = np.linalg.norm(values - wanted) / np.linalg.norm(wanted)
            assert error <= TOLERANCE[this["dtype"]], f"step {step}: relative error {error:.2g}"
        self._check_ledger(run, this)

    @classmethod
    def _flags(cls, this: dict[str, Any], step: int) -> set[str]:
        """What a step must be marked with, and nothing else."""
        first, flags = cls._first_touch(this, step), set()
        if first < 0:
            flags.add("untouched")
        # In its first window a parameter has no old content that could be added.
        if this["stage"] == 2 and this["offload"] and first > 0 and step > 1:
            flags.add("late-touch")
        if not this["stage"] and this["through"] == "native" and this["clip"]:
            flags.add("modified-after-backward")
        return flags

    @staticmethod
    def _check_overflow(run: Any, arrays: Any, step: int, stored: list[str]) -> None:
        assert run.ledger.row(step)["state"] == "skipped-overflow"
        for param in stored:
            found = run.grad(param, step)
            assert "nonfinite" in found.flags
            assert np.array_equal(np.asarray(found), arrays[f"engine/{step}/{param}"], equal_nan=True)

    def _check_gradient(self, run: Any, arrays: Any, this: dict[str, Any], step: int, param: str) -> Any:
        values = np.asarray(run.grad(param, step))
        held = arrays[f"engine/{step}/{param}"].reshape(values.shape)
        assert values.dtype == np.float32
        assert np.array_equal(values.view(np.uint32), held.view(np.uint32)), (
            f"{param} at step {step}: not the engine's bits"
        )
        flags = self._flags(this, step)
        if param == "side.weight" and "late-touch" in flags:
            return None
        if param == "side.weight" and "untouched" in flags:
            assert this["offload"] or not values.any(), "what no backward reached is zero"
            return None
        wanted = arrays[f"reference/{step}/{param}"].reshape(values.shape)
        if "modified-after-backward" in flags:
            wanted = wanted * min(1.0, this["clip"] / (self.facts[this["name"]][step - 1]["norm"] + 1e-6))
        # A window with fewer micro-batches than it was divided by needs its factor to be their mean.
        values = values * run.ledger.row(step)["factor"]
        error = np.linalg.norm(values - wanted) / np.linalg.norm(wanted)
        assert error <= SINGLE * TOLERANCE[this["dtype"]], f"{param} at step {step}: relative error {error:.2g}"
        return values.ravel(), wanted.ravel()

    def _check_ledger(self, run: Any, this: dict[str, Any]) -> None:
        ledger = run.ledger
        micros = [micros_of(this, step) for step in run.steps]
        bare = not this["stage"] and this["through"] == "native"
        assert list(ledger["micro_seen"]) == micros
        # What a bare loop means to accumulate, nobody tells.
        assert list(ledger["accum_engine"]) == [1 if bare else this["accumulation"]] * STEPS
        assert list(ledger["factor"]) == [this["accumulation"] / micro for micro in micros]
        params = [param.name for param in run.params]
        touched = ledger["touched"]
        assert list(touched[:, params.index("side.weight")]) == [self._first_touch(this, step) for step in run.steps]
        trained = [params.index(param.name) for param in run.params if param.stored and param.name != "side.weight"]
        assert not touched[:, trained].any(), "every window's first micro-batch reaches the others"
        for step, facts in zip(run.steps, self.facts[this["name"]], strict=True):
            self._check_row(ledger.row(step), this, step, facts)

    def _check_row(self, row: Any, this: dict[str, Any], step: int, facts: dict[str, Any]) -> None:
        assert row["loss_scale"] == facts["loss_scale"] == 2.0 ** row["k"]
        assert row["state"] == ("applied" if facts["applied"] else "skipped-overflow")
        if facts["applied"]:
            assert row["norm"] == pytest.approx(facts["held_norm"], rel=1e-5)
        limit = this["clip"]
        if this["stage"]:
            self._check_engine_norm(row, this, step, facts)
        elif limit and this["through"] == "accelerate":
            assert row["clip_limit"] == limit
            assert row["norm_engine"] == pytest.approx(facts["norm"])
            assert facts["norm"] == pytest.approx(facts["held_norm"], rel=TOLERANCE[this["dtype"]])
            assert row["clip_coef"] == pytest.approx(min(1.0, limit / (facts["norm"] + 1e-6)), rel=1e-4)
        else:
            # Whether, and how, a loop of its own clips is not known: it is not made up.
            assert all(math.isnan(row[name]) for name in ("clip_limit", "norm_engine", "clip_coef"))

    def _check_engine_norm(self, row: Any, this: dict[str, Any], step: int, facts: dict[str, Any]) -> None:
        assert row["norm_engine"] == pytest.approx(facts["norm"], nan_ok=True)
        if self._first_touch(this, step) >= 0 and facts["applied"]:
            # Of untouched parameters ZeRO with offload applies old content, but leaves it out of its norm.
            assert row["norm"] == pytest.approx(facts["norm"], rel=2e-2)
        limit = this["clip"]
        assert row["clip_limit"] == limit
        if facts["applied"]:
            wanted = min(1.0, limit / (facts["norm"] + 1e-6)) if limit else 1.0
            assert row["clip_coef"] == pytest.approx(wanted, rel=1e-4)

    @staticmethod
    def _first_touch(this: dict[str, Any], step: int) -> int:
        reached = [m for m in range(this["accumulation"]) if uses_side(step, m, this["side"])]
        return reached[0] if reached else -1


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("native"), zero_cells(), 2)


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("accelerate"), accelerate_cells(), 2)


@pytest.mark.parametrize("name", [each["name"] for each in zero_cells()])
def test_zero_in_a_native_loop(native: Recorded, name: str) -> None:
    """The store holds ZeRO's own bits and the reference's gradient, whatever the offload, dtype, accumulation, clip."""
    native.check(name)


@pytest.mark.parametrize("name", [each["name"] for each in accelerate_cells()])
def test_through_accelerate(accelerated: Recorded, name: str) -> None:
    """The same holds through Accelerate, under ZeRO and DDP."""
    accelerated.check(name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("plain"), plain_cells(), 1)


@pytest.mark.parametrize("name", [each["name"] for each in plain_cells()])
def test_plain_torch_in_one_process(plain: Recorded, name: str) -> None:
    """The same holds for a bare (model, optimizer) and through Accelerate; a ragged window has a factor."""
    plain.check(name)


def test_flags_of_untouched_and_late_parameters(native: Recorded, accelerated: Recorded) -> None:
    """A window that never reached a parameter says so, and one that reached it late under ZeRO-2 offload too."""
    run = gradtap.open(accelerated.folder / "ddp-fp32-acc1.gradtap")
    assert "untouched" in run.grad("side.weight", 1).flags
    assert "untouched" not in run.grad("side.weight", 2).flags
    assert not np.asarray(run.grad("side.weight", 1)).any()
    late = gradtap.open(native.folder / "zero2-cpu-float32-acc3-clip0.05.gradtap")
    assert "late-touch" in late.grad("side.weight", 3).flags


def test_overflow_is_recorded_and_marked(native: Recorded) -> None:
    """Skipped steps are in the store with what overflowed, at falling loss scales, and later ones are applied."""
    ledger = gradtap.open(native.folder / f"{OVERFLOW}.gradtap").ledger
    states = list(ledger["state"])
    assert states[0] == "skipped-overflow" and states[-1] == "applied"
    assert ledger["loss_scale"][0] == 2.0**20 > ledger["loss_scale"][-1]


def test_scalars_keep_their_shape(native: Recorded, accelerated: Recorded, plain: Recorded) -> None:
    """A 0-d parameter reads as 0-d under DDP and plain torch; ZeRO refuses 0-d, so there the model has shape (1,)."""
    assert gradtap.open(accelerated.folder / "ddp-fp32-acc1.gradtap").grad("scale", 1).shape == ()
    alone = gradtap.open(plain.folder / "torch-native-float32-acc1-clip0.0.gradtap").grad("scale", 1)
    assert alone.shape == () and np.asarray(alone) != 0
    run = gradtap.open(native.folder / "zero2-no-float32-acc1-clip0.0.gradtap")
    assert run.grad("scale", 1).shape == (1,) and not math.isnan(float(run.grad("scale", 1)[0]))


def test_tied_and_frozen_parameters_are_listed(native: Recorded) -> None:
    """A tied parameter is stored once with its alias; a frozen one is listed and not stored."""
    run = gradtap.open(native.folder / "zero2-no-float32-acc1-clip0.0.gradtap")
    params = {param.name: param for param in run.params}
    assert params["embed.weight"].aliases == ("head.weight",)
    assert params["frozen.weight"].status == "frozen" and not params["frozen.weight"].stored


def test_three_ranks_with_uneven_cuts(tmp_path: Path) -> None:
    """Three ranks cut parameters at other places; the numbers stay the engine's."""
    cells = [
        cell("zero2-three", 2, "native", "float32", False, 2, 0.05, "always"),
        cell("zero1-three", 1, "native", "bfloat16", True, 1, 0.0, "always"),
        cell("ddp-three", 0, "accelerate", "float32", False, 2, 0.0, "always", scalar=True),
    ]
    recorded = Recorded(tmp_path, cells, 3)
    for each in cells:
        recorded.check(each["name"])


def codes(recorded: Recorded, name: str) -> dict[str, tuple[int, int]]:
    """Count and first step of each finding in a cell's ledger."""
    found = gradtap.open(recorded.folder / f"{name}.gradtap").findings
    return {finding.code: (finding.count, finding.first) for finding in found}


def test_the_audit_of_real_ledgers(native: Recorded, plain: Recorded) -> None:
    """Each fault that the cells provoke is found and nothing else; cells without one, most of all, are silent."""
    assert codes(plain, "torch-ragged-float32-clip0.05") == {"ragged-window": (STEPS // 2, 2)}
    assert codes(native, OVERFLOW) == {"skipped-steps": (4, 1)}
    for stage, dtype in itertools.product((1, 2), TOLERANCE):
        # Even steps reach the side branch: what they leave on the host is still there at steps 3 and 5.
        assert codes(native, f"zero{stage}-cpu-{dtype}-acc3-clip0.0") == {"stale-gradient": (2, 3)}
        assert codes(native, f"zero{stage}-no-{dtype}-acc3-clip0.0") == {}
    # Late in every window: ZeRO-2 adds to what was there, ZeRO-1 does not.
    assert codes(native, "zero2-cpu-float32-acc3-clip0.05") == {"stale-gradient": (STEPS - 1, 2)}
    assert codes(native, "zero1-cpu-float32-acc3-clip0.05") == {}
    for name in plain.cells:
        assert "ragged" in name or codes(plain, name) == {}


def test_stale_parameters_are_named(native: Recorded) -> None:
    """The evidence is the parameter that the odd steps do not reach."""
    (finding,) = gradtap.open(native.folder / "zero2-cpu-float32-acc3-clip0.0.gradtap").findings
    assert finding.evidence == {"parameters": {"side.weight": {"untouched": 2, "late": 0}}, "total": 1}


def test_consumed_of_real_ledgers(native: Recorded) -> None:
    """Clipping's coefficient is applied; a skipped step is refused, and the last one, whose scale may have grown."""
    run = gradtap.open(native.folder / "zero2-no-float32-acc1-clip0.05.gradtap")
    coefficient = run.ledger.row(2)["clip_coef"]
    assert 0 < coefficient < 1 and run.grad("out.bias", 2, as_consumed=True).consumed == (coefficient,)
    overflow = gradtap.open(native.folder / f"{OVERFLOW}.gradtap")
    for step, why in ((1, "skipped the update"), (STEPS, "none that follows")):
        with pytest.raises(gradtap.IncompleteError, match=why):
            overflow.grad("out.bias", step, as_consumed=True)
