"""What a loop changes after attach: recording goes on for what was there, and what is not recorded is said once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from gradtap.errors import UnsupportedError
from tests.support.tiny_model import TinyModel, batch
from tests.unit.capture.test_torch_source import Log, _made, _train


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_group_added_after_attach_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Known parameters go on, the new ones are counted in one warning, and rates are those of the known groups."""
    model, optimizer, log = _made()
    _train(model, optimizer)
    assert not _warnings(caplog)
    late = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer.add_param_group({"params": late, "lr": 0.5})
    _train(model, optimizer, steps=3)
    said = _warnings(caplog)
    assert len(said) == 1 and "not recorded: parameters added to the optimizer after attach (2; " in said[0]
    assert "seen first at step 2" in said[0] and "attach again" in said[0]
    assert [facts.learning_rates for facts in log.facts] == [(1e-3,)] * 4
    assert all(set(grads) == set(log.grads[0]) for grads in log.grads)
    assert all(facts.flags == 0 for facts in log.facts)


def test_a_parameter_that_is_unfrozen_after_attach_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """It has no array in this session: one warning names it, and the others go on."""
    model, optimizer, log = _made()
    _train(model, optimizer)
    model.frozen.requires_grad_(True)
    _train(model, optimizer, steps=2)
    said = _warnings(caplog)
    assert len(said) == 1 and "parameters frozen at attach and trainable now (2: frozen.weight, " in said[0]
    assert log.calls == ["before", "after"] * 3 and "frozen.weight" not in log.grads[2]


def test_a_parameter_that_is_frozen_and_unfrozen_again_is_followed() -> None:
    """While frozen it has no gradient and counts as untouched; afterwards its first touch is seen as before."""
    model, optimizer, log = _made()
    index = [spec.name for spec in log.source.params].index("out.bias")
    for frozen in (False, True, False):
        model.out.bias.requires_grad_(not frozen)
        _train(model, optimizer)
    assert [int(facts.touched[index]) for facts in log.facts] == [0, -1, 0]
    assert [grads["out.bias"] is None for grads in log.grads] == [False, True, False]


def test_a_model_that_is_cast_after_attach_is_refused_in_words() -> None:
    """The step's facts cannot be had: the error names a parameter, both dtypes, and the cure; training could go on."""
    model = TinyModel()
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)

    class Quiet(Log):
        def before_step(self) -> None:
            try:
                super().before_step()
            except UnsupportedError as error:
                said.append(str(error))

    from gradtap.capture.detect import find_source

    said: list[str] = []
    log: Any = Quiet(find_source((model, optimizer)))  # type: ignore[arg-type]
    model.to(torch.float64)
    _train(model, optimizer)
    assert len(said) == 1 and "is float64 and was float32 at attach" in said[0] and "attach again" in said[0]
    model.to(torch.float32)
    _train(model, optimizer)
    assert len(said) == 1 and len(log.facts) == 1


@pytest.mark.parametrize("how", ["step", "unscale first", "fused", "fused, unscale first"])
def test_a_gradient_scaler_of_the_loop_is_seen(how: str) -> None:
    """Undone by a fused optimizer it is told as k; unscaled in place before the step, the step is labelled."""
    from gradtap import flags

    model, optimizer, log = _made(torch.optim.SGD, fused="fused" in how)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)  # type: ignore[attr-defined]
    for step in (1, 2):
        scaler.scale(model(batch(step, 0, 0))).backward()
        held = model.out.bias.grad.clone()  # type: ignore[union-attr]
        if "unscale" in how:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        facts = log.facts[-1]
        if how == "fused":
            assert (facts.k, facts.loss_scale, facts.flags) == (9, 512.0, 0)
            assert torch.equal(log.grads[-1]["out.bias"], held)
        else:
            assert (facts.k, facts.loss_scale, facts.flags) == (0, 1.0, flags.MODIFIED_AFTER_BACKWARD)
            assert torch.equal(log.grads[-1]["out.bias"], held / 512)
    _train(model, optimizer)
    assert log.facts[-1].flags == 0, "a step outside the scaler is not labelled"
