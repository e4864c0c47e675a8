"""Whether a step is made by torch's own GradScaler, which hands the optimizer nothing that says so."""

from __future__ import annotations

import sys
from types import FrameType

import torch

# From an optimizer's hook up to the scaler's `step`: torch's wrapper of `step`, a subclass or a scheduler's wrapper
# around it, and the scaler's own helper.
_DEEPEST = 16


def stepped_by_scaler() -> bool:
    """Whether the caller runs within `GradScaler.step`.

    Unscaling in place leaves no other trace: its kernels do not count up a gradient's version.
    """
    code = torch.amp.GradScaler.step.__code__
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
