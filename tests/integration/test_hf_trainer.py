"""HF Trainer, really run: alone, under DDP, and under DeepSpeed ZeRO-2, through the callback and through `attach`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from tests.support.launch import launch

TARGET = "tests.support.hf_training:run_cells"
ALONE = [
    {"name": "plain", "way": "callback", "save": 4},
    {"name": "attached", "way": "attach", "optim": "sgd", "steps": 4},
    {"name": "again", "way": "callback", "resume": "plain/checkpoint-4", "steps": 8},
]
CELLS = ("plain", "attached", "again", "ddp", "zero2")
Ran = tuple[Path, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All trainings; what each said of itself, by cell."""
    folder = tmp_path_factory.mktemp("hf")
    told = launch(TARGET, processes=1, folder=folder, args={"alone": True, "cells": ALONE})[0]
    for cell in ({"name": "ddp", "way": "attach"}, {"name": "zero2", "way": "callback", "stage": 2}):
        told += launch(TARGET, processes=2, folder=folder, args={"cells": [cell]})[0]
    return folder, dict(zip(CELLS, told, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_stored_values_are_the_gradients_before_clipping(ran: Ran, cell: str) -> None:
    """Bit for bit what the engine held at each step, and the token-weighted mean of the window in float64."""
    folder, told = ran
    run, arrays = gradtap.open(folder / f"{cell}.gradtap"), np.load(folder / f"{cell}.npz")
    assert len(run.steps) == (4 if cell in ("attached", "again") else 8)
    for step in run.steps:
        for name in told[cell]["names"]:
            values = run.grad(name, step).values
            np.testing.assert_array_equal(values, arrays[f"engine/{step}/{name}"])
            expected = arrays[f"reference/{step}/{name}"]
            np.testing.assert_allclose(values, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("cell", CELLS)
def test_the_ledger_says_what_the_trainer_does(ran: Ran, cell: str) -> None:
    """Two micro-batches a window, one in the last of an epoch, which the Trainer divides rightly: factor 1."""
    run = gradtap.open(ran[0] / f"{cell}.gradtap")
    rows = [run.ledger.row(step) for step in run.steps]
    assert {row["factor"] for row in rows} == {1.0} and {row["divisor"] for row in rows} == {1.0}
    assert {(row["accum_engine"], row["accum_loop"]) for row in rows} == {(2, 2)}
    assert [row["micro_seen"] for row in rows] == [1 if step in (4, 8) else 2 for step in run.steps]
    assert all(row["flags"] == () and row["state"] == "applied" for row in rows)
    for row in rows:
        assert row["clip_coef"] == pytest.approx(0.05 / row["norm"], rel=1e-4)
    about = json.loads((run.path / "sessions/0000/session.json").read_text())
    assert about["engine"]["settings"]["through"] == "hf-trainer"


@pytest.mark.parametrize("cell", CELLS)
def test_the_trainers_log_is_kept_as_tags(ran: Ran, cell: str) -> None:
    """Loss, learning rate and norm of the Trainer's own log are with the step that they follow."""
    run, log = gradtap.open(ran[0] / f"{cell}.gradtap"), {entry["step"]: entry for entry in ran[1][cell]["log"]}
    for step in run.steps:
        assert run.tags_of(step) == {k: log[step][k] for k in ("loss", "learning_rate", "grad_norm", "epoch")}


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_is_left_after_training(ran: Ran, cell: str) -> None:
    """The session is closed with the training, and `Accelerator.prepare` is accelerate's own again."""
    assert gradtap.open(ran[0] / f"{cell}.gradtap").sessions[0].state == "closed"
    assert not ran[1][cell]["open"] and not ran[1][cell]["patched"]


def test_a_resumed_training_goes_on_with_the_trainers_numbers(ran: Ran) -> None:
    """From the checkpoint of step 4 the first step recorded is 5, with the same gradient as in the first training."""
    first, again = (gradtap.open(ran[0] / f"{name}.gradtap") for name in ("plain", "again"))
    assert list(again.steps) == [5, 6, 7, 8]
    for name in ran[1]["again"]["names"]:
        np.testing.assert_array_equal(again.grad(name, 5).values, first.grad(name, 5).values)
