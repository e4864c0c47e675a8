"""What the optimizer consumed of a stored gradient: one coefficient for each step, from the ledger alone.

    consumed = stored x 2**k / scale x clip

`scale` is the loss scale that the engine divided by and `clip` the coefficient of its clipping. DeepSpeed updates its
loss scale before it divides: at a step where the scale grew, it divides by the grown one. What cannot be told is
refused by name, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import IncompleteError
from gradtap.read.attempts import Place
from gradtap.read.session_ledger import SessionLedger
from gradtap.store.ledger_fields import STATE_NAMES

FIELDS = ("step", "state", "k", "loss_scale", "clip_coef")


def consumed_by(places: Sequence[Place]) -> tuple[float, ...]:
    """The coefficient at each place. Raises `IncompleteError`, which names the step, where there is none to know."""
    return tuple(_coefficient(place) for place in places)


def divides_by_grown_scale(engine: str) -> bool:
    """Whether an engine of that name updates its loss scale before it divides by it, as DeepSpeed does."""
    return engine.startswith("deepspeed")


def _coefficient(place: Place) -> float:
    ledger, step = place.reader.ledger, place.step
    first = ledger.session.first_step
    rows = {} if first is None else {name: ledger.column(name, step - first, step - first + 2) for name in FIELDS}
    if not rows or rows["step"][0] != step:
        raise _unknown(step, "its row of the ledger is not there yet; ask again in a moment")
    state = STATE_NAMES.get(int(rows["state"][0]), "unknown")
    if state == "skipped-overflow":
        raise _unknown(step, "the engine skipped the update for overflow, so the optimizer consumed nothing")
    if state != "applied":
        waiting = int(rows["state"][0]) == 0
        raise _unknown(
            step, "whether it was applied is not known" + ("; the next step of a live run tells" if waiting else "")
        )
    scale = _scale(ledger, rows, step)
    return math.ldexp(_clip(rows, step), int(rows["k"][0])) / scale


def _scale(ledger: SessionLedger, rows: Mapping[str, NDArray[np.generic]], step: int) -> float:
    """The loss scale that was divided by."""
    scale = float(rows["loss_scale"][0])
    if not math.isfinite(scale) or scale <= 0:
        raise _unknown(step, f"its loss scale is {scale:g}")
    session = ledger.session
    if not divides_by_grown_scale(str(session.head.engine["name"])) or not _may_grow(
        session.head.engine.get("settings", {}), scale
    ):
        return scale
    after = float(rows["loss_scale"][1]) if len(rows["step"]) > 1 and rows["step"][1] == step + 1 else math.nan
    if not after >= scale:
        raise _unknown(
            step,
            "the engine divides by the loss scale that it has after the step, which the row of the next step tells, "
            f"and session {session.name} has none that follows",
        )
    return after


def _may_grow(settings: Mapping[str, object], scale: float) -> bool:
    # Without a loss scale it is 1, and stays so; a scale of 1 in fp16 may yet grow.
    return scale != 1 or settings.get("model_dtype") == "float16"


def _clip(rows: Mapping[str, NDArray[np.generic]], step: int) -> float:
    clip = float(rows["clip_coef"][0])
    if math.isnan(clip):
        raise _unknown(
            step, "the coefficient of its clipping is not known: the loop clipped, or may have, where nobody looked"
        )
    return clip


def _unknown(step: int, why: str) -> IncompleteError:
    return IncompleteError(
        f"what the optimizer consumed at step {step} cannot be told: {why}. Ask without as_consumed for what is stored"
    ).noting(step=step, reason=why)
