"""Loops that do something odd: training is never changed, and a wrong number is never stored as a right one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtap
from gradtap.store.runfile import read_run
from tests.unit.tap.test_attach import ROOT, Training


class Odd(torch.optim.SGD):
    """Takes more than a closure, and calls it what it likes."""

    def step(self, loss_fn: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        self.seen = (loss_fn() if callable(loss_fn) else loss_fn, scale)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data -= scale * param.grad


@pytest.mark.parametrize(
    ("args", "kwargs", "seen"),
    [
        ((lambda: 5,), {}, (5, 1.0)),
        ((lambda: 5, 7.0), {}, (5, 7.0)),
        ((None, 2.0), {}, (None, 2.0)),
        (([1, 2],), {}, ([1, 2], 1.0)),
        ((), {"loss_fn": [3]}, ([3], 1.0)),
    ],
)
def test_arguments_of_step_arrive_as_given(tmp_path: Path, args: Any, kwargs: Any, seen: Any) -> None:
    """Whatever the loop hands to step is what the optimizer gets, in its place."""
    training = Training(Odd)
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.model.weight.sum().backward()
        training.optimizer.step(*args, **kwargs)
    assert training.optimizer.seen == seen
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1]


class Uncounted(torch.optim.SGD):
    """Keeps something else under `step`."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["step"] = None
        return super().step(closure)


def test_a_count_that_is_no_number_is_no_count(tmp_path: Path) -> None:
    """An optimizer whose state holds something else under `step` is numbered by counting."""
    training = Training(Uncounted)
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(3)
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2, 3]


def test_a_checkpoint_loaded_in_the_middle_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adam's own count falls: the steps that follow are not recorded under later numbers."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")
    training.steps(1)
    early = {**training.optimizer.state_dict()}
    early["state"] = {k: {n: v.clone() for n, v in s.items()} for k, s in early["state"].items()}
    training.steps(3)
    training.optimizer.load_state_dict(early)
    training.steps(2)
    tap.close()
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2, 3, 4]
    assert "checkpoint" in caplog.text
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(1)
    assert gradtap.open(tmp_path / "a.gradtap").grad("weight", 4).attempts == (2,)


def test_a_reshaped_parameter_is_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its gradient has another shape than the plan: recording says so and stores nothing wrong."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")
    training.steps(1)
    training.model.weight.grad = None
    training.model.weight.data = torch.randn(5, 7)
    training.optimizer.state.clear()
    training.steps(2)
    tap.close()
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1]
    assert caplog.text.count("(5, 7)") == 1


def test_attach_in_the_middle_of_a_window(tmp_path: Path) -> None:
    """Micro-batches before attach were not seen: the factor is unknown and flagged, not twice what it should be."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(5, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tap = None
    for micro in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 5)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if micro == 0:
            tap = gradtap.attach(accelerator, tmp_path / "a.gradtap")
    assert tap is not None
    tap.close()
    run = gradtap.open(tmp_path / "a.gradtap")
    assert "joined-late" in run.grad("weight", 1).flags and np.isnan(run.grad("weight", 1).factor[0])
    assert run.grad("weight", 2).flags == () and run.grad("weight", 2).factor == (1.0,)


def test_a_forked_child_that_trains_is_left_alone(tmp_path: Path) -> None:
    """It has no recorder's thread: it trains on, records nothing, and does not end the parent's session."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")
    training.steps(1)
    child = os.fork()
    if child == 0:
        try:
            for _ in range(3):
                ((training.model.weight * 9).sum()).backward()
                training.optimizer.step()
            tap.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    training.steps(1)
    tap.close()
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2]


def test_a_lost_run_file_loses_no_session(tmp_path: Path) -> None:
    """Attaching again lists what is there."""
    for _ in range(2):
        training = Training()
        with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
            training.steps(2)
    (tmp_path / "a.gradtap" / "run.json").unlink()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(1)
    assert read_run(tmp_path / "a.gradtap").sessions == ("0000", "0001", "0002")
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2, 3]


def test_a_store_within_a_run_is_refused(tmp_path: Path) -> None:
    """Nothing is written into another run."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(1)
    before = sorted(tmp_path.rglob("*"))
    for inner in ("inner.gradtap", "sessions/0000/gradients.zarr/inner"):
        with pytest.raises(gradtap.NotARunError, match="within the run"):
            gradtap.attach(training.pair, tmp_path / "a.gradtap" / inner)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("store", [None, 123, "a\0b"])
def test_a_store_that_is_no_path(store: Any) -> None:
    """Named as such."""
    with pytest.raises(gradtap.UsageError, match="store is"):
        gradtap.attach(Training().pair, store)


@pytest.mark.parametrize("every", [[0], [], [1.5], 0, -3, True, 2.5, None])
def test_wrong_rules(tmp_path: Path, every: Any) -> None:
    """Each names the value; NumPy's whole numbers are taken."""
    with pytest.raises(gradtap.UsageError, match="every"):
        gradtap.attach(Training().pair, tmp_path / "a.gradtap", every=every)


def test_whole_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    """As `run.grad` takes them."""
    training = Training(torch.optim.SGD)
    with gradtap.attach(training.pair, tmp_path / "a.gradtap", every=np.int64(2), first_step=np.int64(5)):
        training.steps(3)
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [6]


def test_clipping_that_escapes_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch's own clipping in a native loop changes what is recorded: flagged in every reader's answer, and said."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        for _ in range(3):
            (training.model.weight * 3).sum().backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            training.optimizer.step()
            training.optimizer.zero_grad()
    run = gradtap.open(tmp_path / "a.gradtap")
    assert all("modified-after-backward" in run.grad("weight", step).flags for step in run.steps)
    assert caplog.text.count("modified-after-backward") == 1


def test_what_is_recorded_is_said_at_attach(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Engine, processes, parameters and store; on a run that has sessions already, that steps become attempts."""
    caplog.set_level("INFO", logger="gradtap")
    for _ in range(2):
        training = Training()
        with gradtap.attach(training.pair, tmp_path / "a.gradtap", select="weight"):
            training.steps(1)
    told = [record.message for record in caplog.records if "recording" in record.message]
    assert "torch on 1 process, 1 of 2 parameters" in told[0] and "attempt" not in told[0]
    assert "new attempt" in told[1] and "0001" in told[1]


def test_attach_without_torch_says_what_to_install() -> None:
    """A base install has no torch: the error names the extra, and reading works."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import gradtap\n"
        "try:\n    gradtap.attach\nexcept gradtap.MissingExtraError as error:\n    print(error)\n"
        "gradtap.open\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'gradtap[train]'" in done.stdout
