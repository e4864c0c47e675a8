"""Loops of plain torch with more than one model or optimizer, and models that are wrapped, compiled or adapted."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradtap
from gradtap.capture.detect import find_source
from gradtap.errors import UnsupportedError
from tests.support.tiny_model import TinyModel, batch, reference


class Log:
    """A listener that keeps facts and copies of the gradients."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.source = find_source((model, optimizer))
        self.facts: list[Any] = []
        self.grads: list[dict[str, Any]] = []
        self.source.install(self)

    def before_step(self) -> None:
        self.facts.append(self.source.step_facts(len(self.facts) + 1))
        names = [param.name for param in self.source.params]
        self.grads.append({names[grad.param]: grad.tensor.clone() for grad in self.source.gradients()})

    def after_step(self) -> None:
        return None


@pytest.mark.parametrize("zero", ["optimizer", "optimizer to zeros", "model"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_models_in_one_loop_do_not_leak_into_each_other(zero: str, accumulation: int) -> None:
    """A GAN: the generator's backward reaches the discriminator, whose next window knows nothing of it."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    models = (generator, discriminator)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    g_log, d_log = (Log(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True))
    for _ in range(3):
        for which, log in ((1, d_log), (0, g_log)):
            if zero == "model":
                models[which].zero_grad()
            else:
                optimizers[which].zero_grad(set_to_none=zero == "optimizer")
            for _ in range(accumulation):
                fake = generator(torch.ones(2, 3))
                discriminator(fake.detach() if which else fake).square().mean().backward()
            expected = {name: param.grad.clone() for name, param in models[which].named_parameters()}  # type: ignore[union-attr]
            optimizers[which].step()
            assert all(torch.equal(value, expected[name].reshape(-1)) for name, value in log.grads[-1].items())
    for log in (g_log, d_log):
        assert [facts.micro_seen for facts in log.facts] == [accumulation] * 3
        assert all((facts.touched == 0).all() and facts.flags == 0 for facts in log.facts)
        log.source.remove()


def test_two_taps_at_once_store_what_each_model_had(tmp_path: Path) -> None:
    """Two recorders in one process, on two models that feed each other, each store their own model's gradients."""
    models = {"g": nn.Linear(3, 4), "d": nn.Linear(4, 1)}
    optimizers = {key: torch.optim.SGD(model.parameters(), lr=0.1) for key, model in models.items()}
    taps = {key: gradtap.attach((models[key], optimizers[key]), tmp_path / f"{key}.gradtap") for key in models}
    held: dict[str, list[torch.Tensor]] = {"g": [], "d": []}
    for _ in range(3):
        for key in ("d", "g"):
            models[key].zero_grad()
            fake = models["g"](torch.ones(2, 3))
            models["d"](fake.detach() if key == "d" else fake).square().mean().backward()
            held[key].append(models[key].weight.grad.clone())
            optimizers[key].step()
    for tap in taps.values():
        tap.close()
    for key, grads in held.items():
        run = gradtap.open(tmp_path / f"{key}.gradtap")
        assert [param.name for param in run.params] == ["weight", "bias"]
        assert all(np.array_equal(np.asarray(run.grad("weight", step)), grads[step - 1]) for step in (1, 2, 3))
        assert list(run.ledger["micro_seen"]) == [1, 1, 1] and not run.ledger["flags"].any()


def test_two_optimizers_of_one_model_count_their_own_backwards() -> None:
    """Each tap sees the backwards that reach its own optimizer's parameters, and stores those alone."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizers = {key: torch.optim.SGD(model[key].parameters(), lr=0.1) for key in ("a", "b")}
    logs = {key: Log(model, optimizer) for key, optimizer in optimizers.items()}
    for _ in range(2):
        for key in ("a", "b", "b"):
            model[key](torch.ones(1, 2)).sum().backward()
        for key in ("a", "b"):
            optimizers[key].step()
            optimizers[key].zero_grad()
    assert [facts.micro_seen for facts in logs["a"].facts] == [1, 1]
    assert [facts.micro_seen for facts in logs["b"].facts] == [2, 2]
    assert set(logs["a"].grads[0]) == {"a.weight", "a.bias"}
    assert all(facts.flags == 0 for log in logs.values() for facts in log.facts)


def test_accumulation_is_not_taken_for_a_new_window() -> None:
    """Backwards without a zero_grad between them are one window, whatever else zeroes its own gradients meanwhile."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = Log(model, optimizer)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        other.zero_grad()
    optimizer.step()
    assert log.facts[0].micro_seen == 3


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it, as adapter libraries add."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_adapters_are_stored_and_their_base_is_listed() -> None:
    """Of an adapted model the base is frozen, and the added parameters are captured under their own names."""
    model = nn.Sequential(Adapted(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 1).requires_grad_(False))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    log = Log(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert set(log.grads[0]) == {"0.lora_A.weight", "0.lora_B.weight"}
    assert {spec.name: spec.status for spec in log.source.params}["0.base_layer.weight"] == "frozen"
    assert log.facts[0].flags == 0


def _reentrant(model: TinyModel) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model.module = checkpoint_wrapper(model.module, checkpoint_impl=CheckpointImpl.REENTRANT)  # type: ignore[assignment]
    return model


def _not_reentrant(model: TinyModel) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.module = checkpoint_wrapper(model.module)  # type: ignore[assignment]
    return model


def _compiled(model: TinyModel) -> Any:
    return torch.compile(model, backend="aot_eager")


# Loading torch's compiler warns about another part of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [_reentrant, _not_reentrant, _compiled])
def test_a_wrapped_model_gives_the_same_gradient_under_the_same_names(wrap: Callable[[TinyModel], Any]) -> None:
    """Checkpointed or compiled, names are the user's, micro-batches are counted once, and gradients the reference's."""
    plain = TinyModel(scalar=True)
    expected = reference(plain, 1, 2, 1)
    model = wrap(plain)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    log = Log(model, optimizer)
    for micro in range(2):
        (model(batch(1, micro, 0)) / 2).backward()
    optimizer.step()
    assert set(log.grads[0]) == set(expected)
    for name, value in log.grads[0].items():
        torch.testing.assert_close(value.double(), expected[name].reshape(-1), rtol=1e-4, atol=1e-6)
    assert (log.facts[0].micro_seen, log.facts[0].flags) == (2, 0)


def test_a_sparse_gradient_that_the_loop_coalesced_is_spread_out() -> None:
    """A coalesced sparse gradient is stored dense; one that is not is refused with both ways out."""
    weight = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    source = find_source((nn.ParameterDict({"weight": weight}), optimizer))
    nn.functional.embedding(torch.tensor([1, 2, 1]), weight, sparse=True).sum().backward()
    with pytest.raises(UnsupportedError, match=r"sparse=False, or replace param.grad by param.grad.coalesce\(\)"):
        source.gradients()
    assert weight.grad is not None
    weight.grad = weight.grad.coalesce()
    (grad,) = source.gradients()
    assert torch.equal(grad.tensor.view(5, 3), weight.grad.to_dense())


def test_no_attribute_is_left_on_the_optimizer() -> None:
    """The optimizer's `zero_grad` is its class's again after `remove`."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = set(vars(optimizer))
    log = Log(model, optimizer)
    assert "zero_grad" in vars(optimizer)
    log.source.remove()
    assert set(vars(optimizer)) == before


def test_no_reference_is_left() -> None:
    """After `remove` nothing of gradtap keeps the model or the optimizer alive."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = Log(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    log.source.remove()
    kept = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)]
    del log, model, optimizer
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_a_patched_method_keeps_its_signature() -> None:
    """Accelerate asks by signature whether `zero_grad` takes `set_to_none`: it still does while attached."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = inspect.signature(optimizer.zero_grad)
    Log(model, optimizer)
    assert inspect.signature(optimizer.zero_grad) == before
