"""An Accelerate loop with accumulation and clipping; with `zero2`, under DeepSpeed: `loop.py OUT [zero2]`."""

import os
import sys

import numpy as np
import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from tests.support import deepspeed_cpu
from tests.support.tiny_model import TinyModel, batch

many = int(os.environ.get("WORLD_SIZE", "1")) > 1
plugin = None
if "zero2" in sys.argv:
    from accelerate import DeepSpeedPlugin

    deepspeed_cpu.prepare()
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_cpu.config(2, accumulation=2, clip=0.05))
accelerator = Accelerator(
    cpu=plugin is None,
    deepspeed_plugin=plugin,
    gradient_accumulation_steps=2,
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if many else [],
)
model = TinyModel()
trained = [p for p in model.parameters() if p.requires_grad]
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
module, kept = accelerator.unwrap_model(model), {}


def keep(held):
    """The gradients of the step to come."""
    step = 1 + len({key.split("/")[0] for key in kept})
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    kept.update({f"{step}/{name}": held(param).detach().numpy().copy() for name, param in named})


if plugin is not None:
    from deepspeed.utils import safe_get_full_grad

    engine = accelerator.deepspeed_engine_wrapped.engine
    take_step = engine._take_model_step
    engine._take_model_step = lambda *a, **k: (keep(safe_get_full_grad), take_step(*a, **k))[1]
for micro in range(6):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch(1, micro, accelerator.process_index)))
        if accelerator.sync_gradients and plugin is None:
            keep(lambda param: param.grad)
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    np.savez(sys.argv[1], **kept)
    sys.stdout.write("trained\n")
if "crash" in sys.argv:
    sys.exit(3)
