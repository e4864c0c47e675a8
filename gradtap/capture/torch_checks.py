"""What of plain torch and DDP is refused, with the reason and what to do. Reads attributes only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradtap.capture.names import NamedParam, dtype_name
from gradtap.capture.zero_checks import check_sparse
from gradtap.errors import AttachError, UnsupportedError

SUPPORTED = "supported with a torch optimizer are plain torch in one process, DistributedDataParallel, FSDP1 and FSDP2"
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def check_model(model: nn.Module, named: tuple[NamedParam, ...], *, replicated: bool) -> None:
    """Raises `UnsupportedError` or `AttachError` unless this model's gradients are whole and dense.

    `replicated` says that every rank holds the same mean gradient, as under DDP.
    """
    for entry in named:
        check_param(entry)
    check_sparse(model)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not replicated:
        raise UnsupportedError(
            f"torch.distributed runs {dist.get_world_size()} processes but the model is a {type(model).__name__}, "
            f"whose gradients need not agree; {SUPPORTED}: give attach the DistributedDataParallel object itself"
        )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UnsupportedError` for an optimizer that moves parameters other than once for each `step`."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(f"{name} evaluates several gradients in one step; use an optimizer that takes one")
    if "lomo" in name.lower():
        raise UnsupportedError(f"{name} updates parameters during backward, so no gradient is left to record")
    if type(optimizer).__module__.split(".")[0] == "deepspeed" and hasattr(optimizer, "bit16_groups"):
        raise AttachError("this optimizer belongs to a DeepSpeed engine; give attach the engine itself")


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper that holds the model, itself or right under torch.compile's."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def check_param(entry: NamedParam) -> None:
    """Raises `AttachError` or `UnsupportedError` for a parameter without shape, or whose gradient cannot be had."""
    param: Any = entry.param
    if nn.parameter.is_lazy(param):
        raise AttachError(f"parameter {entry.name} has no shape yet; run one forward pass before attach")
    if hasattr(param, "_in_backward_optimizers"):
        raise UnsupportedError(
            f"parameter {entry.name} has an optimizer that runs inside backward, so no gradient is left to record at "
            "the step; remove _apply_optimizer_in_backward"
        )
    if param.requires_grad and dtype_name(param.dtype) not in _DTYPES:
        raise UnsupportedError(
            f"parameter {entry.name} is {dtype_name(param.dtype)}; allowed are {', '.join(_DTYPES)}: "
            "train it in one of these"
        )
