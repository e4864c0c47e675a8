"""Plain torch in one process: when the listener is called, what it sees, and what is labelled or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradtap import flags
from gradtap.capture.detect import find_source
from gradtap.capture.torch_optimizer import TorchSource
from gradtap.errors import UnsupportedError
from tests.support.tiny_model import TinyModel, batch, reference


class Log:
    """A listener that keeps facts, copies of the gradients and, one boundary later, outcomes."""

    def __init__(self, source: TorchSource) -> None:
        self.source = source
        self.facts: list[Any] = []
        self.grads: list[dict[str, Any]] = []
        self.outcomes: list[Any] = []
        self.numbers: list[int | None] = []
        self.calls: list[str] = []
        source.install(self)

    def before_step(self) -> None:
        self.calls.append("before")
        if self.facts:
            self.outcomes.append(self.source.outcome())
        self.numbers.append(self.source.next_step())
        self.facts.append(self.source.step_facts(len(self.facts) + 1))
        taken = {}
        for grad in self.source.gradients():
            assert (grad.start, grad.stop) == (0, self.source.params[grad.param].numel)
            taken[self.source.params[grad.param].name] = None if grad.tensor is None else grad.tensor.clone()
        self.grads.append(taken)

    def after_step(self) -> None:
        self.calls.append("after")


def _made(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> tuple[TinyModel, Any, Log]:
    model = TinyModel(scalar=True)
    made = optimizer([param for param in model.parameters() if param.requires_grad], lr=1e-3, **options)
    source = find_source((model, made))
    assert isinstance(source, TorchSource)
    return model, made, Log(source)


def _train(model: TinyModel, optimizer: Any, steps: int = 1, **kwargs: Any) -> None:
    for step in range(1, steps + 1):
        model(batch(step, 0, 0), **kwargs).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_gradient_is_that_of_the_reference() -> None:
    """Each stored parameter's gradient, 0-d and 4-d ones too, is taken whole and in row-major order."""
    model, optimizer, log = _made()
    expected = reference(model, 1, 1, 1)
    _train(model, optimizer)
    assert set(log.grads[0]) == set(expected)
    for name, value in log.grads[0].items():
        np.testing.assert_allclose(value.numpy(), expected[name].reshape(-1).numpy(), rtol=1e-4, atol=1e-6)
    assert log.calls == ["before", "after"]


def test_facts_of_a_plain_step() -> None:
    """One micro-batch, no scale, the group's learning rate, no flag, an applied step without a known norm."""
    model, optimizer, log = _made()
    _train(model, optimizer, steps=2)
    facts = log.facts[0]
    assert (facts.k, facts.factor, facts.loss_scale, facts.micro_seen, facts.divisor) == (0, 1.0, 1.0, 1, 1.0)
    assert (facts.learning_rates, facts.flags) == ((1e-3,), 0)
    assert math.isnan(facts.clip_limit)
    assert log.outcomes[0].state == "applied" and math.isnan(log.outcomes[0].norm_engine)


def test_statuses_of_frozen_and_unoptimized_parameters() -> None:
    """A frozen parameter and one that the optimizer does not hold are listed, not stored, and owned by nobody."""
    model = TinyModel()
    left_out = [param for name, param in model.named_parameters() if param.requires_grad and name != "side.weight"]
    source = find_source((model, torch.optim.SGD(left_out, lr=0.1)))
    status = {spec.name: spec.status for spec in source.params}
    assert (status["frozen.bias"], status["side.weight"], status["scale"]) == ("frozen", "unoptimized", "captured")
    owned = {spec.name for spec, own in zip(source.params, source.ownership, strict=True) if own is not None}
    assert owned == {name for name, value in status.items() if value == "captured"}


def test_a_missing_gradient_reads_as_none_and_is_flagged() -> None:
    """A parameter without gradient is given as None, untouched, and the step has the flag."""
    model, optimizer, log = _made()
    _train(model, optimizer, side=False)
    assert log.grads[0]["side.weight"] is None
    assert log.facts[0].flags == flags.UNTOUCHED


