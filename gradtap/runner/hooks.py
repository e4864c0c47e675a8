"""Called when a training framework has been imported: patches the one method in which its training begins.

Light: gradtap's writing half is imported when a training begins, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gradtap.runner.orders import tell


def arm(module: ModuleType) -> None:
    """Have gradtap called when a training of this framework begins."""
    name = module.__name__
    tell("imported", module=name)
    if name == "accelerate.accelerator":
        _after(module.Accelerator, "prepare", _prepared)
    elif name == "transformers.trainer":
        _before(module.Trainer, "train", _hf_begins)
    else:
        _before(module.Trainer, "fit", _lightning_begins)


def _before(owner: Any, name: str, call: Callable[[Any], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call(self)
        return original(self, *args, **kwargs)

    setattr(owner, name, method)


def _after(owner: Any, name: str, call: Callable[[Any], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call(self)
        return result

    setattr(owner, name, method)


def _prepared(accelerator: Any) -> None:
    from gradtap.runner.attaching import RECORDING

    RECORDING.prepared(accelerator)


def _hf_begins(trainer: Any) -> None:
    from gradtap.runner.attaching import RECORDING

    RECORDING.hf_begins(trainer)


def _lightning_begins(trainer: Any) -> None:
    from gradtap.runner.attaching import RECORDING

    RECORDING.lightning_begins(trainer)
