"""HF Trainer: a callback that records, and what `gradtap.attach` does with a Trainer.

    trainer = Trainer(..., callbacks=[gradtap.hf.GradTapCallback("runs/mine.gradtap")])

Trainer's callbacks get neither the trainer nor the engine, see clipped gradients, and under DeepSpeed run after the
update. So the callback only says when; where the gradients are comes from the Accelerator that prepared the optimizer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from gradtap.capture.prepare import watch_prepare
from gradtap.capture.trainers import TrainerTarget
from gradtap.errors import AttachError
from gradtap.pending import PendingTap
from gradtap.tap import Tap

TAGS = ("loss", "learning_rate", "grad_norm", "epoch")
"""What of the Trainer's own log is kept with the step."""


class GradTapCallback(TrainerCallback):
    """Records every optimizer step of `Trainer.train()` into `store`. `options` are those of `gradtap.attach`.

    Make it before `train()`, on every rank, and give it to one Trainer. Steps are numbered as the Trainer numbers them,
    on a resume too. Closes with the training; `tap` is the recorder while it runs, for `tap.log(...)`.

    Raises `UsageError` for a wrong argument. `train()` raises, before its first step, what `attach` raises.
    """

    def __init__(self, store: str | os.PathLike[str], **options: Any) -> None:
        self.pending = PendingTap(store, options)
        self._trainer: Callable[[], Any] = _nobody
        self._seen: list[weakref.ref[Any]] = []
        seen = self._seen
        self._unwatch = watch_prepare(lambda accelerator: seen.append(weakref.ref(accelerator)))
        weakref.finalize(self, self._unwatch)

    @classmethod
    def of_trainer(cls, trainer: Any, store: str | os.PathLike[str], options: dict[str, Any]) -> GradTapCallback:
        """A callback that knows its trainer, and needs to watch nobody."""
        made = cls(store, **options)
        made._unwatch()
        made._trainer = weakref.ref(trainer)
        return made

    @property
    def tap(self) -> Tap | None:
        """The recorder while a training runs, else None."""
        return self.pending.tap

    def close(self) -> None:
        """Stop recording, now and for later trainings; for a training that has failed."""
        self._unwatch()
        self.pending.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is prepared and restored: attach."""
        self.begin(self._accelerator_of(kwargs.get("optimizer")), args, state)

    def begin(self, accelerator: Any, args: Any, state: Any) -> None:
        """Attach to what `accelerator` has prepared."""
        self._unwatch()
        target = TrainerTarget(
            target=accelerator,
            through="hf-trainer",
            accumulation=lambda: int(args.gradient_accumulation_steps),
            # By the window's real count, or by its number of tokens; DeepSpeed is told to leave it.
            divided=lambda: 1,
            engine_counts=getattr(accelerator, "deepspeed_engine_wrapped", None) is not None,
        )
        self.pending.begin(target, first_step=int(state.global_step) + 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the Trainer's loss, learning rate, norm and epoch with the step that they follow."""
        if self.tap is None or not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        self.tap.log(**{name: logs[name] for name in TAGS if logs.get(name) is not None})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training is over: close the session."""
        self.pending.end()

    def _accelerator_of(self, optimizer: Any) -> Any:
        trainer = self._trainer()
        if trainer is not None:
            return trainer.accelerator
        for reference in reversed(self._seen):
            accelerator = reference()
            if accelerator is not None and any(held is optimizer for held in accelerator._optimizers):
                # Kept for a second training by the same Trainer.
                self._seen[:] = [reference]
                return accelerator
        raise AttachError(
            "the Trainer's optimizer was prepared by no Accelerator that this callback has seen: make GradTapCallback "
            "before trainer.train() is called, and give it to that one Trainer; or use gradtap.attach(trainer, store)"
        )


def attach_trainer(trainer: Any, store: str | os.PathLike[str], options: dict[str, Any]) -> PendingTap:
    """Record the trainings of this Trainer: from `train()` on, or at once where one is under way.

    Raises `UsageError` at once; what else `attach` raises comes from `train()`.
    """
    callback = GradTapCallback.of_trainer(trainer, store, options)
    if getattr(trainer, "is_in_train", False) and trainer.accelerator._optimizers:
        callback.begin(trainer.accelerator, trainer.args, trainer.state)
    trainer.add_callback(callback)
    return callback.pending


def _nobody() -> None:
    return None


__all__ = ["GradTapCallback", "attach_trainer"]