def test_a_gradient_in_another_memory_layout_is_given_row_major() -> None:
    """A channels-last convolution weight's gradient comes in the order of its shape."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = find_source((model, optimizer))
    log = Log(source)  # type: ignore[arg-type]
    model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().sum().backward()
    grad = model.weight.grad
    assert grad is not None and not grad.is_contiguous()
    expected = grad.contiguous().reshape(-1).clone()
    optimizer.step()
    assert torch.equal(log.grads[0]["weight"], expected)


def test_a_subclass_that_calls_its_parents_step_is_one_step() -> None:
    """Torch fires hooks twice for `super().step()`; the listener is called once before and once after all of it."""

    class Careful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            log.calls.append("own work")
            return result

    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    model, optimizer, log = _made(Careful)
    _train(model, optimizer, steps=2)
    assert log.calls == ["before", "own work", "after"] * 2


def test_a_closure_is_evaluated_before_the_capture() -> None:
    """With `step(closure)` what is taken is the gradient that the closure computed, not the one before it."""
    model, optimizer, log = _made(torch.optim.SGD)
    for step in (1, 2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(step, 0, 0))
            loss.backward()
            return loss

        expected = reference(model, step, 1, 1)
        optimizer.step(closure)
        np.testing.assert_allclose(
            log.grads[-1]["out.bias"].numpy(), expected["out.bias"].numpy(), rtol=1e-4, atol=1e-6
        )
    assert log.calls == ["before", "after"] * 2


def test_a_closure_that_is_evaluated_twice_is_one_step() -> None:
    """An optimizer that evaluates its closure again within a step gives one capture: of the first evaluation."""

    class Twice(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> Any:
            closure()
            return closure()

    model, optimizer, log = _made(Twice)
    seen = []
    for _ in range(2):

        def closure() -> None:
            optimizer.zero_grad()
            model(batch(len(seen), 0, 0)).backward()
            seen.append(model.out.bias.grad.clone())  # type: ignore[union-attr]

        optimizer.step(closure)
    assert log.calls == ["before", "after"] * 2
    assert torch.equal(log.grads[0]["out.bias"], seen[0]) and torch.equal(log.grads[1]["out.bias"], seen[2])


@pytest.mark.parametrize("change", ["clip", "scale one", "replace"])
def test_a_write_after_backward_is_flagged(change: str) -> None:
    """Clipping, scaling one gradient in place, or putting another tensor there, is seen and labelled."""
    model, optimizer, log = _made()
    model(batch(1, 0, 0)).backward()
    if change == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    elif change == "scale one":
        model.out.bias.grad.mul_(0.5)  # type: ignore[union-attr]
    else:
        model.out.bias.grad = torch.zeros_like(model.out.bias)
    optimizer.step()
    assert log.facts[0].flags == flags.MODIFIED_AFTER_BACKWARD


def test_accumulation_is_no_modification() -> None:
    """Later backwards of a window write to the gradient too, and that raises no flag."""
    model, optimizer, log = _made()
    for micro in range(3):
        model(batch(1, micro, 0)).backward()
    optimizer.step()
    assert (log.facts[0].flags, log.facts[0].micro_seen) == (0, 3)


def test_a_gradient_that_no_backward_made_is_flagged_as_unknown() -> None:
    """A gradient assigned by hand, without any backward, can not be said to be unmodified."""
    model, optimizer, log = _made()
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    assert log.facts[0].flags == flags.CLIP_UNKNOWN | flags.UNTOUCHED


def test_a_restored_adam_tells_its_step() -> None:
    """A state loaded after attach counts at the first boundary, and steps are counted on from there."""
    model, optimizer, _ = _made()
    _train(model, optimizer, steps=5)
    state = optimizer.state_dict()
    model, optimizer, log = _made()
    optimizer.load_state_dict(state)
    _train(model, optimizer, steps=3)
    assert log.numbers == [6, 7, 8]


def test_a_fresh_optimizer_does_not_tell_its_step() -> None:
    """Nothing restored: the number is the caller's, at the first boundary and at later ones."""
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        model, optimizer, log = _made(kind)
        _train(model, optimizer, steps=3)
        assert log.numbers == [None] * 3


def test_a_step_that_raises_does_not_stop_later_captures() -> None:
    """When the optimizer fails and the loop goes on, the failed update ends as unknown and the next is captured."""
    model, optimizer, log = _made()
    model(batch(1, 0, 0)).backward()
    good = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = good
    _train(model, optimizer, steps=2)
    assert log.calls == ["before", "after"] * 3
    assert [outcome.state for outcome in log.outcomes] == ["unknown", "applied"]


def test_a_sparse_gradient_is_refused_when_it_comes() -> None:
    """A sparse gradient from a functional call, which attach could not see, raises instead of being densified."""
    weight = nn.Parameter(torch.randn(5, 3))
    model = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD([weight], lr=0.1)
    source = find_source((model, optimizer))
    nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
    with pytest.raises(UnsupportedError, match="gradient of weight is sparse"):
        source.gradients()


def test_gradients_taken_away_in_backward_are_refused() -> None:
    """When backward reached parameters but none has a gradient left at the step, that is an error, not zeros."""
    model, optimizer, _ = _made()
    source = find_source_again(model, optimizer)
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model(batch(1, 0, 0)).backward()
    with pytest.raises(UnsupportedError, match="inside backward"):
        source.gradients()


def find_source_again(model: TinyModel, optimizer: Any) -> Any:
    """The installed source of a pair made by `_made`."""
    hook: Callable[..., Any] = next(iter(optimizer._optimizer_step_pre_hooks.values()))
    return hook.__self__  # type: ignore[attr-defined]


def test_nothing_is_left_after_remove() -> None:
    """After `remove` hooks are gone, training goes on unseen, and the pair may be attached again."""
    model, optimizer, log = _made()
    _train(model, optimizer)
    log.source.remove()
    log.source.remove()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    _train(model, optimizer)
    assert log.calls == ["before", "after"]
    Log(find_source((model, optimizer)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_captured_dtype_is_the_gradients(dtype: torch.dtype) -> None:
    """The spec names the dtype of `param.grad`, and the tensor given has it."""
    model = TinyModel().to(dtype)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    source = find_source((model, optimizer))
    log = Log(source)  # type: ignore[arg-type]
    _train(model, optimizer)
    assert {spec.dtype for spec in source.params} == {str(dtype).removeprefix("torch.")}
    assert {value.dtype for value in log.grads[0].values()} == {dtype}


def test_an_amp_scale_that_a_fused_optimizer_undoes_itself_is_told() -> None:
    """With `grad_scale` set on the optimizer during its step, gradients are still scaled and k says by how much."""
    model, optimizer, log = _made(torch.optim.SGD, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(512.0), torch.tensor(1.0)
    _train(model, optimizer, steps=2)
    assert (log.facts[0].k, log.facts[0].loss_scale) == (9, 512.0)
    assert log.outcomes[0].state == "skipped-overflow"
