"""From what a user hands to `attach` to the source that reads it. Refuses with words, guesses nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradtap.capture import accelerate
from gradtap.capture.source import GradSource
from gradtap.capture.trainers import ThroughTrainer, TrainerTarget
from gradtap.errors import AttachError, UnsupportedError

_ALLOWED = "an Accelerator after prepare, a DeepSpeed engine, or a pair (model, optimizer)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPair:
    """One model and one optimizer among several that an Accelerator has prepared."""

    accelerator: Any
    model: nn.Module
    optimizer: Any


def find_source(target: Any) -> GradSource:
    """The source of gradients of `target`: an Accelerator after prepare, a DeepSpeed engine, or (model, optimizer).

    Raises `AttachError` for a target of another kind, before `prepare`, attached to already, or with nothing to train;
    `UnsupportedError` for an engine, optimizer or mode whose gradient cannot be had.
    """
    if isinstance(target, TrainerTarget):
        return ThroughTrainer(find_source(target.target), target)
    if isinstance(target, PreparedPair):
        return _of_prepared_pair(target)
    if _is_a(target, "accelerate.accelerator", "Accelerator"):
        return _of_accelerator(target)
    if _is_a(target, "deepspeed.runtime.engine", "DeepSpeedEngine"):
        return _of_engine(target)
    if isinstance(target, tuple | list) and len(target) == 2:
        return _of_pair(target[0], target[1])
    raise _wrong(target)


def _of_accelerator(accelerator: Any) -> GradSource:
    engine = accelerate.engine_of(accelerator)
    if engine is not None:
        return _of_engine(engine, accelerator)
    from gradtap.capture.torch_optimizer import TorchSource

    model, optimizer = accelerate.model_and_optimizer(accelerator)
    return TorchSource(model, accelerate.innermost(optimizer), accelerator=accelerator)


def _of_prepared_pair(pair: PreparedPair) -> GradSource:
    from gradtap.capture.torch_optimizer import TorchSource

    accelerate.check_kind(pair.accelerator)
    return TorchSource(pair.model, accelerate.innermost(pair.optimizer), accelerator=pair.accelerator)


def _of_engine(engine: Any, accelerator: Any = None) -> GradSource:
    from gradtap.capture.deepspeed_zero import DeepSpeedZeroSource

    if accelerator is None:
        return DeepSpeedZeroSource(engine)
    return DeepSpeedZeroSource(
        engine, accum_loop=lambda: int(accelerator.gradient_accumulation_steps), through="accelerate"
    )


def _of_pair(model: Any, optimizer: Any) -> GradSource:
    from gradtap.capture.torch_optimizer import TorchSource

    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise AttachError("attach got (optimizer, model); the order is (model, optimizer)")
    if _is_a(model, "deepspeed.runtime.engine", "DeepSpeedEngine"):
        return _of_engine(model)
    inner = accelerate.innermost(optimizer)
    if not isinstance(model, nn.Module) or not isinstance(inner, torch.optim.Optimizer):
        raise AttachError(
            f"attach got a pair of {type(model).__name__} and {type(optimizer).__name__}; "
            "a pair must be (torch.nn.Module, torch.optim.Optimizer)"
        )
    return TorchSource(model, inner)


def _wrong(target: Any) -> AttachError:
    name = type(target).__name__
    if isinstance(target, nn.Module):
        return AttachError(f"attach got a model ({name}) alone; give {_ALLOWED}")
    if isinstance(target, torch.optim.Optimizer):
        return AttachError(f"attach got an optimizer ({name}) alone; give {_ALLOWED}")
    home = type(target).__module__.split(".")[0]
    if home in ("transformers", "lightning", "pytorch_lightning") and "Trainer" in name:
        return UnsupportedError(f"attach got a {name} of {home}, which is not supported; give {_ALLOWED}")
    return AttachError(f"attach got a {name}; give {_ALLOWED}")


def _is_a(target: Any, home: str, class_name: str) -> bool:
    # An instance can exist only where its module has been imported; importing it here would cost seconds.
    cls = getattr(sys.modules.get(home), class_name, None)
    return isinstance(cls, type) and isinstance(target, cls)
