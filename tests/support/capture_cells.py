"""What the processes of the capture tests run: many cells (engine x dtype x offload ...) in one process group.

Each cell trains the tiny model a few steps with a listener that keeps what the source says; arrays go to one `.npz`
file per cell and rank, the rest is the function's result. The comparison is done by the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradtap.capture.detect import find_source
from gradtap.capture.rendezvous import Rendezvous
from gradtap.errors import AttachError, RendezvousError, UnsupportedError
from tests.support import tiny_model
from tests.support.collectives import Counter, count_collectives
from tests.support.tiny_model import TinyModel, batch, uses_side

LEARNING_RATE = 2.0**-10


def key(cell: dict[str, Any]) -> str:
    """A file name for a cell."""
    return "-".join(f"{name}={value}" for name, value in cell.items())


def run(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All of `args["cells"]`, one after another; results by `key(cell)`."""
    from tests.support import deepspeed_cpu

    torch.set_num_threads(1)
    deepspeed = deepspeed_cpu.prepare()
    counter = count_collectives()
    deepspeed_cpu.init_group(deepspeed)
    found = {key(cell): run_cell(cell, folder, counter) for cell in args["cells"]}
    return found | {
        "refusals": {name: _refusal_of(made) for name, made in REFUSED.items()} if args.get("refuse") else {}
    }


REFUSED: dict[str, dict[str, Any]] = {
    "zero0": {"engine": "zero0"},
    "zero0 fp16": {"engine": "zero0", "dtype": "float16"},
    "zero3": {"engine": "zero3"},
    "bf16 optimizer": {"engine": "zero1", "dtype": "bfloat16", "fp32_accumulation": True},
    "sum": {"engine": "zero2", "more": {"gradient_allreduce_op": "sum"}},
    "bf16 accumulation of fp32": {"engine": "zero2", "more": {"data_types": {"grad_accum_dtype": "bf16"}}},
    "twice": {"engine": "zero2", "twice": True},
    "not prepared": {"engine": "zero2", "through": "accelerate", "not_prepared": True},
}


def _refusal_of(cell: dict[str, Any]) -> str:
    training = _training(cell)
    target = training.fresh if cell.get("not_prepared") else training.target
    try:
        source = find_source(target)
        if cell.get("twice"):
            source.install(Listener(source, training, cell, Counter()))
            find_source(target)
    except AttachError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def run_torch(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same without DeepSpeed, and what the ranks met with in `_meetings` and `_refusals`."""
    torch.set_num_threads(1)
    counter = count_collectives()
    dist.init_process_group("gloo")
    found = {key(cell): run_cell(cell, folder, counter) for cell in args["cells"]}
    found |= {"meetings": _meetings(counter), "refusals": _refusals()}
    dist.barrier()
    dist.destroy_process_group()
    return found


def _meetings(counter: Counter) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    with counter.watch():
        return {"good": _meet(rank, world, 20.0), "refused": _meet(rank, world, 20.0, refuse=1), "late": _late(rank)}


def _meet(rank: int, world: int, timeout: float, refuse: int = -1) -> str:
    meeting = Rendezvous(rank, world, timeout)
    try:
        with meeting.telling_failures():
            if rank == refuse:
                raise AttachError("this rank has no gradients")
            told = {"run": "here"}
            if rank == 0:
                meeting.announce(told)
                meeting.wait_ready()
                meeting.conclude(None)
            else:
                told = meeting.receive()
                meeting.ready(None)
                meeting.verdict()
            return told["run"]
    except AttachError as error:
        return f"{type(error).__name__}: {error}"


def _late(rank: int) -> str:
    meeting = Rendezvous(rank, dist.get_world_size(), 0.3)
    if rank != 0:
        return "not called"
    try:
        meeting.announce({"run": "here"})
        meeting.wait_ready()
    except RendezvousError as error:
        return str(error)
    return "met"


def _refusals() -> dict[str, str]:
    model = TinyModel()
    try:
        find_source((model, torch.optim.SGD([model.scale], lr=0.1)))
    except UnsupportedError as error:
        return {"bare model": str(error)}
    return {}


def run_cell(cell: dict[str, Any], folder: Path, counter: Counter) -> dict[str, Any]:
    """Train a few steps under one cell; what the source said, and what was left on the objects afterwards."""
    training = _training(cell)
    before = training.marks()
    source = find_source(training.target)
    listener = Listener(source, training, cell, counter)
    source.install(listener)
    during = training.marks()
    for step in range(1, cell.get("steps", 3) + 1):
        training.step(step)
    listener.close()
    source.remove()
    after = training.marks()
    np.savez(folder / f"{key(cell)}.{dist.get_rank()}.npz", **listener.arrays)
    return {
        "params": [dataclasses.asdict(spec) for spec in source.params],
        "ownership": [None if own is None else dataclasses.asdict(own) for own in source.ownership],
        "facts": dataclasses.asdict(source.facts),
        "steps": listener.steps,
        "marks": [before, during, after],
        "collectives": counter.seen,
        "collectives_elsewhere": counter.all_calls,
    }


class Listener:
    """Keeps copies of everything, and asks the engine the same in its own, collective way."""

    def __init__(self, source: Any, training: Any, cell: dict[str, Any], counter: Counter) -> None:
        self.source, self.training, self.cell, self.counter = source, training, cell, counter
        self.steps: list[dict[str, Any]] = []
        self.arrays: dict[str, Any] = {}
        self._open = False

    def before_step(self) -> None:
        self._outcome()
        with self.counter.watch():
            step = self.source.next_step()
            number = step if step is not None else len(self.steps) + 1
            facts = self.source.step_facts(number)
            grads = self.source.gradients()
        for grad in grads:
            name = self.source.params[grad.param].name
            values = torch.zeros(grad.stop - grad.start) if grad.tensor is None else grad.tensor
            assert values.dim() == 1
            self.arrays[f"{number}/grad/{name}/{grad.start}"] = values.double().numpy().copy()
        for name, value in self.training.held().items():
            self.arrays[f"{number}/held/{name}"] = value.double().numpy().copy()
        for name, value in self.training.reference(number).items():
            self.arrays[f"{number}/reference/{name}"] = value.numpy()
        told = dataclasses.asdict(facts)
        told |= {"touched": facts.touched.tolist(), "next_step": step, "window_open": self.source.window_open}
        told["dtypes"] = sorted({str(grad.tensor.dtype) for grad in grads if grad.tensor is not None})
        self.steps.append(told)
        self._open = True

    def after_step(self) -> None:
        self.steps[-1]["ended"] = True

    def close(self) -> None:
        self._outcome()

    def _outcome(self) -> None:
        if self._open:
            self._open = False
            with self.counter.watch():
                outcome = self.source.outcome()
            self.steps[-1]["outcome"] = dataclasses.asdict(outcome)


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
        return tiny_model.reference(
            self.engine.module, step, micros, dist.get_world_size(), self.cell.get("rule", "always")
        )

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


def _training(cell: dict[str, Any]) -> Any:
    if cell["engine"].startswith("zero"):
        return _TRAININGS["accelerate" if cell.get("through") == "accelerate" else "zero"](cell)
    return _TRAININGS["ddp"](cell)


def _param_hooks(model: torch.nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    # Not PartialState: it would take the process group down with it.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def scale_of(facts: dict[str, Any]) -> float:
    """2**-k, by which a captured value is multiplied before it is stored."""
    return math.ldexp(1.0, -facts["k"])


_TRAININGS: dict[str, Any] = {"zero": ZeroTraining, "accelerate": AccelerateZeroTraining, "ddp": TorchTraining}
