"""What a torch model's ranks hold of each gradient: names, specs, owners, and this rank's pieces of them.

The optimizer's side (when, clipping, counting) is in `torch_optimizer`; sharded models are in `dtensors` and `fsdp1`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from gradtap.capture.names import NamedParam, dtype_name
from gradtap.capture.patches import PatchSet
from gradtap.capture.touched import TouchTracker
from gradtap.errors import UnsupportedError
from gradtap.types import LocalGrad, Ownership, ParamSpec

FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
FSDP2 = ("torch.distributed.fsdp", "FSDPModule")


class Holding(Protocol):
    """One model, seen from one rank. `named[i].param` is the object of parameter i that the optimizer holds."""

    engine: str
    named: tuple[NamedParam, ...]
    params: tuple[ParamSpec, ...]
    ownership: tuple[Ownership | None, ...]
    settings: Mapping[str, Any]
    replaces_grads: bool
    """Whether the engine puts new gradient objects in place within a window, so that one gone means nothing."""

    def watch(self, patches: PatchSet, tracker: TouchTracker) -> None:
        """Hook what tells that backward has reached a stored parameter."""

    def clippers(self) -> Sequence[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """Modules with a `clip_grad_norm_` of their own, each with the parameters that it clips."""

    def gradients(self, touched: Sequence[int]) -> list[LocalGrad]:
        """The pieces of this rank, sorted by (param, start); a tensor of None where there is no gradient.

        Raises `UnsupportedError` for a gradient that is sparse, of another shape, or not reduced.
        """


class WholeHolding:
    """Plain torch and DDP: every rank holds every gradient whole, in `param.grad`."""

    replaces_grads = False

    def __init__(self, named: tuple[NamedParam, ...], optimized: set[int], ranks: tuple[int, ...], engine: str) -> None:
        self.engine, self.named = engine, named
        self.params = tuple(spec_of(entry, tuple(entry.param.shape), optimized) for entry in named)
        self.ownership = tuple(Ownership(kind="replicated", ranks=ranks) if p.stored else None for p in self.params)
        self.settings: Mapping[str, Any] = {}

    def watch(self, patches: PatchSet, tracker: TouchTracker) -> None:
        """One hook for each stored parameter."""
        for index, entry in enumerate(self.named):
            if self.params[index].stored:
                patches.hook(hook_of(entry.param, tracker.marker(index)))

    def clippers(self) -> Sequence[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """None: such models are clipped from outside."""
        return ()

    def gradients(self, touched: Sequence[int]) -> list[LocalGrad]:
        """A whole row-major view of each stored parameter's gradient."""
        found, lost = [], 0
        for index, spec in enumerate(self.params):
            if not spec.stored:
                continue
            grad = dense(self.named[index].param.grad, spec.name)
            lost += grad is None and touched[index] >= 0
            if grad is not None and grad.shape != spec.shape:
                raise UnsupportedError(
                    f"the gradient of {spec.name} has shape {tuple(grad.shape)}; at attach it was {spec.shape}: close "
                    "the recorder and attach again"
                )
            # A gradient in another memory layout (channels_last) is copied to row-major order here.
            values = None if grad is None else grad.detach().reshape(-1)
            found.append(LocalGrad(param=index, start=0, stop=spec.numel, tensor=values))
        refuse_lost(lost, all(grad.tensor is None for grad in found))
        return found


def is_a(module: nn.Module, home_and_name: tuple[str, str]) -> bool:
    """Whether `module` is of a class that may not be loaded: an instance exists only where its module is."""
    cls = getattr(sys.modules.get(home_and_name[0]), home_and_name[1], None)
    return isinstance(cls, type) and isinstance(module, cls)


def spec_of(named: NamedParam, shape: tuple[int, ...], optimized: set[int]) -> ParamSpec:
    """The spec of a parameter, with its status; `optimized` are the ids of what the optimizer holds."""
    param = named.param
    trained = id(param) in optimized
    return ParamSpec(
        name=named.name,
        shape=shape,
        dtype=dtype_name(param.dtype),
        status="frozen" if not param.requires_grad else "captured" if trained else "unoptimized",
        aliases=named.aliases,
    )


def hook_of(param: nn.Parameter, told: Callable[[Any], None]) -> Any:
    """A registered hook, called after each accumulation into `param`."""
    return param.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]


def dense(grad: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """The gradient, spread out if sparse but coalesced. Raises `UnsupportedError` where it is not."""
    if grad is None or grad.layout == torch.strided:
        return grad
    if grad.layout == torch.sparse_coo and grad.is_coalesced():
        return grad.to_dense()
    raise UnsupportedError(
        f"the gradient of {name} is sparse; only dense gradients are supported, and sparse ones that are coalesced: "
        "set sparse=False, or replace param.grad by param.grad.coalesce() before the step"
    )


def refuse_lost(lost: int, nothing_left: bool) -> None:
    """Raises `UnsupportedError` where backward reached parameters and no gradient is left at all."""
    if lost and nothing_left:
        raise UnsupportedError(
            f"backward reached {lost} parameters, but none has a gradient at the optimizer's step: an optimizer "
            "inside backward, or a zero_grad between backward and step, took them"
        )


def check_world(ranks: set[int], name: str) -> None:
    """Raises `UnsupportedError` unless `ranks` hold parameter `name` among all of the process group."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != set(range(world)):
        raise UnsupportedError(
            f"parameter {name} is sharded over ranks {sorted(ranks)[:8]} of a world of {world}; the others may hold "
            "another gradient. Only a model that is spread over all ranks is supported"
        )
