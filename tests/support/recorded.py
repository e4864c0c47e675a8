"""Trains the tiny model on a real engine with gradtap attached, beside a spy that asks the engine itself.

The spy is patched in before `attach`, so it runs after gradtap has captured and before the optimizer moves. It asks for
whole gradients with collectives, as gradtap never does: DeepSpeed's `safe_get_full_grad`, or `param.grad`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
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


def run_plain_cells(args: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The same in one process that has no process group, as a plain script has none."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return [_run_cell(None, cell, folder) for cell in args["cells"]]


def micros_of(cell: dict[str, Any], step: int) -> int:
    """Micro-batches in the window of a step: fewer than the accumulation where a ragged cell's loader ends."""
    return int(cell["ragged"]) if "ragged" in cell and step % 2 == 0 else int(cell["accumulation"])


def _gathered(cell: dict[str, Any], module: torch.nn.Module) -> Any:
    """Whole parameters, where the engine has split them over the ranks."""
    if cell["stage"] != 3:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(module.parameters()))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _run_cell(deepspeed: Any, cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    training = _training(deepspeed, cell)
    spy = Spy(training, cell)
    store = folder / f"{cell['name']}.gradtap"
    tap = gradtap.attach(training.target, store, **cell.get("attach", {}))
    for step in range(1, cell.get("steps", STEPS) + 1):
        spy.begin(step)
        training.window(step)
    tap.close()
    if _rank() == 0:
        np.savez(folder / f"{cell['name']}.npz", **spy.arrays)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return {"facts": spy.facts, "names": [name for name, _ in training.module.named_parameters()]}


def _training(deepspeed: Any, cell: dict[str, Any]) -> Any:
    if cell["through"] == "accelerate":
        return Ragged(deepspeed, cell) if "ragged" in cell else ThroughAccelerate(deepspeed, cell)
    return NativeZero(deepspeed, cell) if cell["stage"] or cell.get("deepspeed") else BarePair(cell)


class BarePair:
    """A model and its torch optimizer in a loop that divides its losses itself; clips by torch's own function."""

    engine = None

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.module = TinyModel(scalar=True).to(getattr(torch, cell["dtype"]))
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = self.inner = torch.optim.AdamW(self.trained, lr=1e-3)
        self.target = (self.module, self.optimizer)

    def clip(self) -> Any:
        """The norm that torch's clipping returns."""
        return torch.nn.utils.clip_grad_norm_(self.trained, self.cell["clip"])

    def window(self, step: int) -> None:
        """One optimizer window."""
        for micro in range(self.cell["accumulation"]):
            loss = self.module(batch(step, micro, 0), side=uses_side(step, micro, self.cell["side"]))
            (loss / self.cell["accumulation"]).backward()
        if self.cell["clip"]:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()


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
            fp32_accumulation=cell.get("fp32_accumulation", False),
            zero=cell.get("zero"),
            **cell.get("more", {}),
        )
        if "scale_power" in cell:
            config["fp16"] |= {"initial_scale_power": cell["scale_power"]}
        self.engine = deepspeed.initialize(model=self.module, optimizer=optimizer, config=config)[0]
        self.target = self.engine

    def window(self, step: int) -> None:
        """One optimizer window."""
        for micro in range(self.cell["accumulation"]):
            tokens = batch(step, micro, _rank())
            loss = self.engine(tokens, side=uses_side(step, micro, self.cell["side"]))
            self.engine.backward(loss)
            # An unmanaged engine takes each `step` as a boundary.
            if self.engine.managed_gradient_accumulation() or micro == self.cell["accumulation"] - 1:
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
        many = torch.distributed.is_initialized()
        handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")] if many else []
        kinds: dict[str, Any] = {"mixed_precision": "no"}
        if cell["stage"]:
            config = deepspeed_cpu.config(
                cell["stage"],
                cell["dtype"],
                offload=cell["offload"],
                accumulation=cell["accumulation"],
                clip=cell["clip"],
                zero=cell.get("zero"),
            )

            class Plugin(DeepSpeedPlugin):
                """Without what Accelerate does for models that transformers builds: it is not installed here."""

                def set_deepspeed_weakref(self) -> None:
                    pass

            kinds = {"deepspeed_plugin": Plugin(hf_ds_config=config)}
        else:
            if many:
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
        self.inner = optimizer
        self.target = self.accelerator

    def clip(self) -> Any:
        """The norm that Accelerate's clipping returns."""
        return self.accelerator.clip_grad_norm_(self.trained, self.cell["clip"])

    def window(self, step: int) -> None:
        """One optimizer window."""
        for micro in range(self.cell["accumulation"]):
            with self.accelerator.accumulate(self.model):
                self._micro_batch(batch(step, micro, _rank()), uses_side(step, micro, self.cell["side"]))

    def _micro_batch(self, tokens: torch.Tensor, side: bool) -> None:
        self.accelerator.backward(self.model(tokens, side=side))
        if self.cell["clip"] and self.accelerator.sync_gradients:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ragged(ThroughAccelerate):
    """A loader of one whole window and one that ends early, over and over: Accelerate steps where the loader ends."""

    def __init__(self, deepspeed: Any, cell: dict[str, Any]) -> None:
        super().__init__(deepspeed, cell)
        # Accelerate deals batches out to the ranks in turn.
        rows = [
            batch(step, micro, rank)
            for step in (1, 2)
            for micro in range(micros_of(cell, step))
            for rank in range(_world())
        ]
        loader = torch.utils.data.DataLoader(torch.cat(rows), batch_size=len(rows[0]))  # type: ignore[arg-type,var-annotated]
        self.loader = self.accelerator.prepare(loader)
        self.batches = self._endless()

    def window(self, step: int) -> None:
        """Micro-batches up to the next update."""
        for tokens in self.batches:
            with self.accelerator.accumulate(self.model):
                self._micro_batch(tokens, True)
            if self.accelerator.sync_gradients:
                return

    def _endless(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader


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
            return
        self.norm = math.nan
        if cell["clip"]:
            self._watch_clip(training)
        # Before gradtap's own hook, which is registered at attach. Clipped through Accelerate, the gradient has been
        # looked at already.
        training.inner.register_step_pre_hook(lambda *_: self._before_plain_step())

    def begin(self, step: int) -> None:
        """Before the window: the gradient of the window by one process in float64."""
        self.step = step
        module = self.training.module
        # A ragged cell's loader gives the same two windows over and over.
        data = 2 - step % 2 if "ragged" in self.cell else step
        with _gathered(self.cell, module):
            found = reference(module, data, micros_of(self.cell, step), _world(), self.cell["side"])
        self.arrays.update({f"reference/{step}/{name}": grad.numpy() for name, grad in found.items()})

    def _watch_clip(self, training: Any) -> None:
        clip = training.clip if self.cell["through"] == "native" else training.accelerator.clip_grad_norm_

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.cell["through"] == "accelerate":
                self._look()
            norm = clip(*args, **kwargs)
            self.norm = float(norm)
            return norm

        if self.cell["through"] == "native":
            training.clip = watched
        else:
            training.accelerator.clip_grad_norm_ = watched

    def _before_plain_step(self) -> None:
        if not self.cell["clip"] or self.cell["through"] == "native":
            self._look()
        held = [value for key, value in self.arrays.items() if key.startswith(f"engine/{self.step}/")]
        self.facts.append(
            {
                "loss_scale": 1.0,
                "norm": self.norm,
                "held_norm": math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in held)),
                "applied": True,
            }
        )

    def _around(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._look()
        engine = self.training.engine
        scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
        held = [self.arrays[key].astype(np.float64) for key in self.arrays if key.startswith(f"engine/{self.step}/")]
        result = original(*args, **kwargs)
        norm = engine.get_global_grad_norm()
        self.facts.append(
            {
                "loss_scale": scale,
                "norm": math.nan if norm is None else float(norm),
                "held_norm": math.sqrt(sum(float(np.square(each).sum()) for each in held)),
                "applied": bool(engine.was_step_applied()) and not getattr(engine.optimizer, "overflow", False),
            }
        )
        return result

    def _look(self) -> None:
        scale = 1.0
        if self.training.engine is not None:
            from deepspeed.utils import safe_get_full_grad

            # ZeRO-0 has a loss scale in float16, and never multiplies the loss by it.
            scale = float(getattr(self.training.engine.optimizer, "loss_scale", 1.0)) if self.cell["stage"] else 1.0
        for name, param in self.training.module.named_parameters():
            if not param.requires_grad:
                continue
            grad = safe_get_full_grad(param) if self.training.engine is not None else param.grad
            if grad is None:
                grad = torch.zeros(param.shape)
            self.arrays[f"engine/{self.step}/{name}"] = (grad.detach().float() / scale).numpy().copy()
