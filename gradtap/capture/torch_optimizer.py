"""Any torch optimizer: the gradients when it is about to step, before clipping. What a rank holds is in `holdings`.

Clipping through Accelerate or FSDP1's own method is intercepted. Clipping that escapes is seen by the gradient's
version counter, unscaling by a GradScaler of the loop's own by who calls the step; both are labelled. With a closure
the gradient is that of its first evaluation within the step. What is refused is in `torch_checks`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradtap import flags
from gradtap.capture.accelerate import wraps_in_ddp
from gradtap.capture.amp import stepped_by_scaler
from gradtap.capture.changes import ChangeWatch, learning_rates
from gradtap.capture.clipping import ClipWatch
from gradtap.capture.dtensors import DTensorHolding, is_sharded
from gradtap.capture.first_window import FirstWindow
from gradtap.capture.holdings import FSDP1, Holding, WholeHolding, is_a
from gradtap.capture.names import named_params
from gradtap.capture.patches import PatchSet, check_free, claim, release
from gradtap.capture.scale import split_scale
from gradtap.capture.source import BoundaryListener
from gradtap.capture.torch_checks import check_model, check_optimizer, ddp_of
from gradtap.capture.touched import TouchTracker
from gradtap.capture.versions import GradVersions
from gradtap.errors import AttachError
from gradtap.types import EngineFacts, LocalGrad, StepFacts, StepOutcome, StepState


class TorchSource:
    """`GradSource` of a model and its torch optimizer, through Accelerate where an accelerator is given.

    Raises `UnsupportedError` for what `torch_checks` refuses, `AttachError` for nothing to record.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, accelerator: Any = None) -> None:
        check_optimizer(optimizer)
        check_free(optimizer)
        self._optimizer, self._accelerator, self._model = optimizer, accelerator, model
        optimized = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._holding = _holding(model, optimized, accelerator)
        self._named = self._holding.named
        self.params, self.ownership = self._holding.params, self._holding.ownership
        self._check_shared(optimized)
        self._stored = tuple(index for index, spec in enumerate(self.params) if spec.stored)
        self.facts = self._describe()
        self._patches = PatchSet()
        self._tracker = TouchTracker([named.param for named in self._named])
        held = list({id(self._named[index].param): self._named[index].param for index in self._stored}.values())
        self._versions = GradVersions(held)
        self._changes = ChangeWatch(self._named, self.params, lambda: self._optimizer.param_groups)
        self._clip = ClipWatch(held)
        self._ended_clip = self._clip.facts()
        self._listener: BoundaryListener | None = None
        self._depth = 0
        self._captured = self._begun = self._in_closure = self._unscaled = self._clipping = False
        self._made: int | None = None
        self._counted = 0
        self._first_window = FirstWindow()
        self._found_inf: Any = None
        self._state: StepState = "unknown"

    def install(self, listener: BoundaryListener) -> None:
        """Hook the optimizer and the parameters; patch the accelerator's `backward` and clipping where there is one."""
        claim(self._optimizer)
        self._listener = listener
        self._first_window.attached(any(self._named[index].param.grad is not None for index in self._stored))
        self._tracker.on_begin = self._backward_begins
        self._tracker.on_end = self._versions.record
        self._holding.watch(self._patches, self._tracker)
        self._patches.hook(self._optimizer.register_step_pre_hook(self._pre_step))
        self._patches.hook(self._optimizer.register_step_post_hook(self._post_step))
        self._patches.wrap(self._optimizer, "zero_grad", self._make_zero_grad)
        for module, params in self._holding.clippers():
            self._patches.wrap(module, "clip_grad_norm_", self._make_own_clip(params))
        if self._accelerator is not None:
            self._patches.wrap(self._accelerator, "backward", self._make_backward)
            self._patches.wrap(self._accelerator, "clip_grad_norm_", self._make_clip_norm)
            self._patches.wrap(self._accelerator, "clip_grad_value_", self._make_clip_value)

    def remove(self) -> None:
        """Take hooks and patches away."""
        self._patches.remove()
        release(self._optimizer)

    @property
    def window_open(self) -> bool:
        """Whether a backward has begun since the last update."""
        return self._tracker.open

    def next_step(self) -> int | None:
        """From the optimizer's own count (Adam and its like) at the first boundary, then counted; None without one."""
        made = self._made if self._begun else _steps_made(self._optimizer)
        return None if made is None else made + 1

    def gradients(self) -> list[LocalGrad]:
        """The pieces of this rank of each stored parameter's gradient; a tensor of None where there is no gradient."""
        return self._holding.gradients(self._tracker.touched.tolist())

    def step_facts(self, step: int) -> StepFacts:
        """Facts of the step under way. `touched`, and the flag UNTOUCHED with it, are this rank's view.

        Raises `UnsupportedError` where the model was cast after attach.
        """
        self._changes.look(step)
        tracker, loop = self._tracker, self._loop_accumulation()
        scale = self._gradient_scale()
        k, rest = split_scale(scale)
        # Only the accelerator's own backward divides the loss.
        divisor = float(loop) if tracker.announced else 1.0
        return StepFacts(
            step=step,
            time=time.time(),
            k=k,
            factor=rest * self._first_window.factor(divisor, tracker.micro_seen),
            loss_scale=scale,
            micro_seen=tracker.micro_seen,
            accum_engine=loop,
            accum_loop=loop,
            divisor=divisor,
            clip_limit=self._clip.limit,
            learning_rates=learning_rates(self._optimizer.param_groups, self.facts.groups),
            touched=tracker.touched.copy(),
            flags=self._flags() | self._first_window.flags,
        )

    def outcome(self) -> StepOutcome:
        """State of the last step, norm and coefficient of an intercepted clip; reading them may wait for a device."""
        norm, coefficient = self._ended_clip
        if self._found_inf is not None and float(self._found_inf) > 0:
            return StepOutcome(state="skipped-overflow")
        return StepOutcome(
            state=self._state,
            norm_engine=math.nan if norm is None else float(norm),
            clip_coef=math.nan if coefficient is None else coefficient(),
        )

    def boundary(self) -> None:
        """The loop says that the window's gradients are final, where neither step nor clip tells in time: Lightning."""
        self._boundary()

    def clipped(self, params: Sequence[Any], limit: float, clip: Callable[[], Any]) -> Any:
        """Let `clip` (by L2 norm; returns it) clip `params`, and keep what it does: for a trainer that clips itself."""
        return self._clipped(params, limit, 2.0, clip)

    def _boundary(self) -> None:
        if self._captured or self._listener is None:
            return
        counted = _steps_made(self._optimizer)
        if not self._begun:
            self._made, self._begun = counted, True
        elif counted is not None and counted < self._counted:
            # Its count never falls by itself: a checkpoint was loaded.
            self._made = counted
        self._counted = counted or 0
        self._captured = True
        self._listener.before_step()

    def _end(self, state: StepState, found_inf: Any = None) -> None:
        self._state, self._captured, self._found_inf = state, False, found_inf
        self._ended_clip = self._clip.facts()
        if self._made is not None:
            self._made += 1
        if self._listener is not None:
            self._listener.after_step()
        self._first_window.ended()
        self._tracker.reset()
        self._versions.reset()
        self._clip.reset()

    def _backward_begins(self) -> None:
        if self._in_closure:
            return
        self._depth = 0
        if self._captured:
            # Clipped, captured, and then never stepped: an update that the loop skipped. It counts as a step.
            self._end("unknown")
        elif not self._holding.replaces_grads and self._versions.dropped():
            # The model was zeroed, as where another model's loss had reached it: that is not of this window.
            self._drop()

    def _pre_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        # A subclass whose step calls its parent's comes here twice for one step, and twice to `_post_step`.
        self._depth += 1
        # Wrapped where it stands: an optimizer may take more arguments, or call its closure something else.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._after_first(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._after_first(args[1]), *args[2:]), kwargs
        self._unscaled = getattr(optimizer, "grad_scale", None) is None and stepped_by_scaler()
        self._boundary()
        return None

    def _post_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._captured:
            self._end("applied", getattr(optimizer, "found_inf", None))

    def _after_first(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self._in_closure = True
            try:
                result = closure()
            finally:
                self._in_closure = False
            self._boundary()
            return result

        return evaluate

    def _make_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._tracker.begin()
            try:
                return original(*args, **kwargs)
            finally:
                self._tracker.end()

        return backward

    def _make_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if not self._captured:
                self._drop()
            return original(*args, **kwargs)

        return zero_grad

    def _drop(self) -> None:
        """The gradients are gone before a step took them: the window begins anew."""
        self._first_window.ended()
        self._tracker.restart()
        self._versions.reset()

    def _make_clip_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            return self._clipped(held, max_norm, norm_type, lambda: original(held, max_norm, norm_type=norm_type))

        return clip_grad_norm_

    def _make_own_clip(self, params: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def clip_grad_norm_(max_norm: float, norm_type: float = 2.0) -> Any:
                return self._clipped(params, max_norm, norm_type, lambda: original(max_norm, norm_type))

            return clip_grad_norm_

        return make

    def _clipped(self, held: Sequence[Any], limit: float, norm_type: float, clip: Callable[[], Any]) -> Any:
        if self._clipping or not self._clip.concerns(held):
            # Accelerate clips FSDP1 by the model's own method: one call. Or another model of the loop is clipped.
            return clip()
        self._clipping = True
        try:
            self._clip.begin(held, float(limit), float(norm_type))
            self._before_clip()
            norm = clip()
            self._clip.end(norm)
        finally:
            self._clipping = False
        return norm

    def _make_clip_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_value_(parameters: Any, clip_value: float) -> Any:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if self._clip.concerns(held):
                self._clip.by_value()
                self._before_clip()
            return original(held, clip_value)

        return clip_grad_value_

    def _before_clip(self) -> None:
        if self._accelerator is None or self._accelerator.sync_gradients:
            self._boundary()
        else:
            # Clipped in the middle of a window: the sum that follows holds a clipped part.
            self._versions.disturbed = True

    def _flags(self) -> int:
        found = self._versions.flags()
        if self._unscaled:
            found |= flags.MODIFIED_AFTER_BACKWARD
        if any(self._tracker.touched[index] < 0 for index in self._stored):
            found |= flags.UNTOUCHED
        return found

    def _gradient_scale(self) -> float:
        # Set during the call by a GradScaler that leaves unscaling to a fused optimizer.
        scale = getattr(self._optimizer, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _loop_accumulation(self) -> int:
        return 1 if self._accelerator is None else int(self._accelerator.gradient_accumulation_steps)

    def _check_shared(self, optimized: set[int]) -> None:
        if any(spec.stored for spec in self.params):
            return
        if optimized and not optimized & {id(named.param) for named in self._named}:
            raise AttachError(
                "the optimizer holds none of this model's parameters; give the model and the optimizer that trains it"
            )
        raise AttachError("no parameter of the model is trained by the optimizer: there is no gradient to record")

    def _describe(self) -> EngineFacts:
        many = dist.is_available() and dist.is_initialized()
        return EngineFacts(
            name=self._holding.engine,
            rank=dist.get_rank() if many else 0,
            world=dist.get_world_size() if many else 1,
            groups=len(self._optimizer.param_groups),
            settings={
                "through": "native" if self._accelerator is None else "accelerate",
                "optimizer": type(self._optimizer).__name__,
                "gradient_accumulation_steps": self._loop_accumulation(),
                **self._holding.settings,
            },
        )


def _holding(model: torch.nn.Module, optimized: set[int], accelerator: Any) -> Holding:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if any(is_a(module, FSDP1) for module in model.modules()):
        from gradtap.capture.fsdp1 import Fsdp1Holding

        return Fsdp1Holding(model, optimized, rank)
    if is_sharded(model):
        return DTensorHolding(model, optimized, rank)
    named, ddp = named_params(model), ddp_of(model)
    # Accelerate keeps the model that it was given, and hands DDP's wrapper to the loop only.
    replicated = ddp is not None or (accelerator is not None and wraps_in_ddp(accelerator))
    check_model(model, named, replicated=replicated)
    return WholeHolding(named, optimized, _ranks(ddp, replicated), "ddp" if replicated else "torch")


def _ranks(ddp: Any, replicated: bool) -> tuple[int, ...]:
    if ddp is not None:
        return tuple(dist.get_process_group_ranks(ddp.process_group))
    return tuple(range(dist.get_world_size())) if replicated else (0,)


def _steps_made(optimizer: torch.optim.Optimizer) -> int | None:
    """What the optimizer counts for its first parameter, as Adam and its like do; None where it does not count."""
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, torch.Tensor) and count.numel() == 1 and count.device.type == "cpu":
            count = count.item()
        if isinstance(count, int | float) and not isinstance(count, bool):
            return int(count)
    return None
