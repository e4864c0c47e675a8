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
    """Train to step `args["until"]`, or until killed, with a checkpoint every 3 steps to `last_checkpoint`."""
    deepspeed = deepspeed_cpu.prepare()
    deepspeed_cpu.init_group(deepspeed)
    training = NativeZero(deepspeed, CELL)
    spy = training.engine._take_model_step
    training.engine._take_model_step = lambda *a, **k: (_keep(training, folder), spy(*a, **k))[1]
    gradtap.attach(training.engine, args["store"])
    checkpoints = Path(args["checkpoints"])
    saved = saved_step(checkpoints)
    if saved:
        training.engine.load_checkpoint(str(checkpoints), tag=f"step{saved}")
    while training.engine.global_steps < args["until"]:
        training.window(training.engine.global_steps + 1)
        step = training.engine.global_steps
        if step % 3 == 0 and step <= args["last_checkpoint"]:
            _save(training, checkpoints, step)
    return int(training.engine.global_steps)


def saved_step(checkpoints: Path) -> int:
    """Step of the last checkpoint that every rank has finished; 0 for none."""
    pointer = checkpoints / "saved"
    return int(pointer.read_text()) if pointer.exists() else 0


def _save(training: NativeZero, checkpoints: Path, step: int) -> None:
    # DeepSpeed's own `latest` is cut to nothing and then written, and before other ranks have written their parts:
    # a kill in between leaves a checkpoint that cannot be loaded. Saving ends with a barrier.
    training.engine.save_checkpoint(str(checkpoints), tag=f"step{step}", save_latest=False)
    if torch.distributed.get_rank() == 0:
        (checkpoints / "saved.tmp").write_text(str(step))
        os.replace(checkpoints / "saved.tmp", checkpoints / "saved")


def _keep(training: NativeZero, folder: Path) -> None:
    from deepspeed.utils import safe_get_full_grad

    named = [(n, p) for n, p in training.module.named_parameters() if p.requires_grad]
    grads = {name: safe_get_full_grad(param).numpy().copy() for name, param in named}
    if torch.distributed.get_rank() == 0:
        path = folder / f"held-{training.engine.global_steps + 1}.npz"
        with open(path.with_suffix(".tmp"), "wb") as file:
            np.savez(file, **grads)
        os.replace(path.with_suffix(".tmp"), path)
