"""What of DeepSpeed is refused, with the reason and what to do. Reads attributes only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradtap.capture.names import dtype_name
from gradtap.errors import AttachError, UnsupportedError

SUPPORTED = "supported with DeepSpeed are ZeRO stages 0 to 3, with or without offload, in fp32, bf16 and fp16"
_READ = (
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "BF16_Optimizer",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
)
_GROUPS = ("bit16_groups", "fp16_groups", "bf16_groups")


def refuse(found: str, cure: str) -> UnsupportedError:
    """The error for something found in a DeepSpeed engine."""
    return UnsupportedError(f"{found} is not supported; {SUPPORTED}: {cure}")


def check_engine(engine: Any) -> None:
    """Raises `UnsupportedError` or `AttachError` unless this engine's gradients are known to be right."""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None or type(optimizer).__name__ == "DummyOptim":
        raise AttachError(
            "the DeepSpeed engine has no optimizer, so there are no gradients to record: pass one to initialize"
        )
    if not callable(getattr(engine, "_take_model_step", None)):
        raise refuse(
            "this DeepSpeed version (its engine has no _take_model_step)", "use a release such as 0.19 of deepspeed"
        )
    _check_modes(engine, optimizer)
    _check_class(optimizer)
    _check_optimizer(engine, optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        _check_dtypes(optimizer)


def _check_modes(engine: Any, optimizer: Any) -> None:
    if getattr(engine, "zenflow", False) or getattr(optimizer, "zenflow", False):
        raise refuse("ZenFlow", "remove zero_optimization.zenflow; it updates from partial, transposed gradients")
    if type(optimizer).__name__.startswith("SuperOffload"):
        raise refuse("SuperOffload", "remove super_offload from offload_optimizer; it updates parameters in backward")
    if getattr(engine, "pipeline_parallelism", False):
        raise refuse("a pipeline engine", "train without PipelineModule")
    compiled = getattr(engine, "is_deepcompile_enabled", None)
    if callable(compiled) and compiled():
        raise refuse("DeepCompile", "set compile.deepcompile to false; it reduces gradients in its own way")
    if getattr(engine, "has_moe_layers", False) or getattr(optimizer, "has_moe_layers", False):
        raise refuse(
            "a model with DeepSpeed MoE layers",
            "train without expert parallelism; names of experts are the same on ranks that hold different experts",
        )
    sparse = getattr(engine, "sparse_gradients_enabled", None)
    if callable(sparse) and sparse():
        raise refuse("sparse_gradients", "set sparse_gradients to false in DeepSpeed's configuration")
    if not getattr(engine, "enable_backward_allreduce", True):
        raise refuse("an engine that does not reduce gradients (enable_backward_allreduce)", "leave it on")
    if not getattr(engine, "gradient_average", True):
        raise refuse("gradient_allreduce_op 'sum'", "set it to 'mean', so that gradients are means over the ranks")


def _check_class(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if name.startswith("ZenFlow"):
        raise refuse("ZenFlow", "remove zero_optimization.zenflow; it updates from partial, transposed gradients")
    if name not in _READ and not isinstance(optimizer, torch.optim.Optimizer):
        raise refuse(f"DeepSpeed's optimizer {name}", "use a torch optimizer, or Adam of DeepSpeed's configuration")


def _check_optimizer(engine: Any, optimizer: Any) -> None:
    inner = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if "muon" in inner.lower():
        raise refuse(
            f"{inner} under DeepSpeed",
            "ZeRO stage 1 and 2 hold Muon's update instead of the gradient, and the other stages are not tested with "
            "it; use another optimizer",
        )
    if inner.startswith(("OnebitAdam", "OnebitLamb", "ZeroOneAdam")):
        raise refuse(inner, "it reduces compressed momentum instead of gradients; use another optimizer")
    if max(getattr(each, "sequence_parallel_size", 1) for each in (engine, optimizer)) > 1:
        raise refuse("sequence parallelism", "set the sequence parallel size to 1")
    if getattr(optimizer, "model_parallel_world_size", 1) > 1 or getattr(engine, "mp_world_size", 1) > 1:
        raise refuse("model (tensor) parallelism", "train with data parallelism only")
    scalers = (
        getattr(optimizer, "torch_autocast_gradscaler", None),
        getattr(engine, "torch_autocast_z0_gradscaler", None),
    )
    if any(scaler is not None for scaler in scalers):
        raise refuse("torch_autocast in float16", "use the fp16 section of DeepSpeed's configuration, or bf16")


def _check_dtypes(optimizer: Any) -> None:
    groups: Any = next((found for name in _GROUPS if (found := getattr(optimizer, name, None)) is not None), [])
    dtypes = [param.dtype for group in groups for param in group]
    if not dtypes:
        # That nothing is trained is said by whoever looks at the parameters.
        return
    model = getattr(optimizer, "dtype", None) or dtypes[0]
    accumulated = getattr(optimizer, "gradient_accumulation_dtype", getattr(optimizer, "grad_acc_dtype", model))
    if accumulated not in (model, torch.float32):
        raise refuse(
            f"gradient accumulation in {dtype_name(accumulated)} of a {dtype_name(model)} model",
            "set data_types.grad_accum_dtype to the model's own dtype or fp32",
        )
    other = next((dtype for dtype in dtypes if dtype != model), None)
    if other is not None:
        raise refuse(
            f"a parameter group that mixes {dtype_name(model)} and {dtype_name(other)}",
            "let DeepSpeed cast the whole model to one dtype",
        )


def check_sparse(model: nn.Module) -> None:
    """Raises `UnsupportedError` for a module that makes sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedError(
                f"{name or type(module).__name__} is made with sparse=True; only dense gradients are supported: "
                "make it with sparse=False"
            )
