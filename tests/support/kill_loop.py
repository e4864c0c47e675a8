"""Trains under ZeRO-2 until it is killed, from the last checkpoint on, and keeps what the engine held at each step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradtap
from tests.support import deepspeed_cpu
from tests.support.recorded import NativeZero

CELL = {"stage": 2, "dtype": "float32", "offload": False, "accumulation": 2, "clip": 0.05, "side": "always"}


def run(args: dict[str, Any], folder: Path) -> int:
    """Train to step `args["until"]`, or until killed; a checkpoint every 3 steps. The last step."""
    deepspeed = deepspeed_cpu.prepare()
    deepspeed_cpu.init_group(deepspeed)
    training = NativeZero(deepspeed, CELL)
    spy = training.engine._take_model_step
    training.engine._take_model_step = lambda *a, **k: (_keep(training, folder), spy(*a, **k))[1]
    gradtap.attach(training.engine, args["store"])
    checkpoints = Path(args["checkpoints"])
    if (checkpoints / "latest").exists():
        training.engine.load_checkpoint(str(checkpoints))
    while training.engine.global_steps < args["until"]:
        training.window(training.engine.global_steps + 1)
        if training.engine.global_steps % 3 == 0:
            training.engine.save_checkpoint(str(checkpoints))
    return int(training.engine.global_steps)


def _keep(training: NativeZero, folder: Path) -> None:
    from deepspeed.utils import safe_get_full_grad

    named = [(n, p) for n, p in training.module.named_parameters() if p.requires_grad]
    grads = {name: safe_get_full_grad(param).numpy().copy() for name, param in named}
    if torch.distributed.get_rank() == 0:
        path = folder / f"held-{training.engine.global_steps + 1}.npz"
        with open(path.with_suffix(".tmp"), "wb") as file:
            np.savez(file, **grads)
        os.replace(path.with_suffix(".tmp"), path)
