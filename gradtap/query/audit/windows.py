"""Faults of accumulation: what was divided by what, and how many micro-batches a window held.

A row belongs to one of these kinds at most, but for the mismatch, which is the cause of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradtap.flags import JOINED_LATE
from gradtap.query.audit.finding import Engine, Finder, Part, Rows


def _known(part: Part) -> Rows:
    """Windows that were seen whole."""
    return np.asarray((part["micro_seen"] > 0) & (part["flags"] & np.uint64(JOINED_LATE) == 0))


def _divided_twice(part: Part) -> Rows:
    engine, loop = part["accum_engine"], part["accum_loop"]
    product = engine.astype(np.float64) * loop
    full = part["micro_seen"] >= engine
    return np.asarray(_known(part) & (loop > 1) & (engine > 1) & (part["divisor"] == product) & full & ~_product(part))


def _product(part: Part) -> Rows:
    """Windows of as many micro-batches as both counts make together."""
    engine, loop = part["accum_engine"].astype(np.int64), part["accum_loop"].astype(np.int64)
    return np.asarray(_known(part) & (engine > 1) & (loop > 1) & (part["micro_seen"] == engine * loop))


def _short(part: Part) -> Rows:
    twice = part["accum_engine"].astype(np.float64) * part["accum_loop"]
    # Divided twice, the divisor says nothing of how many there should have been.
    wanted = np.where((part["divisor"] == twice) & (part["accum_loop"] > 1), part["accum_engine"], part["divisor"])
    return np.asarray(_known(part) & (part["micro_seen"] < wanted))


def _alone(part: Part) -> Rows:
    single = _short(part) & (part["micro_seen"] == 1)
    return np.asarray(single & part.beside(single))


def _ragged(part: Part) -> Rows:
    return np.asarray(_short(part) & ~_alone(part))


def _mismatch(part: Part) -> Rows:
    engine, loop, divisor = part["accum_engine"], part["accum_loop"], part["divisor"]
    # A loop that divides by itself, and has the engine divide by nothing, is free to count as it likes.
    return np.asarray((engine > 0) & (loop > 0) & (engine != loop) & ~((divisor == 1) & (engine != 1)))


def _lost(part: Part) -> Rows:
    if not part.engine.zero or part.engine.settings.get("managed_gradient_accumulation") is False:
        return np.zeros(len(part["step"]), np.bool_)
    return np.asarray(_known(part) & (part["micro_seen"] > part["accum_engine"]) & ~_product(part))


def _tell_lost(row: Mapping[str, Any], engine: Engine) -> Mapping[str, Any]:
    over = row["micro_seen"] - row["accum_engine"]
    return {"over": over, "likely_lost": "the first ones" if engine.offload else "all but the last at the boundary"}


def _tell_ratio(row: Mapping[str, Any], engine: Engine) -> Mapping[str, Any]:
    return {"stored_over_mean": row["micro_seen"] / row["divisor"]}


WINDOWS = (
    Finder(
        code="accumulation-mismatch",
        severity="error",
        seen=_mismatch,
        shown=("accum_engine", "accum_loop", "micro_seen", "divisor", "factor"),
        tells=lambda row, engine: {"ratio": row["accum_engine"] / row["accum_loop"]},
        cause="the engine and the training loop were set up with different accumulation counts",
        cure="give both the same count: under Accelerate with DeepSpeed, gradient_accumulation_steps of the DeepSpeed "
        'config (or "auto") and of the Accelerator',
    ),
    Finder(
        code="double-division",
        severity="error",
        seen=_divided_twice,
        shown=("divisor", "accum_engine", "accum_loop", "micro_seen", "factor"),
        tells=_tell_ratio,
        cause="both the training loop and the engine divide the loss by the accumulation count, so the gradient is too "
        "small by that count (Lightning with DeepSpeed)",
        cure="undo one of the divisions: under Lightning multiply the loss that training_step returns by "
        "trainer.accumulate_grad_batches",
    ),
    Finder(
        code="double-accumulation",
        severity="error",
        seen=_product,
        shown=("micro_seen", "accum_engine", "accum_loop", "divisor"),
        cause="the training loop accumulates micro-batches and hands the engine one boundary in so many, which "
        "accumulates again: an update takes the product of both counts",
        cure="let one of them accumulate: set the other one's count to 1",
    ),
    Finder(
        code="update-without-accumulation",
        severity="error",
        seen=_alone,
        shown=("micro_seen", "divisor", "factor"),
        tells=_tell_ratio,
        cause="the optimizer steps at every micro-batch while the loss is divided by the accumulation count",
        cure="run the loop's body within `with accelerator.accumulate(model):`, or set the accumulation count to 1",
    ),
    Finder(
        code="ragged-window",
        severity="warning",
        seen=_ragged,
        shown=("micro_seen", "divisor", "factor"),
        tells=_tell_ratio,
        cause="the data ended within a window, which was divided by the full accumulation count all the same",
        cure="use a number of batches that the accumulation count divides (drop the last ones), or divide the loss by "
        "the real count; stored value x factor is the mean",
    ),
    Finder(
        code="lost-micro-batches",
        severity="error",
        seen=_lost,
        shown=("micro_seen", "accum_engine", "divisor"),
        tells=_tell_lost,
        cause="more backwards ran than the engine accumulates, each at a boundary, and ZeRO's buffer does not hold all",
        cure="set the engine's gradient_accumulation_steps to the number of backwards of an update, or add up the "
        "losses and call backward once",
    ),
)
"""Finders over single windows."""
