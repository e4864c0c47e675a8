"""Faults of loss scales, and steps that the engine skipped."""

from __future__ import annotations

import numpy as np

from gradtap.flags import NONFINITE
from gradtap.query.audit.finding import Finder, Part, Rows

SKIPPED = "skipped-overflow"
DOUBT = 0.6
"""Powers of two by which 2**k may miss the loss scale: rounding makes half of one at most."""


def _skipped(part: Part) -> Rows:
    return np.asarray(part["state"] == SKIPPED)


def _halved(part: Part) -> Rows:
    if not part.engine.deepspeed:
        return np.zeros(len(part["step"]), np.bool_)
    return np.asarray((part["state"] == "applied") & (part.ahead("loss_scale") > part["loss_scale"]))


def _unscaled(part: Part) -> Rows:
    scale = part["loss_scale"]
    known = np.isfinite(scale) & (scale > 0)
    missed = np.log2(np.where(known, scale, 1.0)) - part["k"]
    return np.asarray(known & (part["k"] == 0) & (missed > DOUBT))


def _nonfinite(part: Part) -> Rows:
    # A loss scale that overflows is found out by trying; such a step was skipped.
    return np.asarray((part["flags"] & np.uint64(NONFINITE) != 0) & (part["state"] != SKIPPED))


SKIPS = Finder(
    code="skipped-steps",
    severity="warning",
    seen=_skipped,
    shown=("loss_scale",),
    cause="gradients overflowed at the loss scale in force, and the engine left these updates out; a few at the "
    "beginning are how a dynamic scale finds its size",
    cure="begin with a smaller loss scale (initial_scale_power), or train in bfloat16",
)
ODD = Finder(
    code="nonfinite",
    severity="error",
    seen=_nonfinite,
    shown=("loss_scale", "state"),
    cause="a gradient holds NaN or infinities, and the engine did not skip the update for it",
    cure="look at the first parameter with `gradtap show`; check the data and the loss of that step, and have the "
    "engine check for overflow (DeepSpeed bf16: check_grad_overflow)",
)
SCALES = (
    SKIPS,
    Finder(
        code="halved-on-scale-growth",
        severity="warning",
        seen=_halved,
        shown=("loss_scale",),
        tells=lambda row, engine: {"consumed_over_stored": "loss scale over the grown one, one half as a rule"},
        cause="DeepSpeed raises its loss scale before it divides by it: at these steps the optimizer consumed the "
        "gradient divided by the grown scale",
        cure="a wider loss_scale_window has fewer such steps, a static loss_scale or bfloat16 none",
    ),
    Finder(
        code="unscaled-never-scaled",
        severity="error",
        seen=_unscaled,
        shown=("loss_scale", "k"),
        cause="the engine divides the gradient by a loss scale that the loss was never multiplied with (DeepSpeed "
        "ZeRO-0 with fp16)",
        cure="use ZeRO-1 or higher, or bfloat16; or multiply the loss by the scale before backward",
    ),
    ODD,
)
"""Finders over scales and states."""
