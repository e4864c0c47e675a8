"""Names of a model's parameters as its author wrote them, in model order, with aliases. Knows no optimizer.

A wrapper's own component (`module.` of DDP, `_orig_mod.` of torch.compile ...) is left out only where the object at
that place is that wrapper: a user may call a module `module`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "module"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParam:
    """A parameter with its first name, and the other names of the same object (tied weights)."""

    name: str
    aliases: tuple[str, ...]
    param: nn.Parameter


def named_params(model: nn.Module) -> tuple[NamedParam, ...]:
    """Every distinct parameter of `model`, in the order of `model.named_parameters()`."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, param in _walk(model):
        found.setdefault(id(param), (param, []))[1].append(name)
    return tuple(
        NamedParam(name=names[0], aliases=tuple(dict.fromkeys(names[1:])), param=param)
        for param, names in found.values()
    )


def wrapped_attribute(module: nn.Module) -> str | None:
    """Name of the child that holds the user's module, where `module` is a known wrapper."""
    for home, class_name, attribute in _WRAPPERS:
        # A wrapper's instance exists only where its module is loaded; importing it here would cost seconds.
        cls = getattr(sys.modules.get(home), class_name, None)
        if isinstance(cls, type) and isinstance(module, cls):
            return attribute
    return None


def walk_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with the prefix of its parameters' names, in model order; one that is used twice comes twice."""
    return _modules(model, "", ())


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in walk_modules(model):
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param


def _modules(module: nn.Module, prefix: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    skip = wrapped_attribute(module)
    for name, child in module._modules.items():
        if child is None or id(child) in above:
            continue
        inner = prefix if name == skip else f"{prefix}{name}."
        yield from _modules(child, inner, (*above, id(module)))


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"`, `"bfloat16"` ... of a torch dtype."""
    return str(dtype).removeprefix("torch.")
