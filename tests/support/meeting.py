"""Two ranks that attach in wrong ways, then rightly: what each of them hears."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradtap
from tests.support.collectives import count_collectives


def run(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Errors by case, seconds that each took, and the collectives called while capturing."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    heard: dict[str, Any] = {}

    def attach(case: str, store: Path, pair: Any = None, **more: Any) -> None:
        dist.barrier()
        begun = time.monotonic()
        try:
            gradtap.attach(pair or make(), store, **more).close()
            heard[case] = None
        except gradtap.GradtapError as error:
            heard[case] = [type(error).__name__, str(error), time.monotonic() - begun]
        dist.barrier()

    attach("not shared", folder / f"rank{rank}" / "a.gradtap")
    (folder / "file").touch()
    attach("cannot be written", folder / "file" / "a.gradtap")
    attach("one rank has another optimizer", folder / "b.gradtap", make(lbfgs=rank == 1))
    attach("one rank asks for something else", folder / "c.gradtap", select="no.such" if rank else None)
    os.environ["GRADTAP_MAX_TIME"] = str(4 + 4 * rank)
    attach("one rank plans another layout", folder / "d.gradtap")
    os.environ["GRADTAP_MAX_TIME"] = "4"
    attach("other steps", folder / "s.gradtap", every=1 + rank)
    attach("other parameters", folder / "t.gradtap", select="bias" if rank else None)
    attach("right", folder / "e.gradtap")
    heard["calls"] = _capture(folder / "f.gradtap")
    alone = make()
    if rank == 0:
        attach_alone("main rank only", alone, folder / "g.gradtap", heard)
    dist.barrier()
    if rank == 1:
        attach_alone("not on the main rank", alone, folder / "h.gradtap", heard)
    dist.barrier()
    heard["left"] = sorted(os.listdir(folder / "f.gradtap" / "sessions"))
    return heard


def attach_alone(case: str, pair: Any, store: Path, heard: dict[str, Any]) -> None:
    """Attach on this rank while the other does not."""
    try:
        gradtap.attach(pair, store)
        heard[case] = None
    except gradtap.GradtapError as error:
        heard[case] = [type(error).__name__, str(error), 0.0]


def make(*, lbfgs: bool = False) -> tuple[Any, Any]:
    """A model under DDP and its optimizer, the same on both ranks unless told otherwise."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    kind = torch.optim.LBFGS if lbfgs else torch.optim.SGD
    return model, kind(model.parameters(), lr=0.1)


def _capture(store: Path) -> dict[str, Any]:
    """Collectives that were called within attach, optimizer steps and close, and those counted in all."""
    model, optimizer = make()
    counter = count_collectives()
    with counter.watch():
        tap = gradtap.attach((model, optimizer), store)
    for step in range(3):
        model(torch.full((2, 5), float(step + dist.get_rank()))).sum().backward()
        with counter.watch():
            optimizer.step()
        optimizer.zero_grad()
    with counter.watch():
        tap.close()
    dist.barrier()
    return {"seen": counter.seen, "all": counter.all_calls}
