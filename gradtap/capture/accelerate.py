"""What lies under an Accelerator after `prepare`, and the calls of it that matter to a capture."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradtap.errors import AttachError, UnsupportedError


def engine_of(accelerator: Any) -> Any | None:
    """The DeepSpeed engine of an Accelerator, None where it runs without DeepSpeed.

    Raises `AttachError` before `prepare`.
    """
    if _kind(accelerator) != "DEEPSPEED":
        return None
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is None:
        raise _not_prepared("it holds no DeepSpeed engine yet")
    return wrapped.engine


def model_and_optimizer(accelerator: Any) -> tuple[nn.Module, Any]:
    """The one prepared model and the one prepared optimizer of an Accelerator without DeepSpeed.

    Raises `AttachError` before `prepare`, `UnsupportedError` for what is not recorded yet.
    """
    check_kind(accelerator)
    return _only(accelerator._models, "model"), _only(accelerator._optimizers, "optimizer")


def check_kind(accelerator: Any) -> None:
    """Raises `UnsupportedError` for a mode of Accelerate, without DeepSpeed, whose gradient is not recorded yet."""
    kind = _kind(accelerator)
    if kind in ("MEGATRON_LM", "XLA", "TP"):
        raise UnsupportedError(
            f"Accelerate's {kind} is not supported; supported through Accelerate are plain torch, DDP, FSDP, and "
            "DeepSpeed ZeRO: choose one of these in `accelerate config`"
        )
    if getattr(accelerator, "scaler", None) is not None:
        raise UnsupportedError(
            "Accelerate's fp16 with a gradient scaler is not supported on plain torch, DDP or FSDP; supported is fp16 "
            "through DeepSpeed ZeRO: use mixed_precision='bf16' or 'no' here"
        )
    if getattr(accelerator, "has_lomo_optimizer", False):
        raise UnsupportedError("LOMO updates parameters during backward, so no gradient is left to record: use another")


def wraps_in_ddp(accelerator: Any) -> bool:
    """Whether `prepare` of this Accelerator wraps models in DistributedDataParallel."""
    return _kind(accelerator).startswith("MULTI_") and accelerator.num_processes > 1


def innermost(optimizer: Any) -> Any:
    """The torch optimizer under any number of Accelerate's wrappers."""
    seen = 0
    while type(optimizer).__module__.split(".")[0] == "accelerate" and hasattr(optimizer, "optimizer") and seen < 16:
        optimizer, seen = optimizer.optimizer, seen + 1
    return optimizer


def _kind(accelerator: Any) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)).upper()


def _only(prepared: list[Any], what: str) -> Any:
    if not prepared:
        raise _not_prepared(f"it has prepared no {what} yet")
    if len(prepared) > 1:
        raise UnsupportedError(
            f"this Accelerator has prepared {len(prepared)} {what}s; one is supported: "
            f"use one Accelerator with one {what}, or attach to (model, optimizer) of the one to record"
        )
    return prepared[0]


def _not_prepared(state: str) -> AttachError:
    return AttachError(
        f"attach needs an Accelerator after prepare, and {state}: call "
        "`model, optimizer = accelerator.prepare(model, optimizer)` first, then gradtap.attach(accelerator, ...)"
    )
