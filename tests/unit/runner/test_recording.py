"""What is attached within a process of `gradtap run`, and what the parent hears of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import gradtap
import gradtap.tap
from gradtap.cli.run import _steps
from gradtap.runner import attaching, launch
from gradtap.runner.orders import VARIABLE, Orders, heard, orders_here, tell


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[attaching.Recording]:
    """A recording under orders to write to `tmp_path/made`."""
    (tmp_path / "work").mkdir()
    orders = Orders(store=str(tmp_path / "made"), work=str(tmp_path / "work"), options={"every": 1})
    monkeypatch.setenv(VARIABLE, orders.dump())
    taps: list[gradtap.tap.Tap] = []
    monkeypatch.setattr(attaching, "attach", lambda *args, **kwargs: taps.append(gradtap.tap.attach(*args, **kwargs)))
    yield attaching.Recording()
    for tap in taps:
        tap.close()


def prepared(recording: attaching.Recording, count: int = 1) -> tuple[Any, list[Any], list[Any]]:
    """An Accelerator with `count` models and optimizers."""
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(2, 2) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    done = accelerator.prepare(*models, *optimizers)
    recording.prepared(accelerator)
    return accelerator, list(done[:count]), list(done[count:])


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_one_model_goes_into_the_store_itself(recording: attaching.Recording, tmp_path: Path) -> None:
    """Attached at the first forward pass in training, not at one without gradients."""
    _, (model,), (optimizer,) = prepared(recording)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert not (tmp_path / "made").exists()
    step(model, optimizer)
    assert [event["event"] for event in heard(tmp_path / "work")] == ["prepared", "attached"]
    assert not model._forward_pre_hooks


def test_models_of_two_accelerators_are_told_apart(recording: attaching.Recording, tmp_path: Path) -> None:
    """By class, the second of a class with a number, in the order of their preparation."""
    kept = [prepared(recording), prepared(recording)]
    for _, (model,), (optimizer,) in kept:
        step(model, optimizer)
    stores = [event["store"] for event in heard(tmp_path / "work") if event["event"] == "attached"]
    assert stores == [str(tmp_path / "made" / name) for name in ("Linear", "Linear-2")]


def test_what_is_prepared_later_is_said(
    recording: attaching.Recording, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model for evaluation is no loss; another optimizer is named, once, and the script goes on."""
    accelerator, (model,), (optimizer,) = prepared(recording)
    step(model, optimizer)
    accelerator.prepare(torch.nn.Linear(1, 1))
    with caplog.at_level(logging.WARNING, "gradtap"):
        recording.prepared(accelerator)
        assert not caplog.records
        later = prepared(recording)
        recording.prepared(later[0])
    assert [record.message.count("1 more optimizer prepared") for record in caplog.records] == [1]
    assert heard(tmp_path / "work")[-1]["event"] == "late"


def test_a_refusal_reaches_the_script_and_the_parent(recording: attaching.Recording, tmp_path: Path) -> None:
    """Raised where the model is called, and told with the model's name."""
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    model, _ = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    other = torch.nn.Linear(2, 2)
    accelerator.prepare(other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    recording.prepared(accelerator)
    with pytest.raises(gradtap.UnsupportedError, match="trains 2 prepared models"):
        model(torch.ones(1, 2))
    events = heard(tmp_path / "work")
    assert events[-1]["event"] == "refused" and "trains 2 prepared models" in events[-1]["error"]
    with pytest.raises(gradtap.CaptureError, match="nothing was recorded: the prepared models: an optimizer"):
        launch._judge(events, 1)


def test_the_reason_names_an_interpreter_without_gradtap() -> None:
    """The command's Python is not the one that gradtap is installed for."""
    events = [{"event": "missing", "python": "/opt/python", "error": "No module named 'gradtap'"}]
    with pytest.raises(gradtap.CaptureError, match="/opt/python has no gradtap"):
        launch._judge(events, 0)


def test_the_command_s_code_counts_where_something_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else was refused; without a recording a failure keeps its code and is explained."""
    assert launch._judge([{"event": "refused", "model": "a", "error": "b"}, {"event": "attached"}], 5) == 5
    assert launch._judge([{"event": "imported"}], 5) == 5
    assert "ended with exit code 5, and nothing was recorded" in capsys.readouterr().err


def test_orders_survive_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And are None outside of `gradtap run`, where nothing is told; a torn last line is left out."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert orders_here() is None
    tell("nobody hears")
    orders = Orders(store="/s", work=str(tmp_path), options={"select": ["a", "!b"], "every": "log-spaced"})
    monkeypatch.setenv(VARIABLE, orders.dump())
    assert orders_here() == orders
    tell("one", number=1)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text(file.read_text() + '{"event": "to')
    assert [event["event"] for event in heard(tmp_path)] == ["one"]


@pytest.mark.parametrize(
    ("text", "steps"),
    [("10", 10), ("1, 2,500", [1, 2, 500]), ("[7]", [7]), ("log-spaced", "log-spaced"), ("first 9, then every 3",) * 2],
)
def test_every_is_read_as_attach_takes_it(text: str, steps: Any) -> None:
    """Numbers, lists of numbers, and the words of a schedule."""
    assert _steps(text) == steps


def test_what_is_no_program_is_a_usage_error(tmp_path: Path) -> None:
    """Also a file that may be executed and is none."""
    (tmp_path / "nothing").write_bytes(b"\0")
    (tmp_path / "nothing").chmod(0o755)
    with pytest.raises(gradtap.UsageError, match="cannot start"):
        launch.run_command([str(tmp_path / "nothing")], str(tmp_path / "made"), {})
