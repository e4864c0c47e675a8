"""The trainings of the capture tests: the tiny model under one engine each, as a user would write the loop."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from tests.support import tiny_model
from tests.support.tiny_model import TinyModel, batch, uses_side

LEARNING_RATE = 2.0**-10


def make_training(cell: dict[str, Any]) -> Any:
    """The training of a cell: `target` for `find_source`, `step(n)`, and `held`, `reference`, `marks` to compare."""
    if not cell["engine"].startswith("zero"):
        return TorchTraining(cell)
    return AccelerateZeroTraining(cell) if cell.get("through") == "accelerate" else ZeroTraining(cell)


class ZeroTraining:
    """A bare DeepSpeed engine in a native loop."""

    def __init__(self, cell: dict[str, Any]) -> None:
        from tests.support import deepspeed_cpu

        self.cell = cell
        self.model = TinyModel()
        trained = [param for param in self.model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
        self.engine, *_ = deepspeed_cpu.prepare().initialize(
            model=self.model, optimizer=optimizer, config=self.config(cell), dist_init_required=False
        )
        self.target: Any = self.engine

    def config(self, cell: dict[str, Any]) -> dict[str, Any]:
        from tests.support import deepspeed_cpu

        return deepspeed_cpu.config(
            int(cell["engine"][4]),
            cell.get("dtype", "float32"),
            offload=cell.get("offload", False),
            accumulation=cell.get("accumulation", 1),
            clip=cell.get("clip", 0.0),
            fp32_accumulation=cell.get("fp32_accumulation", False),
            scale=cell.get("scale", 1024.0),
            zero=cell.get("zero"),
            **cell.get("more", {}),
        )

    def step(self, step: int) -> None:
        micros = self.cell.get("accumulation", 1)
        for micro in range(micros):
            side = uses_side(step, micro, self.cell.get("rule", "always"))
            loss = self.engine(batch(step, micro, dist.get_rank()), side=side)
            self.backward(loss)
            # A managed engine wants `step` after every micro-batch, an unmanaged one takes each `step` as a boundary.
            if micro == micros - 1 or not self.cell.get("unmanaged"):
                self.engine.step()

    def backward(self, loss: torch.Tensor) -> None:
        if self.cell.get("backward") == "direct":
            self.engine.scale(loss).backward()
        elif self.cell.get("backward") == "unscaled":
            self.engine.backward(loss / self.cell["accumulation"], scale_wrt_gas=False)
        else:
            self.engine.backward(loss)

    def held(self) -> dict[str, torch.Tensor]:
        """The engine's own account of the full gradients; it breaks DeepSpeed under round-robin ownership."""
        from deepspeed.utils import safe_get_full_grad

        if self.cell.get("no_held"):
            return {}
        model = self.engine.module
        return {name: safe_get_full_grad(param) for name, param in model.named_parameters() if param.requires_grad}

    def reference(self, step: int) -> dict[str, torch.Tensor]:
        micros = 1 if step == self.cell.get("ragged") else self.cell.get("accumulation", 1)
        rule = self.cell.get("rule", "always")
        with self._gathered():
            return tiny_model.reference(self.engine.module, step, micros, dist.get_world_size(), rule)

    def _gathered(self) -> Any:
        if self.cell["engine"] != "zero3":
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.engine.module.parameters()))

    def marks(self) -> dict[str, Any]:
        """Everything on which an attachment could leave a trace."""
        optimizer = self.engine.basic_optimizer
        return {
            "hooks": _param_hooks(self.model),
            "engine": sorted(key for key, value in vars(self.engine).items() if callable(value)),
            "optimizer": [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
        }


class AccelerateZeroTraining(ZeroTraining):
    """The same under Accelerate, whose backward also steps."""

    def __init__(self, cell: dict[str, Any]) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

        class Plugin(DeepSpeedPlugin):
            def set_deepspeed_weakref(self) -> None:
                """Leave transformers alone: the tiny model is not its."""

        self.cell = cell
        _forget_accelerate()
        self.model = TinyModel()
        trained = [param for param in self.model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
        self.target = Accelerator(
            deepspeed_plugin=Plugin(hf_ds_config=self.config(cell)),
            gradient_accumulation_steps=cell.get("accumulation", 1),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )
        if cell.get("not_prepared"):
            self.fresh = self.target
            return
        self.prepared, self.optimizer = self.target.prepare(self.model, optimizer)
        self.engine = self.target.deepspeed_engine_wrapped.engine

    def step(self, step: int) -> None:
        if step == self.cell.get("ragged"):
            # As at the end of a data loader: a boundary before the window is full.
            self.target.gradient_state._set_sync_gradients(True)
            self.target.backward(self.prepared(batch(step, 0, dist.get_rank())))
            return
        for micro in range(self.cell.get("accumulation", 1)):
            side = uses_side(step, micro, self.cell.get("rule", "always"))
            with self.target.accumulate(self.prepared):
                self.target.backward(self.prepared(batch(step, micro, dist.get_rank()), side=side))
                self.optimizer.step()
                self.optimizer.zero_grad()


class TorchTraining:
    """DDP (or plain torch in a world of one), bare or through Accelerate, clipped in the way the cell says."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.model = TinyModel(scalar=True)
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[cell.get("optimizer", "adamw")]
        self.optimizer = kind([param for param in self.model.parameters() if param.requires_grad], lr=LEARNING_RATE)
        self.accelerator: Any = None
        if cell.get("through") == "accelerate":
            self._accelerate(cell)
        else:
            unused = cell.get("rule", "always") != "always"
            self.wrapped = torch.nn.parallel.DistributedDataParallel(
                self.model, find_unused_parameters=unused, gradient_as_bucket_view=cell.get("bucket_view", False)
            )
            self.target: Any = (self.wrapped, self.optimizer)

    def _accelerate(self, cell: dict[str, Any]) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

        _forget_accelerate()
        unused = cell.get("rule", "always") != "always"
        self.accelerator = self.target = Accelerator(
            cpu=True,
            mixed_precision=cell.get("mixed", "no"),
            gradient_accumulation_steps=cell.get("accumulation", 1),
            kwargs_handlers=[
                InitProcessGroupKwargs(backend="gloo"),
                DistributedDataParallelKwargs(find_unused_parameters=unused),
            ],
        )
        self.wrapped, self.prepared = self.accelerator.prepare(self.model, self.optimizer)

    def step(self, step: int) -> None:
        micros, rule = self.cell.get("accumulation", 1), self.cell.get("rule", "always")
        for micro in range(micros):
            tokens, side = batch(step, micro, dist.get_rank()), uses_side(step, micro, rule)
            if self.accelerator is not None:
                self._accelerated(tokens, side)
                continue
            last = micro == micros - 1
            with contextlib.nullcontext() if last else self.wrapped.no_sync():
                (self.wrapped(tokens, side=side) / micros).backward()
        if self.accelerator is None:
            if self.cell.get("clip"):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cell["clip"])
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _accelerated(self, tokens: torch.Tensor, side: bool) -> None:
        with self.accelerator.accumulate(self.wrapped):
            self.accelerator.backward(self.wrapped(tokens, side=side))
            if self.accelerator.sync_gradients and self.cell.get("clip"):
                self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.cell["clip"])
            self.prepared.step()
            self.prepared.zero_grad()

    def held(self) -> dict[str, torch.Tensor]:
        return {name: param.grad.clone() for name, param in self.model.named_parameters() if param.grad is not None}

    def reference(self, step: int) -> dict[str, torch.Tensor]:
        micros = self.cell.get("accumulation", 1)
        return tiny_model.reference(self.model, step, micros, dist.get_world_size(), self.cell.get("rule", "always"))

    def marks(self) -> dict[str, Any]:
        on = self.accelerator
        return {
            "hooks": _param_hooks(self.model),
            "engine": [] if on is None else sorted(key for key, value in vars(on).items() if callable(value)),
            "optimizer": [
                len(self.optimizer._optimizer_step_pre_hooks),
                len(self.optimizer._optimizer_step_post_hooks),
            ],
        }


def _param_hooks(model: torch.nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    # Not PartialState: it would take the process group down with it.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
