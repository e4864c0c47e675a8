"""One process of the demo's training: an ordinary Accelerate loop with one added line.

Run as `python -m gradtap.demo.train WORK`, where WORK holds `options.json`; the launcher sets the rank's variables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import gradtap
from gradtap.demo.data import batch
from gradtap.demo.environment import make_accelerator
from gradtap.demo.model import ByteTransformer
from gradtap.demo.options import ACCUMULATION, CLIP_NORM, LEARNING_RATE, Options
from gradtap.errors import GradtapError


def train(options: Options, work: Path) -> None:
    """Train, tell the launcher how far it is, and keep the parameters before each step that is checked later."""
    accelerator = make_accelerator(options)
    model: Any = ByteTransformer(options.seed)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trainable, lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)

    tap = gradtap.attach(accelerator, options.store)  # noqa: F841  (the one added line)

    rank = accelerator.process_index
    tell = Progress(work / "events.jsonl", quiet=rank != 0)
    tell.event("attached", device=str(accelerator.device))
    for step in range(1, options.steps + 1):
        if rank == 0 and step in options.checked_steps:
            torch.save(accelerator.unwrap_model(model).state_dict(), work / f"before-{step}.pt")
        for micro in range(ACCUMULATION):
            with accelerator.accumulate(model):
                data = torch.from_numpy(batch(step, micro, rank, options.seed)).to(accelerator.device)
                loss = model(data)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trainable, CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
        tell.event("step", step=step, loss=loss.item())
    accelerator.end_training()
    tell.event("trained")


class Progress:
    """Events for the launcher: one JSON object a line, appended at once. Silent where `quiet`."""

    def __init__(self, path: Path, *, quiet: bool) -> None:
        self._file = None if quiet else path.open("a", encoding="utf-8", buffering=1)

    def event(self, name: str, **facts: object) -> None:
        """Append one event."""
        if self._file is not None:
            self._file.write(json.dumps({"event": name, **facts}) + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        train(Options.load(folder / "options.json"), folder)
    except GradtapError as error:
        # Said to a person by the launcher, who has no use for the stack of a refusal.
        sys.exit(f"gradtap: {error}")
