"""DeepSpeed on a machine without GPU and without compiler: what to set before the first import, and configurations."""

from __future__ import annotations

import os
from typing import Any

# Read when deepspeed is first imported.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DS_LOG_LEVEL", "ERROR")


def prepare() -> Any:
    """The deepspeed module, with its shared-memory op left out (it needs a compiler) and fp16 allowed on any CPU."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    type(get_accelerator()).is_fp16_supported = lambda self: True
    return deepspeed


def init_group(deepspeed: Any) -> None:
    """The default process group, over gloo."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def config(
    stage: int,
    dtype: str = "float32",
    *,
    offload: bool = False,
    accumulation: int = 1,
    clip: float = 0.0,
    micro_batch: int = 4,
    fp32_accumulation: bool = False,
    scale: float = 0.0,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A configuration of ZeRO `stage`. `scale` is a fixed loss scale for float16; 0 for a dynamic one from 2**12."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }
    if offload:
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if dtype == "bfloat16":
        made["bf16"] = {"enabled": True}
    if dtype == "float16":
        made["fp16"] = {"enabled": True, "loss_scale": scale, "initial_scale_power": 12, "hysteresis": 1}
    if fp32_accumulation:
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made
