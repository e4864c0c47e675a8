"""Faults of counters: step numbers that jump, and learning rates that move where they should not."""

from __future__ import annotations

import numpy as np

from gradtap.query.audit.finding import Finder, Part, Rows
from gradtap.query.audit.scales import SKIPPED


def _jumps(part: Part) -> Rows:
    found = np.zeros(len(part["step"]), np.bool_)
    found[:-1] = np.diff(part["step"]) > 1
    return found


def _moved(part: Part) -> Rows:
    """Steps that were skipped, and after which the learning rate was another one all the same."""
    rates, steps = part["learning_rate"], part["step"]
    found = np.zeros(len(steps), np.bool_)
    if len(steps) > 1 and rates.ndim == 2:
        before, after = rates[:-1], rates[1:]
        both = np.isfinite(before) & np.isfinite(after)
        found[:-1] = (np.diff(steps) == 1) & (both & (before != after)).any(axis=1) & (part["state"][:-1] == SKIPPED)
    return found


COUNTERS = (
    Finder(
        code="counter-drift",
        severity="warning",
        seen=_jumps,
        shown=("step",),
        cause="the step count of the engine moved on by more than the update that was recorded: updates were made, or "
        "counted, where the recorder did not see them",
        cure="compare the trainer's count with the engine's; load checkpoints before the first recorded step",
    ),
    Finder(
        code="scheduler-drift",
        severity="warning",
        seen=_moved,
        shown=("learning_rate", "loss_scale"),
        cause="the learning-rate scheduler was stepped although the engine skipped the update",
        cure="step the scheduler only where the update was applied: let the engine or Accelerate step it",
    ),
)
"""Finders over what counts."""
