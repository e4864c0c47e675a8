"""Lightning, really run: alone, under DDP, and under DeepSpeedStrategy, through the callback and through `attach`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from tests.support.launch import launch

TARGET = "tests.support.lightning_training:run_cells"
ALONE: list[dict[str, Any]] = [
    {"name": "plain", "way": "callback"},
    {"name": "accumulated", "way": "attach", "accumulation": 3, "clip": 0.05, "sgd": 1, "save": "checkpoint"},
    {"name": "resumed", "way": "callback", "accumulation": 3, "sgd": 1, "epochs": 3}
    | {"resume": "checkpoint", "after": 6},
    {"name": "by hand", "way": "callback", "hand": 1, "epochs": 1},
    {"name": "one of two", "way": "callback", "hand": 1, "epochs": 1, "optimizers": 2, "take": 1},
    {"name": "failed", "way": "callback", "fail": 3},
    {"name": "refused", "way": "callback", "hand": 1, "optimizers": 2},
]
DDP = {"name": "ddp", "way": "callback", "accumulation": 2, "clip": 0.05}
ZERO2 = [
    {"name": "zero2", "way": "callback", "accumulation": 3, "stage": 2, "clip": 0.05},
    {"name": "zero2 offload", "way": "attach", "stage": 2, "offload": True, "epochs": 1},
]
STEPS = {
    "plain": range(1, 15),
    "accumulated": range(1, 7),
    "resumed": range(7, 10),
    "by hand": range(1, 4),
    "one of two": range(1, 4),
    "failed": range(1, 4),
    "ddp": range(1, 9),
    "zero2": range(1, 5),
    "zero2 offload": range(1, 8),
}
Ran = tuple[Path, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All trainings; what each said of itself, by cell."""
    folder = tmp_path_factory.mktemp("lightning")
    told = launch(TARGET, processes=1, folder=folder, args={"alone": True, "cells": ALONE})[0]
    for cells in ([DDP], ZERO2):
        told += launch(TARGET, processes=2, folder=folder, args={"cells": cells})[0]
    return folder, {cell["name"]: each for cell, each in zip([*ALONE, DDP, *ZERO2], told, strict=True)}


@pytest.mark.parametrize("cell", STEPS)
def test_stored_values_are_the_gradients_before_clipping(ran: Ran, cell: str) -> None:
    """Bit for bit what the engine held at each step; times the ledger's factor, the window's mean in float64."""
    run, arrays = gradtap.open(ran[0] / f"{cell}.gradtap"), np.load(ran[0] / f"{cell}.npz")
    assert list(run.steps) == list(STEPS[cell])
    names = [param.name for param in run.params if param.stored]
    assert set(names) <= set(ran[1][cell]["names"]) and all(name.startswith("tiny.") for name in names)
    assert (len(names) < len(ran[1][cell]["names"])) == (cell == "one of two")
    for step in run.steps:
        factor = run.ledger.row(step)["factor"]
        for name in names:
            values = run.grad(name, step).values
            np.testing.assert_array_equal(values, arrays[f"engine/{step}/{name}"])
            expected = arrays[f"reference/{step}/{name}"]
            np.testing.assert_allclose(values * factor, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("cell", STEPS)
def test_no_step_is_flagged(ran: Ran, cell: str) -> None:
    """Lightning's clipping is seen, so no gradient counts as changed behind gradtap's back; the session is closed."""
    run = gradtap.open(ran[0] / f"{cell}.gradtap")
    assert all(run.ledger.row(step)["flags"] == () for step in run.steps)
    assert run.sessions[0].state == "closed"
    assert not ran[1][cell]["open"] and ran[1][cell]["hooks"] == 0


@pytest.mark.parametrize("cell", ["accumulated", "ddp", "zero2"])
def test_the_clip_is_in_the_ledger(ran: Ran, cell: str) -> None:
    """Limit and coefficient, from Lightning's own clipping and from DeepSpeed's."""
    run = gradtap.open(ran[0] / f"{cell}.gradtap")
    for step in run.steps:
        row = run.ledger.row(step)
        assert row["clip_limit"] == 0.05 and row["clip_coef"] == pytest.approx(0.05 / row["norm"], rel=1e-4)


def test_a_short_window_is_divided_by_the_full_count(ran: Ran) -> None:
    """The last window of an epoch holds one micro-batch of three and Lightning divides by three: factor 3."""
    run = gradtap.open(ran[0] / "accumulated.gradtap")
    rows = [run.ledger.row(step) for step in run.steps]
    assert [row["micro_seen"] for row in rows] == [3, 3, 1, 3, 3, 1]
    assert [row["factor"] for row in rows] == [1, 1, 3, 1, 1, 3]
    assert {(row["accum_engine"], row["accum_loop"], row["divisor"]) for row in rows} == {(3, 3, 3.0)}


def test_lightning_with_deepspeed_divides_twice(ran: Ran) -> None:
    """Once by Lightning, once by the engine: the divisor is 9 for 3 micro-batches, and the factor says 3."""
    run = gradtap.open(ran[0] / "zero2.gradtap")
    for step in run.steps:
        row = run.ledger.row(step)
        assert (row["micro_seen"], row["accum_engine"], row["accum_loop"]) == (3, 3, 3)
        assert (row["divisor"], row["factor"]) == (9.0, 3.0)


def test_a_training_that_fails_leaves_a_readable_run_and_its_own_error(ran: Ran) -> None:
    """What was recorded before the failure is there; the process goes on with nothing attached."""
    assert list(gradtap.open(ran[0] / "failed.gradtap").steps) == [1, 2, 3]


def test_several_optimizers_want_one_named(ran: Ran) -> None:
    """Refused before the first step, with what to do."""
    assert ran[1]["refused"]["told"].startswith("UnsupportedError: this training has 2 optimizers; a run records one")
    assert not (ran[0] / "refused.gradtap").exists()
