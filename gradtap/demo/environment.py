"""What one training process needs around it before an Accelerator can be made, on GPUs and on CPUs.

Runs in the children only: it imports torch, and deepspeed where that is the engine.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from gradtap.demo.options import ACCUMULATION, CLIP_NORM, Options


def on_gpus(world: int) -> bool:
    """Whether every process gets a CUDA device of its own; otherwise CUDA is hidden from this process."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= world:
        return True
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return False


def make_accelerator(options: Options) -> Any:
    """An `Accelerator` for the engine, with accumulation (and clipping where the engine clips)."""
    gpus = on_gpus(options.world)
    if options.engine == "deepspeed" and not gpus:
        _deepspeed_on_cpu()

    from accelerate import Accelerator, InitProcessGroupKwargs

    plugin = _plugin(options) if options.engine == "deepspeed" else None
    return Accelerator(
        cpu=not gpus and plugin is None,
        mixed_precision="no",
        gradient_accumulation_steps=ACCUMULATION,
        deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="nccl" if gpus else "gloo")],
    )


def _deepspeed_on_cpu() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    # The shared-memory collectives are compiled at first use; gloo does the same without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _plugin(options: Options) -> Any:
    from accelerate import DeepSpeedPlugin

    class Plugin(DeepSpeedPlugin):  # type: ignore[misc]
        # Accelerate hands the configuration to transformers, for the models that transformers builds. The demo's
        # model is its own, so it needs no such package.
        def set_deepspeed_weakref(self) -> None:
            if importlib.util.find_spec("transformers") is not None:
                super().set_deepspeed_weakref()

    return Plugin(hf_ds_config=_deepspeed_config(options))


def _deepspeed_config(options: Options) -> dict[str, Any]:
    from gradtap.demo.data import BATCH

    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": options.stage, "reduce_bucket_size": 2_000_000},
        "steps_per_print": 2**31 - 1,
    }
