"""The callback's own rules, without a training; and the watch of `Accelerator.prepare`."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import gradtap
from gradtap.capture.prepare import watch_prepare
from gradtap.hf import GradTapCallback


def test_a_wrong_argument_is_refused_by_the_constructor(tmp_path: Path) -> None:
    """Hours before the training would get there, and an unknown one as Python does."""
    with pytest.raises(gradtap.UsageError, match="codec is 'exakt'"):
        GradTapCallback(tmp_path / "a.gradtap", codec="exakt")
    with pytest.raises(TypeError, match="evry"):
        GradTapCallback(tmp_path / "a.gradtap", evry=2)


def test_prepare_is_patched_while_somebody_listens_only() -> None:
    """One patch for two listeners, both told; the class has its own function back when the last has gone."""
    original = vars(Accelerator)["prepare"]
    first: list[Any] = []
    second: list[Any] = []
    stop = [watch_prepare(first.append), watch_prepare(second.append)]
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    stop[0]()
    stop[0]()
    accelerator.prepare(torch.nn.Linear(2, 2))
    assert vars(Accelerator)["prepare"] is not original
    stop[1]()
    assert vars(Accelerator)["prepare"] is original
    assert first == [accelerator] and second == [accelerator, accelerator]


def test_a_callback_that_is_thrown_away_leaves_no_patch(tmp_path: Path) -> None:
    """Also where no training has ever begun."""
    original = vars(Accelerator)["prepare"]
    callback = GradTapCallback(tmp_path / "a.gradtap")
    assert vars(Accelerator)["prepare"] is not original
    del callback
    gc.collect()
    assert vars(Accelerator)["prepare"] is original


def test_an_optimizer_that_nobody_prepared_is_refused(tmp_path: Path) -> None:
    """A callback made after `prepare` says so, instead of recording another Trainer's training."""
    model = torch.nn.Linear(2, 2)
    other = Accelerator(cpu=True)
    callback = GradTapCallback(tmp_path / "a.gradtap")
    other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = SimpleNamespace(global_step=0)
    with pytest.raises(gradtap.AttachError, match="make GradTapCallback before"):
        callback.on_train_begin(SimpleNamespace(gradient_accumulation_steps=1), state, None, optimizer=object())
    callback.close()
    assert not (tmp_path / "a.gradtap").exists()


def test_the_callback_finds_the_accelerator_of_its_optimizer(tmp_path: Path) -> None:
    """Among several Accelerators it takes the one that prepared the Trainer's optimizer; tags go with their step."""
    callback = GradTapCallback(tmp_path / "a.gradtap", every=1)
    prepared = []
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        accelerator = Accelerator(cpu=True)
        prepared.append((accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))))
    _, model, optimizer = prepared[0]
    args, state = SimpleNamespace(gradient_accumulation_steps=3), SimpleNamespace(global_step=6)
    callback.on_train_begin(args, state, None, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.is_world_process_zero = True
    callback.on_log(args, state, None, logs={"loss": 2.5, "other": 1})
    callback.on_log(args, state, None, logs={"eval_loss": 9.0})
    callback.on_train_end(args, state, None)
    run = gradtap.open(tmp_path / "a.gradtap")
    assert list(run.steps) == [7] and run.tags_of(7) == {"loss": 2.5}
    assert run.ledger.row(7)["accum_loop"] == 3
    assert callback.tap is None
