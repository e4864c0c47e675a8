"""Inside a training process under `gradtap run`: what is recorded, when, and into which store.

Accelerate: attached at the first forward pass in training, when everything has been prepared and restored; one prepared
model goes into the store itself, several into folders of it, by the class of each model. HF Trainer and Lightning:
through their callbacks. What comes later than the first training is said, and not recorded.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import Any

import torch

from gradtap.capture.detect import PreparedPair
from gradtap.errors import GradtapError, UnsupportedError
from gradtap.runner.orders import orders_here, tell
from gradtap.tap import attach
from gradtap.voice import Voice

NAMED_HERE = "gradtap run"


class Recording:
    """The one recording of this process."""

    def __init__(self) -> None:
        self._orders = orders_here()
        self._voice = Voice(raise_errors=False)
        # In the order of their first prepare, which is the same on every rank: the ranks meet for each store.
        self._accelerators: list[weakref.ref[Any]] = []
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: list[Any] = []
        self._hooked: set[int] = set()
        self._known: set[int] = set()
        self._begun = False

    def prepared(self, accelerator: Any) -> None:
        """An Accelerator has prepared something: wait for the first forward pass of its models."""
        if self._orders is None or self._of_trainer(accelerator):
            return
        if not any(held() is accelerator for held in self._accelerators):
            self._accelerators.append(weakref.ref(accelerator))
        if self._begun:
            self._say_late(accelerator)
            return
        if not accelerator._optimizers:
            return
        for model in accelerator._models:
            tell("prepared", model=type(_unwrapped(model)).__name__)
            if isinstance(model, getattr(torch._dynamo, "OptimizedModule", ())) or _is_compiled(accelerator):
                # A hook within a compiled model would be compiled too.
                self._attach_all()
                return
            if id(model) not in self._hooked:
                self._hooked.add(id(model))
                self._waiting.append(model.register_forward_pre_hook(self._forward))

    def hf_begins(self, trainer: Any) -> None:
        """`Trainer.train` is called."""
        if self._orders is None or trainer in self._trainers:
            return
        self._trainers.add(trainer)
        if self._taken("a second training"):
            return
        from gradtap.hf import GradTapCallback

        with _Telling(type(trainer.model).__name__):
            callback = GradTapCallback.of_trainer(trainer, self._orders.store, self._orders.options)
        trainer.callback_handler.callbacks.insert(0, self._told(callback, "on_train_begin"))

    def lightning_begins(self, trainer: Any) -> None:
        """`Trainer.fit` is called."""
        if self._orders is None or trainer in self._trainers:
            return
        self._trainers.add(trainer)
        if self._taken("a second training"):
            return
        from gradtap.lightning import GradTapCallback

        with _Telling("Lightning"):
            callback = GradTapCallback(self._orders.store, **self._orders.options)
        trainer.callbacks.insert(0, self._told(callback, "on_train_start"))

    def _told(self, callback: Any, name: str) -> Any:
        """The callback, telling the parent what came of its attaching."""
        original = getattr(callback, name)

        def begin(*args: Any, **kwargs: Any) -> None:
            with _Telling("the trainer's model"):
                original(*args, **kwargs)
            tell("attached", store=callback.pending.path)

        setattr(callback, name, begin)
        return callback

    def _taken(self, what: str) -> bool:
        if not self._begun:
            self._begun = True
            return False
        self._late(what)
        return True

    def _of_trainer(self, accelerator: Any) -> bool:
        return any(getattr(trainer, "accelerator", None) is accelerator for trainer in self._trainers)

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._attach_all()

    def _attach_all(self) -> None:
        while self._waiting:
            self._waiting.pop().remove()
        if self._begun or self._orders is None:
            return
        self._begun = True
        pairs: list[tuple[str, Any]] = []
        for accelerator in filter(None, (held() for held in self._accelerators)):
            self._known.update(id(optimizer) for optimizer in accelerator._optimizers)
            if accelerator._optimizers and not self._of_trainer(accelerator):
                with _Telling("the prepared models"):
                    pairs += _pairs(accelerator)
        names = _distinct([name for name, _ in pairs])
        for name, (_, target) in zip(names, pairs, strict=True):
            store = self._orders.store if len(pairs) == 1 else os.path.join(self._orders.store, name)
            with _Telling(name):
                attach(target, store, **self._orders.options)
            tell("attached", store=store, model=name)

    def _say_late(self, accelerator: Any) -> None:
        fresh = [optimizer for optimizer in accelerator._optimizers if id(optimizer) not in self._known]
        self._known.update(id(optimizer) for optimizer in fresh)
        if fresh:
            self._late(f"{len(fresh)} more optimizer{'s' if len(fresh) > 1 else ''} prepared")

    def _late(self, what: str) -> None:
        reason = f"{what} after recording had begun is not recorded: {NAMED_HERE} tells apart what is prepared before "
        reason += "the first training; use gradtap.attach in the script for the others"
        tell("late", error=reason)
        self._voice.report(reason)


class _Telling:
    """Tells the parent of an error of gradtap that passes."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GradtapError):
            tell("refused", model=self._model, error=str(error), kind=type(error).__name__)


def _pairs(accelerator: Any) -> list[tuple[str, Any]]:
    """(class of the model, what to attach to) for each optimizer of an Accelerator.

    Raises `UnsupportedError` for an optimizer that trains several prepared models, or none.
    """
    models, optimizers = accelerator._models, accelerator._optimizers
    if getattr(accelerator, "deepspeed_engine_wrapped", None) is not None or len(models) == len(optimizers) == 1:
        return [(type(_unwrapped(models[0])).__name__, accelerator)]
    found: list[tuple[str, Any]] = []
    for optimizer in optimizers:
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        mine = [model for model in models if trained & {id(param) for param in model.parameters()}]
        names = [type(_unwrapped(model)).__name__ for model in mine]
        if len(mine) != 1:
            whose = f"{len(mine)} prepared models ({', '.join(names)})" if mine else "no prepared model"
            raise UnsupportedError(
                f"an optimizer ({type(optimizer.optimizer).__name__}) trains {whose}; {NAMED_HERE} records an "
                "optimizer with one model: prepare one module that holds them all, or call gradtap.attach in the script"
            )
        found.append((names[0], PreparedPair(accelerator=accelerator, model=mine[0], optimizer=optimizer)))
    return found


def _distinct(names: list[str]) -> list[str]:
    """Each name once: a second Block becomes Block-2."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found


def _unwrapped(model: Any) -> Any:
    while type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine", "OptimizedModule"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def _is_compiled(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    return plugin is not None and str(getattr(plugin.backend, "value", plugin.backend)).upper() != "NO"


RECORDING = Recording()

__all__ = ["RECORDING", "Recording"]
