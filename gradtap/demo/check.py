"""The demo's check: the gradients of a few steps again, in one process of plain torch, against what the store holds.

Run as `python -m gradtap.demo.check WORK`; the last line of standard output is the result as one JSON object.
Nothing of the capture is used: the parameters that the training kept, the batches rebuilt, float64.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import gradtap
from gradtap.demo.data import batch
from gradtap.demo.model import ByteTransformer
from gradtap.demo.options import ACCUMULATION, TOLERANCE, Options


def reference(parameters: Path, options: Options, step: int) -> dict[str, NDArray[np.float64]]:
    """Mean gradient over all ranks' micro-batches of a step, at the saved parameters: trainable name -> float64."""
    model = ByteTransformer(options.seed)
    model.load_state_dict(torch.load(parameters, map_location="cpu", weights_only=True))
    model.double()
    windows = [(micro, rank) for rank in range(options.world) for micro in range(ACCUMULATION)]
    for micro, rank in windows:
        loss = model(torch.from_numpy(batch(step, micro, rank, options.seed))) / len(windows)
        loss.backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def compare(stored: dict[str, NDArray[Any]], wanted: dict[str, NDArray[np.float64]], step: int) -> dict[str, Any]:
    """The result of one step as JSON values: relative L2 error of each parameter, the largest by name.

    A parameter on one side only counts as missing or unexpected, and the step does not hold.
    """
    both = [name for name in wanted if name in stored]
    errors = {name: relative_error(stored[name], wanted[name]) for name in both}
    missing = sorted(set(wanted) - set(stored))
    unexpected = sorted(set(stored) - set(wanted))
    largest = max(errors, key=lambda name: errors[name], default=None)
    return {
        "step": step,
        "parameters": len(both),
        "largest_error": errors[largest] if largest is not None else None,
        "largest_name": largest,
        "missing": missing,
        "unexpected": unexpected,
        "held": bool(both) and not missing and not unexpected and all(e <= TOLERANCE for e in errors.values()),
    }


def relative_error(got: NDArray[Any], wanted: NDArray[np.float64]) -> float:
    """L2 norm of the difference over that of `wanted`; infinite for another shape or a value that is not finite."""
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    distance = float(np.linalg.norm(got.astype(np.float64) - wanted))
    size = float(np.linalg.norm(wanted))
    return distance / size if size else (0.0 if distance == 0.0 else float("inf"))


def check(options: Options, work: Path) -> dict[str, Any]:
    """Compare each chosen step. Raises what `gradtap.open` raises for a store that cannot be read."""
    began = time.monotonic()
    run = gradtap.open(options.store)
    names = [spec.name for spec in run.params if spec.stored]
    results = []
    for step in options.checked_steps:
        wanted = reference(work / f"before-{step}.pt", options, step)
        stored = {name: np.asarray(run.grad(name, step)) for name in names}
        results.append(compare(stored, wanted, step))
    return {
        "held": all(result["held"] for result in results),
        "tolerance": TOLERANCE,
        "steps": results,
        "seconds": round(time.monotonic() - began, 3),
    }


def main(work: Path) -> None:
    """Check and print."""
    sys.stdout.write(json.dumps(check(Options.load(work / "options.json"), work)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
