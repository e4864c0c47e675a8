"""Lightning: a callback that records, and what `gradtap.attach` does with a Lightning Trainer.

    trainer = Trainer(..., callbacks=[gradtap.lightning.GradTapCallback("runs/mine.gradtap")])

For both names of the package, `lightning` and `pytorch_lightning`. Without DeepSpeed the gradients are taken at
`on_before_optimizer_step`: after the closure's backward, before Lightning clips. With DeepSpeedStrategy the engine's
own step boundary is used, which knows which micro-batch is the last.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from gradtap.capture.patches import PatchSet
from gradtap.capture.trainers import Bell, TrainerTarget
from gradtap.errors import AttachError, UnsupportedError
from gradtap.pending import PendingTap
from gradtap.tap import Tap

HOMES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[type, ...]:
    """Lightning's Callback of each home that is loaded; of the first that is installed where none is."""
    homes = [home for home in HOMES if home in sys.modules]
    if not homes:
        homes = [home for home in HOMES if importlib.util.find_spec(home.partition(".")[0]) is not None][:1]
    if not homes:
        raise ModuleNotFoundError("gradtap.lightning needs pytorch_lightning or lightning", name="pytorch_lightning")
    return tuple(importlib.import_module(f"{home}.callbacks").Callback for home in homes)


class _Recording:
    """The hooks, for either home."""

    def __init__(self, store: str | os.PathLike[str], *, optimizer: int | None = None, **options: Any) -> None:
        self.pending = PendingTap(store, options)
        self._index = optimizer
        self._bell: Bell | None = None
        self._optimizer: Any = None
        self._patches = PatchSet()

    @property
    def tap(self) -> Tap | None:
        """The recorder while a training runs, else None."""
        return self.pending.tap

    @property
    def state_key(self) -> str:
        """Tells two callbacks of one Trainer apart."""
        return f"GradTapCallback{{path={self.pending.path}}}"

    def close(self) -> None:
        """Stop recording, now and for later trainings."""
        self.pending.close()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is set up and restored: attach."""
        # Asked each time: Lightning's scheduler of accumulation changes it between epochs.
        accumulation = _accumulation(trainer, pl_module)
        engine = _engine_of(trainer)
        target = engine if engine is not None else self._pair(trainer)
        told = TrainerTarget(
            target=target,
            through="lightning",
            accumulation=accumulation,
            divided=accumulation,
            engine_counts=engine is not None,
            limit=lambda: _clip_limit(trainer),
        )
        self._bell, self._optimizer = told.bell, None if engine is not None else target[1]
        if engine is None:
            self._watch_clip(trainer.precision_plugin)
        # An engine counts itself; Lightning's count is that of all optimizers together.
        counted = engine is None and len(trainer.strategy.optimizers) == 1
        self.pending.begin(told, first_step=int(trainer.global_step) + 1 if counted else None)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are final and not clipped. (With DeepSpeed, which asks at every micro-batch, the engine tells.)"""
        if self._bell is not None and self._optimizer is not None and _raw(optimizer) is self._optimizer:
            self._bell.ring()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The training is over: close the session."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training has failed, or was interrupted: close the session, without a long wait for other ranks."""
        self._end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Whatever ended the training: nothing stays attached."""
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        self._bell = self._optimizer = None
        self._patches.remove()
        self.pending.end(error)

    def _watch_clip(self, plugin: Any) -> None:
        """Have Lightning's clipping by norm say its norm. A plugin that clips in its own way is left alone."""
        self._patches = PatchSet()
        if type(plugin).clip_grad_by_norm.__qualname__ != "Precision.clip_grad_by_norm":
            return

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
                if self._bell is None or _raw(optimizer) is not self._optimizer:
                    original(optimizer, clip_val)
                    return
                params = list(plugin.main_params(optimizer))
                self._bell.clip(params, float(clip_val), lambda: nn.utils.clip_grad_norm_(params, clip_val))

            return clip_grad_by_norm

        self._patches.wrap(plugin, "clip_grad_by_norm", make)

    def _pair(self, trainer: Any) -> tuple[Any, Any]:
        optimizers = [_raw(optimizer) for optimizer in trainer.strategy.optimizers]
        if not optimizers:
            raise AttachError("the LightningModule has configured no optimizer: there is no gradient to record")
        if self._index is None and len(optimizers) > 1:
            raise UnsupportedError(
                f"this training has {len(optimizers)} optimizers; a run records one: give GradTapCallback one with "
                "optimizer=0 (1, ...), and add a callback with a store of its own for each of the others"
            )
        index = self._index or 0
        if not 0 <= index < len(optimizers):
            raise AttachError(f"optimizer is {index}; allowed are 0 to {len(optimizers) - 1}")
        return trainer.strategy.model, optimizers[index]


class GradTapCallback(_Recording, *_bases()):  # type: ignore[misc]
    """Records every optimizer step of `Trainer.fit()` into `store`. `options` are those of `gradtap.attach`.

    optimizer: which of several optimizers to record, from 0; a training with one needs none.
    Steps are numbered as Lightning numbers them (with DeepSpeed: as the engine does), on a resume too. Closes with the
    training, also where it fails; `tap` is the recorder while it runs, for `tap.log(...)`.

    Raises `UsageError` for a wrong argument. `fit()` raises, before its first step, what `attach` raises.
    """


def attach_trainer(trainer: Any, store: str | os.PathLike[str], options: dict[str, Any]) -> PendingTap:
    """Record the trainings of this Trainer, from `fit()` on.

    Raises `AttachError` for a fit that is under way, `UsageError` for a wrong argument; what else `attach` raises comes
    from `fit()`.
    """
    if trainer.training and trainer.state.status == "running":
        raise AttachError(
            "attach got a Lightning Trainer whose fit is under way; call it before trainer.fit(...), or give the "
            "Trainer callbacks=[gradtap.lightning.GradTapCallback(store)]"
        )
    callback = GradTapCallback(store, **options)
    # First, so that gradients are taken before another callback changes them.
    trainer.callbacks.insert(0, callback)
    return callback.pending


def _accumulation(trainer: Any, pl_module: Any) -> Callable[[], int]:
    """What Lightning divides each loss by: its accumulation, or 1 where the module optimizes by hand."""
    return lambda: int(trainer.accumulate_grad_batches) if pl_module.automatic_optimization else 1


def _clip_limit(trainer: Any) -> float:
    how, limit = trainer.gradient_clip_algorithm, trainer.gradient_clip_val
    by_norm = how is None or getattr(how, "value", how) == "norm"
    return float(limit) if by_norm and limit else math.nan


def _engine_of(trainer: Any) -> Any:
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    cls = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    return engine if isinstance(cls, type) and isinstance(engine, cls) else None


def _raw(optimizer: Any) -> Any:
    """The torch optimizer within Lightning's wrapper."""
    return optimizer.optimizer if type(optimizer).__name__ == "LightningOptimizer" else optimizer


__all__ = ["GradTapCallback", "attach_trainer"]
