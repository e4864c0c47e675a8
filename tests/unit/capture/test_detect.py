"""What `find_source` refuses, and with which words. Real DeepSpeed engines are refused in tests/integration."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from gradtap.capture.detect import find_source
from gradtap.errors import AttachError, UnsupportedError
from tests.support.tiny_model import TinyModel


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


def _frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = _sgd(model)
    model.requires_grad_(False)
    return model, optimizer


def _in_backward() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Linear(2, 2)
    optimizer = _sgd(model)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model, optimizer


def _lazy() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    return model, torch.optim.SGD(model[1].parameters(), lr=0.1)


def _complex() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    return model, _sgd(model)


def _sparse() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Embedding(4, 2, sparse=True)
    return model, _sgd(model)


def _foreign() -> tuple[nn.Module, torch.optim.Optimizer]:
    return nn.Linear(2, 2), _sgd(nn.Linear(2, 2))


def _swapped() -> tuple[Any, Any]:
    model = nn.Linear(2, 2)
    return _sgd(model), model


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3, "attach got a int; give an Accelerator after prepare"),
    "model alone": (TinyModel, "model .TinyModel. alone"),
    "optimizer alone": (lambda: _sgd(TinyModel()), "optimizer .SGD. alone"),
    "pair of others": (lambda: (TinyModel(), "adam"), "pair of TinyModel and str"),
    "swapped": (_swapped, r"order is \(model, optimizer\)"),
    "three": (lambda: (1, 2, 3), "attach got a tuple"),
    "all frozen": (_frozen, "no parameter of the model is trained"),
    "another model's optimizer": (_foreign, "none of this model's parameters"),
    "lazy": (_lazy, "0.weight has no shape yet; run one forward pass"),
}
UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "lbfgs": (lambda: (lambda m: (m, torch.optim.LBFGS(m.parameters())))(nn.Linear(2, 2)), "LBFGS evaluates several"),
    "sparse embedding": (_sparse, "sparse=True; only dense gradients"),
    "optimizer in backward": (_in_backward, "runs inside backward"),
    "complex": (_complex, "complex64; allowed are float32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_target_is_refused_in_words(case: str) -> None:
    """Each wrong target raises `AttachError` that says what was given and what to give."""
    make, words = WRONG[case]
    with pytest.raises(AttachError, match=words) as raised:
        find_source(make())
    assert not isinstance(raised.value, UnsupportedError)


# Making an optimizer that runs in backward loads a part of torch that warns about another part.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_has_no_true_gradient_is_unsupported(case: str) -> None:
    """Each training whose gradient cannot be had raises `UnsupportedError` that names it."""
    make, words = UNSUPPORTED[case]
    with pytest.raises(UnsupportedError, match=words):
        find_source(make())


def test_a_trainer_is_refused_for_now() -> None:
    """A trainer object of a known library is recognised and refused with what to give instead."""
    Trainer = type("Trainer", (), {"__module__": "transformers.trainer"})
    with pytest.raises(UnsupportedError, match="Trainer of transformers.*not supported; give an Accelerator"):
        find_source(Trainer())


def test_the_same_optimizer_twice_is_refused() -> None:
    """While one source listens to an optimizer another is refused, by `find_source` and by `install`."""
    model = TinyModel()
    optimizer = _sgd(model)
    first, second = find_source((model, optimizer)), find_source((model, optimizer))
    first.install(SimpleNamespace(before_step=lambda: None, after_step=lambda: None))
    with pytest.raises(AttachError, match="attached to this SGD already"):
        find_source((model, optimizer))
    with pytest.raises(AttachError, match="attached to this SGD already"):
        second.install(SimpleNamespace(before_step=lambda: None, after_step=lambda: None))
    first.remove()
    find_source((model, optimizer))


class TestAccelerator:
    """A real Accelerator on one CPU process."""

    @pytest.fixture
    def accelerator(self) -> Any:
        """A fresh one: Accelerate keeps its state between instances."""
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator(cpu=True)

    def test_before_prepare(self, accelerator: Any) -> None:
        """Attach before `prepare` says that nothing is prepared, and to call `prepare` first."""
        with pytest.raises(
            AttachError, match="has prepared no model yet: call `model, optimizer = accelerator.prepare"
        ):
            find_source(accelerator)

    def test_without_an_optimizer(self, accelerator: Any) -> None:
        """With only a model prepared, the optimizer is named as missing."""
        accelerator.prepare(TinyModel())
        with pytest.raises(AttachError, match="has prepared no optimizer yet"):
            find_source(accelerator)

    def test_several_optimizers(self, accelerator: Any) -> None:
        """Two prepared optimizers are refused with what to do."""
        model = TinyModel()
        accelerator.prepare(model, _sgd(model), _sgd(model))
        with pytest.raises(UnsupportedError, match="prepared 2 optimizers; one is supported"):
            find_source(accelerator)

    def test_a_gradient_scaler(self, accelerator: Any) -> None:
        """Accelerate's own fp16 scaler is refused, and bf16 or DeepSpeed is offered."""
        model = TinyModel()
        accelerator.prepare(model, _sgd(model))
        accelerator.scaler = object()
        with pytest.raises(UnsupportedError, match="gradient scaler.*use mixed_precision='bf16'"):
            find_source(accelerator)

    def test_megatron(self, accelerator: Any) -> None:
        """An Accelerator that runs Megatron-LM is refused by its name."""
        from accelerate.utils import DistributedType

        accelerator.state.distributed_type = DistributedType.MEGATRON_LM
        with pytest.raises(UnsupportedError, match="Accelerate's MEGATRON_LM is not supported"):
            find_source(accelerator)

    def test_the_innermost_optimizer_is_hooked(self, accelerator: Any) -> None:
        """The source listens to torch's optimizer under Accelerate's wrapper, and to the accelerator's own calls."""
        model = TinyModel()
        optimizer = _sgd(model)
        accelerator.prepare(model, optimizer)
        source = find_source(accelerator)
        source.install(SimpleNamespace(before_step=lambda: None, after_step=lambda: None))
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        assert {"backward", "clip_grad_norm_", "clip_grad_value_"} <= set(vars(accelerator))
        source.remove()
        assert not {"backward", "clip_grad_norm_", "clip_grad_value_"} & set(vars(accelerator))
