"""The Lightning callback's own rules, with trainers that only look like one; real ones are in tests/integration."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning
import torch

import gradtap
import gradtap.lightning
from gradtap.lightning import GradTapCallback


class Plugin:
    """A precision plugin that clips in a way of its own."""

    def clip_grad_by_norm(self, optimizer: Any, value: float) -> None:
        """Nothing."""


def fake(optimizers: int = 1, *, automatic: bool = True) -> tuple[Any, Any]:
    """(trainer, module), as a callback sees them, with one layer for each optimizer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(max(1, optimizers))))
    made = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in range(optimizers)]
    strategy = SimpleNamespace(model=model, optimizers=made)
    trainer = SimpleNamespace(
        strategy=strategy,
        precision_plugin=Plugin(),
        accumulate_grad_batches=4,
        global_step=10,
        gradient_clip_algorithm=None,
        gradient_clip_val=0.5,
    )
    return trainer, SimpleNamespace(automatic_optimization=automatic)


def test_a_wrong_argument_is_refused_by_the_constructor(tmp_path: Path) -> None:
    """Long before `fit` would get there."""
    with pytest.raises(gradtap.UsageError, match="every is 0"):
        GradTapCallback(tmp_path / "a.gradtap", every=0)


def test_the_gradient_is_taken_when_lightning_says_so(tmp_path: Path) -> None:
    """At `on_before_optimizer_step` of its own optimizer, not at another's, and before what comes after the hook."""
    trainer, module = fake(2)
    callback = GradTapCallback(tmp_path / "a.gradtap", optimizer=1)
    callback.on_train_start(trainer, module)
    model, (first, second) = trainer.strategy.model, trainer.strategy.optimizers
    model(torch.ones(1, 2)).sum().backward()
    callback.on_before_optimizer_step(trainer, module, first)
    expected = model[1].weight.grad.clone()
    callback.on_before_optimizer_step(trainer, module, second)
    model[1].weight.grad.mul_(0.01)
    second.step()
    callback.on_train_end(trainer, module)
    run = gradtap.open(tmp_path / "a.gradtap")
    assert [param.name for param in run.params if param.stored] == ["1.weight", "1.bias"]
    assert torch.equal(torch.from_numpy(run.grad("1.weight", 1).values), expected)
    row = run.ledger.row(1)
    assert (row["accum_loop"], row["divisor"], row["factor"], row["clip_limit"]) == (4, 4.0, 4.0, 0.5)


def test_a_module_that_optimizes_by_hand_divides_by_itself(tmp_path: Path) -> None:
    """Lightning leaves its losses alone, so no division is counted; one optimizer takes Lightning's step numbers."""
    trainer, module = fake(automatic=False)
    callback = GradTapCallback(tmp_path / "a.gradtap")
    callback.on_train_start(trainer, module)
    trainer.strategy.model(torch.ones(1, 2)).sum().backward()
    callback.on_before_optimizer_step(trainer, module, trainer.strategy.optimizers[0])
    trainer.strategy.optimizers[0].step()
    callback.on_exception(trainer, module, RuntimeError("the training's"))
    run = gradtap.open(tmp_path / "a.gradtap")
    assert list(run.steps) == [11] and run.ledger.row(11)["factor"] == 1


@pytest.mark.parametrize(
    ("optimizers", "named", "words"),
    [(0, None, "configured no optimizer"), (2, None, "2 optimizers"), (2, 2, "allowed are 0 to 1")],
)
def test_what_cannot_be_told_apart_is_refused(tmp_path: Path, optimizers: int, named: Any, words: str) -> None:
    """Before the first step, with what to do, and nothing attached."""
    trainer, module = fake(optimizers)
    callback = GradTapCallback(tmp_path / "a.gradtap", optimizer=named)
    with pytest.raises(gradtap.AttachError, match=words):
        callback.on_train_start(trainer, module)
    assert callback.tap is None and not (tmp_path / "a.gradtap").exists()


def test_attach_takes_a_lightning_trainer_before_fit(tmp_path: Path) -> None:
    """The callback goes first; a trainer whose fit is under way is refused."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pytorch_lightning.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)
    with gradtap.attach(trainer, tmp_path / "a.gradtap", every=2) as tap:
        assert isinstance(trainer.callbacks[0], GradTapCallback)
        assert tap.path == str(tmp_path / "a.gradtap") and tap.session == ""
        with pytest.raises(gradtap.AttachError, match="no training is recorded"):
            tap.log(loss=1)
    assert "closed" in repr(tap)
    running = SimpleNamespace(training=True, state=SimpleNamespace(status="running"))
    with pytest.raises(gradtap.AttachError, match="fit is under way"):
        gradtap.lightning.attach_trainer(running, tmp_path / "a.gradtap", {})


def test_both_names_of_the_package_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `lightning` is loaded too, the callback is one of its callbacks as well."""

    class Callback:
        """The other package's."""

    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", SimpleNamespace(Callback=Callback))
    try:
        made = importlib.reload(gradtap.lightning).GradTapCallback
        assert issubclass(made, Callback) and issubclass(made, pytorch_lightning.Callback)
    finally:
        monkeypatch.undo()
        importlib.reload(gradtap.lightning)


def test_a_trainers_own_type_is_needed(tmp_path: Path) -> None:
    """Something that is only called Trainer is no target."""

    class Trainer:
        """Of nobody."""

    with pytest.raises(gradtap.AttachError, match="attach got a Trainer"):
        gradtap.attach(Trainer(), tmp_path / "a.gradtap")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gradtap.hf` without transformers says what to install."""
    monkeypatch.delitem(sys.modules, "gradtap.hf", raising=False)
    monkeypatch.delattr(gradtap, "hf", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(gradtap.MissingExtraError, match=r"gradtap\[hf\]"):
        gradtap.hf  # noqa: B018
