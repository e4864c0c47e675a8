"""Trains the tiny model on a real engine with gradtap attached, beside a spy that asks the engine itself.

The spy is patched in before `attach`, so it runs after gradtap has captured and before the optimizer moves. It asks for
whole gradients with collectives, as gradtap never does: DeepSpeed's `safe_get_full_grad`, or `param.grad`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradtap
from tests.support import deepspeed_cpu
from tests.support.tiny_model import TinyModel, batch, reference, uses_side

STEPS = 6


def run_cells(args: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Every cell of `args["cells"]` in one process group. Facts by cell; arrays in `folder/<name>.npz`."""
    deepspeed = deepspeed_cpu.prepare()
    deepspeed_cpu.init_group(deepspeed)
    return [_run_cell(deepspeed, cell, folder) for cell in args["cells"]]


def _run_cell(deepspeed: Any, cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    training = (NativeZero if cell["through"] == "native" else ThroughAccelerate)(deepspeed, cell)
    spy = Spy(training, cell)
    store = folder / f"{cell['name']}.gradtap"
    tap = gradtap.attach(training.target, store, **cell.get("attach", {}))
    for step in range(1, cell.get("steps", STEPS) + 1):
        spy.begin(step)
        training.window(step)
    tap.close()
    if torch.distributed.get_rank() == 0:
        np.savez(folder / f"{cell['name']}.npz", **spy.arrays)
    torch.distributed.barrier()
    return {"facts": spy.facts, "names": [name for name, _ in training.module.named_parameters()]}


class NativeZero:
    """A bare DeepSpeed engine in a loop of its own."""

    def __init__(self, deepspeed: Any, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.module = TinyModel()
        trained = [p for p in self.module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        config = deepspeed_cpu.config(
            cell["stage"],
            cell["dtype"],
            offload=cell["offload"],
            accumulation=cell["accumulation"],
            clip=cell["clip"],
            zero=cell.get("zero"),
        )
        if "scale_power" in cell:
            config["fp16"] |= {"initial_scale_power": cell["scale_power"]}
        self.engine = deepspeed.initialize(model=self.module, optimizer=optimizer, config=config)[0]
        self.target = self.engine

    def window(self, step: int) -> None:
        """One optimizer window."""
        for micro in range(self.cell["accumulation"]):
            tokens = batch(step, micro, torch.distributed.get_rank())
            loss = self.engine(tokens, side=uses_side(step, micro, self.cell["side"]))
            self.engine.backward(loss)
            self.engine.step()


class ThroughAccelerate:
    """An Accelerate loop: DeepSpeed where the cell has a stage, else DDP."""

    def __init__(self, deepspeed: Any, cell: dict[str, Any]) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import InitProcessGroupKwargs

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        self.cell = cell
        handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")]
        kinds: dict[str, Any] = {"mixed_precision": "no"}
        if cell["stage"]:
            config = deepspeed_cpu.config(
                cell["stage"],
                cell["dtype"],
                offload=cell["offload"],
                accumulation=cell["accumulation"],
                clip=cell["clip"],
            )

            class Plugin(DeepSpeedPlugin):
                """Without what Accelerate does for models that transformers builds: it is not installed here."""

                def set_deepspeed_weakref(self) -> None:
                    pass

            kinds = {"deepspeed_plugin": Plugin(hf_ds_config=config)}
        else:
            handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
            kinds["cpu"] = True
        self.accelerator = Accelerator(
            gradient_accumulation_steps=cell["accumulation"],
            kwargs_handlers=handlers,
            **kinds,
        )
        self.module = TinyModel(scalar=cell.get("scalar", False))
        if not cell["stage"] and cell["dtype"] == "bfloat16":
            self.module = self.module.to(torch.bfloat16)
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(self.trained, lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(self.module, optimizer)
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        self.engine = wrapped.engine if cell["stage"] else None
        self.target = self.accelerator

    def window(self, step: int) -> None:
        """One optimizer window."""
        for micro in range(self.cell["accumulation"]):
            with self.accelerator.accumulate(self.model):
                tokens = batch(step, micro, torch.distributed.get_rank())
                loss = self.model(tokens, side=uses_side(step, micro, self.cell["side"]))
                self.accelerator.backward(loss)
                if self.cell["clip"] and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.trained, self.cell["clip"])
                self.optimizer.step()
                self.optimizer.zero_grad()


class Spy:
    """What the engine itself says of each step: whole gradients, loss scale, norm, applied or skipped."""

    def __init__(self, training: Any, cell: dict[str, Any]) -> None:
        self.training, self.cell = training, cell
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.facts: list[dict[str, Any]] = []
        self.step = 0
        if training.engine is not None:
            original = training.engine._take_model_step
            training.engine._take_model_step = lambda *a, **k: self._around(original, *a, **k)
        elif cell["clip"]:
            clip = training.accelerator.clip_grad_norm_
            training.accelerator.clip_grad_norm_ = lambda *a, **k: (self._look(), clip(*a, **k))[1]
        else:
            training.optimizer.optimizer.register_step_pre_hook(lambda *a: self._look())

    def begin(self, step: int) -> None:
        """Before the window: the gradient of the window by one process in float64."""
        self.step = step
        module = self.training.module
        found = reference(
            module, step, self.cell["accumulation"], torch.distributed.get_world_size(), self.cell["side"]
        )
        self.arrays.update({f"reference/{step}/{name}": grad.numpy() for name, grad in found.items()})

    def _around(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._look()
        engine = self.training.engine
        scale = float(engine.optimizer.loss_scale)
        result = original(*args, **kwargs)
        norm = engine.get_global_grad_norm()
        self.facts.append(
            {
                "loss_scale": scale,
                "norm": math.nan if norm is None else float(norm),
                "applied": bool(engine.was_step_applied()) and not engine.optimizer.overflow,
            }
        )
        return result

    def _look(self) -> None:
        scale = 1.0
        if self.training.engine is not None:
            from deepspeed.utils import safe_get_full_grad

            scale = float(self.training.engine.optimizer.loss_scale)
        for name, param in self.training.module.named_parameters():
            if not param.requires_grad:
                continue
            grad = safe_get_full_grad(param) if self.training.engine is not None else param.grad
            if grad is None:
                grad = torch.zeros(param.shape)
            self.arrays[f"engine/{self.step}/{name}"] = (grad.detach().float() / scale).numpy().copy()
