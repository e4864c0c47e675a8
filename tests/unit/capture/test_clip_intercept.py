"""Clipping through a real Accelerator on one process: capture comes first, once, and the facts of the call are kept."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator

from gradtap import flags
from gradtap.capture.detect import find_source
from tests.support.tiny_model import TinyModel, batch, reference
from tests.unit.capture.test_torch_source import Log


class Made:
    """An accelerated tiny model with a listener."""

    def __init__(self, accumulation: int = 1) -> None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = TinyModel(scalar=True)
        trained = [param for param in model.parameters() if param.requires_grad]
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
        self.log = Log(find_source(self.accelerator))  # type: ignore[arg-type]

    def backward(self, step: int = 1, micro: int = 0) -> None:
        self.accelerator.backward(self.model(batch(step, micro, 0)))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("how", ["norm", "value"])
def test_the_gradient_is_taken_before_clipping(how: str) -> None:
    """What is taken is the unclipped gradient, once, with no flag."""
    made = Made()
    expected = reference(made.model, 1, 1, 1)
    made.backward()
    if how == "norm":
        made.accelerator.clip_grad_norm_(made.model.parameters(), 1e-3)
    else:
        made.accelerator.clip_grad_value_(made.model.parameters(), 1e-3)
    made.step()
    assert made.log.calls == ["before", "after"]
    assert made.log.facts[0].flags == 0
    assert torch.allclose(made.log.grads[0]["out.bias"].double(), expected["out.bias"], rtol=1e-4)


def test_limit_norm_and_coefficient_are_kept() -> None:
    """The outcome holds what the clip call returned, though the next window has begun."""
    made = Made()
    made.backward()
    norm = float(made.accelerator.clip_grad_norm_(made.model.parameters(), 0.5))
    made.step()
    made.backward(2)
    made.accelerator.clip_grad_norm_(made.model.parameters(), 0.25)
    made.step()
    assert [facts.clip_limit for facts in made.log.facts] == [0.5, 0.25]
    outcome = made.log.outcomes[0]
    assert outcome.norm_engine == norm
    assert math.isclose(outcome.clip_coef, min(1.0, 0.5 / (norm + 1e-6)))


@pytest.mark.parametrize("how", ["part", "twice", "value"])
def test_no_single_coefficient_is_made_up(how: str) -> None:
    """Clipping a part of the parameters, in several calls, or by value leaves limit, norm and coefficient unknown."""
    made = Made()
    made.backward()
    params = list(made.model.parameters())
    if how == "value":
        made.accelerator.clip_grad_value_(params, 0.1)
    else:
        made.accelerator.clip_grad_norm_(params[:3], 0.5)
        if how == "twice":
            made.accelerator.clip_grad_norm_(params[3:], 0.5)
    made.step()
    made.backward()
    made.step()
    outcome = made.log.outcomes[0]
    assert math.isnan(outcome.norm_engine) and math.isnan(outcome.clip_coef)
    assert made.log.calls == ["before", "after"] * 2


def test_another_norm_is_not_told_as_the_l2_norm() -> None:
    """Clipping by the largest element has a coefficient but no L2 norm."""
    made = Made()
    made.backward()
    made.accelerator.clip_grad_norm_(made.model.parameters(), 0.01, norm_type=float("inf"))
    made.step()
    made.backward()
    made.step()
    outcome = made.log.outcomes[0]
    assert math.isnan(outcome.norm_engine) and 0 < outcome.clip_coef < 1


def test_a_generator_of_parameters_is_not_used_up() -> None:
    """Accelerate still gets all parameters when the loop passes a generator."""
    made = Made()
    made.backward()
    made.accelerator.clip_grad_norm_(made.model.parameters(), 1e-3)
    norm = torch.nn.utils.get_total_norm([param.grad for param in made.model.parameters() if param.grad is not None])
    assert float(norm) <= 1.01e-3


def test_an_update_that_the_loop_skips_after_clipping_counts_as_a_step() -> None:
    """Clip, look at the norm, do not step: the capture ends as unknown, and the next window is captured anew."""
    made = Made()
    made.backward(1)
    made.accelerator.clip_grad_norm_(made.model.parameters(), 0.5)
    made.optimizer.zero_grad()
    made.backward(2)
    made.accelerator.clip_grad_norm_(made.model.parameters(), 0.5)
    made.step()
    assert made.log.calls == ["before", "after"] * 2
    assert [outcome.state for outcome in made.log.outcomes] == ["unknown"]
    assert not torch.equal(made.log.grads[0]["out.bias"], made.log.grads[1]["out.bias"])


def test_clipping_in_the_middle_of_a_window_is_flagged() -> None:
    """A clip call at a micro-batch that is no boundary captures nothing, and the step is labelled modified."""
    made = Made(accumulation=2)
    for micro in range(2):
        with made.accelerator.accumulate(made.model):
            made.backward(1, micro)
            made.accelerator.clip_grad_norm_(made.model.parameters(), 0.5)
            made.step()
    assert made.log.calls == ["before", "after"]
    assert made.log.facts[0].flags == flags.MODIFIED_AFTER_BACKWARD


def test_a_ragged_window_has_a_factor() -> None:
    """A boundary after one micro-batch of two, divided by two, is told with factor 2 and both counts."""
    made = Made(accumulation=2)
    made.accelerator.gradient_state._set_sync_gradients(True)
    made.backward()
    made.step()
    facts = made.log.facts[0]
    assert (facts.factor, facts.micro_seen, facts.divisor, facts.accum_loop) == (2.0, 1, 2.0, 2)
    expected = reference(made.model, 1, 1, 1)["out.bias"].shape
    assert made.log.grads[0]["out.bias"].shape == expected
