"""What the processes of the capture tests run: many cells (engine x dtype x offload ...) in one process group.

Each cell trains the tiny model a few steps with a listener that keeps what the source says; arrays go to one `.npz`
file per cell and rank, the rest is the function's result. The comparison is done by the tests.
"""

from __future__ import annotations

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
from tests.support.capture_trainings import make_training
from tests.support.collectives import Counter, count_collectives
from tests.support.tiny_model import TinyModel


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
    "sum": {"engine": "zero2", "more": {"gradient_allreduce_op": "sum"}},
    "bf16 accumulation of fp32": {"engine": "zero2", "more": {"data_types": {"grad_accum_dtype": "bf16"}}},
    "twice": {"engine": "zero2", "twice": True},
    "not prepared": {"engine": "zero2", "through": "accelerate", "not_prepared": True},
}


def _refusal_of(cell: dict[str, Any]) -> str:
    training = make_training(cell)
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
    return {"bare model": _refused_pair(TinyModel())}


def _refused_pair(model: torch.nn.Module) -> str:
    trained = [param for param in model.parameters() if param.requires_grad]
    try:
        find_source((model, torch.optim.SGD(trained, lr=0.1)))
    except UnsupportedError as error:
        return str(error)
    return "accepted"


def run_cell(cell: dict[str, Any], folder: Path, counter: Counter) -> dict[str, Any]:
    """Train a few steps under one cell; what the source said, and what was left on the objects afterwards."""
    training = make_training(cell)
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


def scale_of(facts: dict[str, Any]) -> float:
    """2**-k, by which a captured value is multiplied before it is stored."""
    return math.ldexp(1.0, -facts["k"])
