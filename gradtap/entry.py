"""`gradtap.attach` as users have it: at once for what is prepared, later for a trainer that prepares by itself."""

from __future__ import annotations

import functools
import sys
from typing import Any

from gradtap.tap import attach as attach_now

_TRAINERS = (
    ("transformers.trainer", "hf"),
    ("lightning.pytorch.trainer.trainer", "lightning"),
    ("pytorch_lightning.trainer.trainer", "lightning"),
)


@functools.wraps(attach_now)
def attach(target: Any, store: Any, **options: Any) -> Any:
    """See `gradtap.tap.attach`; for an HF Trainer or a Lightning Trainer, a tap that begins with its training."""
    way = _trainer_of(target)
    if way == "hf":
        from gradtap.hf import attach_trainer

        return attach_trainer(target, store, options)
    if way == "lightning":
        from gradtap.lightning import attach_trainer as attach_lightning

        return attach_lightning(target, store, options)
    return attach_now(target, store, **options)


def _trainer_of(target: Any) -> str | None:
    for home, way in _TRAINERS:
        # An instance can exist only where its module is loaded; importing it here would cost seconds.
        cls = getattr(sys.modules.get(home), "Trainer", None)
        if isinstance(cls, type) and isinstance(target, cls):
            return way
    return None
