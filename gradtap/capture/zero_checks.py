"""What of DeepSpeed is refused, with the reason and what to do. Reads attributes only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradtap.capture.names import dtype_name
from gradtap.errors import AttachError, UnsupportedError

SUPPORTED = "supported with DeepSpeed are ZeRO stage 1 and 2, with or without CPU offload, in fp32, bf16 and fp16"
_KNOWN = {
    "DeepSpeedZeroOptimizer_Stage3": "ZeRO stage 3",
    "SuperOffloadOptimizer_Stage3": "SuperOffload",
    "BF16_Optimizer": "BF16_Optimizer (bf16 with fp32 gradient accumulation under ZeRO stage 0 or 1)",
    "FP16_Optimizer": "FP16_Optimizer (ZeRO stage 0)",
    "FP16_UnfusedOptimizer": "FP16_UnfusedOptimizer (ZeRO stage 0)",
    "ZenFlowZeroOptimizer": "ZenFlow",
}


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
    _check_class(engine, optimizer)
    _check_optimizer(optimizer)


def _check_modes(engine: Any, optimizer: Any) -> None:
    if getattr(engine, "zenflow", False) or getattr(optimizer, "zenflow", False):
        raise refuse("ZenFlow", "remove zero_optimization.zenflow; it updates from partial, transposed gradients")
    if getattr(engine, "pipeline_parallelism", False):
        raise refuse("a pipeline engine", "train without PipelineModule")
    compiled = getattr(engine, "is_deepcompile_enabled", None)
    if callable(compiled) and compiled():
        raise refuse("DeepCompile", "set compile.deepcompile to false; it reduces gradients in its own way")
    if getattr(engine, "has_moe_layers", False) or getattr(optimizer, "has_moe_layers", False):
        raise refuse("a model with DeepSpeed MoE layers", "train without expert parallelism")
    if not getattr(engine, "gradient_average", True):
        raise refuse("gradient_allreduce_op 'sum'", "set it to 'mean', so that gradients are means over the ranks")


def _check_class(engine: Any, optimizer: Any) -> None:
    name = type(optimizer).__name__
    if name == "DeepSpeedZeroOptimizer":
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        stage = int(engine.zero_optimization_stage())
        raise refuse(f"ZeRO stage {stage} with {name}", "set zero_optimization.stage to 1 or 2")
    found = _KNOWN.get(name, f"DeepSpeed's optimizer {name}")
    cure = "set zero_optimization.stage to 1 or 2"
    if name == "BF16_Optimizer":
        cure = "set zero_optimization.stage to 2, or data_types.grad_accum_dtype to bf16"
    raise refuse(found, cure)


def _check_optimizer(optimizer: Any) -> None:
    inner = type(optimizer.optimizer).__name__
    if "muon" in inner.lower():
        raise refuse(
            f"{inner} under ZeRO stage 1 or 2",
            "its buffers hold Muon's update instead of the gradient; use another optimizer",
        )
    if getattr(optimizer, "sequence_parallel_size", 1) > 1:
        raise refuse("sequence parallelism", "set the sequence parallel size to 1")
    if getattr(optimizer, "model_parallel_world_size", 1) > 1:
        raise refuse("model (tensor) parallelism", "train with data parallelism only")
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
        raise refuse("torch_autocast in float16", "use the fp16 section of DeepSpeed's configuration, or bf16")
    model, accumulated = optimizer.dtype, getattr(optimizer, "gradient_accumulation_dtype", optimizer.dtype)
    if accumulated not in (model, torch.float32):
        raise refuse(
            f"gradient accumulation in {dtype_name(accumulated)} of a {dtype_name(model)} model",
            "set data_types.grad_accum_dtype to the model's own dtype or fp32",
        )
    for group in optimizer.bit16_groups:
        for param in group:
            if param.dtype != model:
                raise refuse(
                    f"a parameter group that mixes {dtype_name(model)} and {dtype_name(param.dtype)}",
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
