"""A DeepSpeed engine of any ZeRO stage: reads the averaged gradients at the engine's own step boundary.

The values are those the engine holds when it is about to step: mean over micro-batches and ranks, times the loss scale
where the loss was scaled, not clipped. Where they lie is in `zero_buffers`; what is refused is in `zero_checks`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradtap import flags
from gradtap.capture.changes import ChangeWatch, learning_rates
from gradtap.capture.first_window import FirstWindow
from gradtap.capture.names import NamedParam, dtype_name, named_params
from gradtap.capture.patches import PatchSet, check_free, claim, release
from gradtap.capture.scale import clip_coefficient, split_scale
from gradtap.capture.source import BoundaryListener
from gradtap.capture.touched import TouchTracker
from gradtap.capture.zero_buffers import find_buffers
from gradtap.capture.zero_checks import check_engine, check_sparse
from gradtap.errors import AttachError
from gradtap.types import EngineFacts, LocalGrad, ParamSpec, StepFacts, StepOutcome, StepState


class DeepSpeedZeroSource:
    """`GradSource` of a DeepSpeed engine.

    `accum_loop` says how many micro-batches the training loop means to accumulate (Accelerate knows); None: as the
    engine does. Raises `UnsupportedError` for what `zero_checks` refuses, `AttachError` for nothing to record.
    """

    def __init__(self, engine: Any, *, accum_loop: Callable[[], int] | None = None, through: str = "native") -> None:
        check_engine(engine)
        check_sparse(engine.module)
        check_free(engine)
        self._engine = engine
        self._zero = engine.optimizer
        self._accum_loop = accum_loop
        self._patches = PatchSet()
        self._named = named_params(engine.module)
        self._buffers = find_buffers(engine)
        self.params = tuple(self._spec(named) for named in self._named)
        if not any(spec.stored for spec in self.params):
            raise AttachError("no parameter of the model is trained by the optimizer: there is no gradient to record")
        self.ownership = tuple(
            self._buffers.own(named.param) if spec.stored else None
            for named, spec in zip(self._named, self.params, strict=True)
        )
        self._stored = tuple(index for index, spec in enumerate(self.params) if spec.stored)
        self.facts = self._describe(through)
        self._tracker = TouchTracker([named.param for named in self._named])
        self._changes = ChangeWatch(self._named, self.params, lambda: self._zero.param_groups)
        # What an earlier life of this engine left in its buffers is not known.
        self._tracker.ever[:] = engine.global_steps > 0
        self._scaled_by_gas = True
        self._applied = False
        self._overflow = False
        self._norm: Any = None
        self._scales = (1.0, 1.0)
        self._limit = math.nan
        self._first_window = FirstWindow()

    def install(self, listener: BoundaryListener) -> None:
        """Patch this engine's `_take_model_step` and `backward`, and hook its parameters."""
        claim(self._engine)
        self._first_window.attached(self._buffers.under_way())
        self._tracker.on_end = self._mark_filled
        self._tracker.install(self._patches)
        self._patches.wrap(self._engine, "backward", self._make_backward)
        self._patches.wrap(self._engine, "_take_model_step", lambda step: self._make_step(step, listener))

    def remove(self) -> None:
        """Take patches and hooks away."""
        self._patches.remove()
        release(self._engine)

    @property
    def window_open(self) -> bool:
        """Whether a backward has begun since the last update."""
        return self._tracker.open

    def next_step(self) -> int | None:
        """DeepSpeed counts its steps itself, skipped ones too, and restores the count from a checkpoint."""
        return int(self._engine.global_steps) + 1

    def gradients(self) -> list[LocalGrad]:
        """Views of what this rank holds, in the buffer's own dtype."""
        self._buffers.settle()
        return [
            LocalGrad(param=param, start=start, stop=stop, tensor=values)
            for param in self._stored
            for start, stop, values in self._buffers.pieces(self._named[param].param)
        ]

    def step_facts(self, step: int) -> StepFacts:
        """Facts of the step under way; the loss scale is read before the engine may change it.

        `touched`, and the flags UNTOUCHED and LATE_TOUCH with it, are this rank's view: another rank's backward may
        have reached a parameter that this one's did not. Raises `UnsupportedError` where the model was cast after
        attach.
        """
        self._changes.look(step)
        engine, tracker = self._engine, self._tracker
        scale = self._scale()
        k, rest = split_scale(scale if self._buffers.loss_scaled else 1.0)
        accumulation = int(engine.gradient_accumulation_steps())
        divisor = float(accumulation) if self._scaled_by_gas else 1.0
        self._limit = float(engine.gradient_clipping())
        return StepFacts(
            step=step,
            time=time.time(),
            k=k,
            factor=rest * self._first_window.factor(divisor, tracker.micro_seen),
            loss_scale=scale,
            micro_seen=tracker.micro_seen,
            accum_engine=accumulation,
            accum_loop=self._accum_loop() if self._accum_loop else accumulation,
            divisor=divisor,
            clip_limit=self._limit,
            learning_rates=learning_rates(self._zero.param_groups, self.facts.groups),
            touched=tracker.touched.copy(),
            flags=self._flags() | self._first_window.flags,
        )

    def outcome(self) -> StepOutcome:
        """State, unscaled global norm and clip coefficient of the last step; reading the norm may wait for a device."""
        state: StepState = "applied" if self._applied and not self._overflow else "skipped-overflow"
        norms = self._buffers.norms(math.nan if self._norm is None else float(self._norm), *self._scales)
        coefficient = 1.0 if self._limit == 0 else clip_coefficient(norms.clipped, self._limit)
        return StepOutcome(state=state, norm_engine=norms.true, clip_coef=math.nan if self._overflow else coefficient)

    def _make_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._scaled_by_gas = bool(kwargs.get("scale_wrt_gas", args[2] if len(args) > 2 else True))
            self._tracker.begin()
            try:
                return original(*args, **kwargs)
            finally:
                self._tracker.end()

        return backward

    def _make_step(self, original: Callable[..., Any], listener: BoundaryListener) -> Callable[..., Any]:
        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            listener.before_step()
            before = self._scale()
            result = original(*args, **kwargs)
            self._scales = (before, self._scale())
            # Read now: the engine resets `_step_applied` before the next boundary calls here again.
            self._applied = bool(self._engine.was_step_applied())
            self._overflow = bool(getattr(self._zero, "overflow", False))
            self._norm = self._engine.get_global_grad_norm()
            listener.after_step()
            self._first_window.ended()
            self._tracker.reset()
            return result

        return take_model_step

    def _scale(self) -> float:
        return float(getattr(self._zero, "loss_scale", 1.0))

    def _mark_filled(self) -> None:
        """The engine has filled in zeros for what the backward that has just ended did not reach."""
        tracker = self._tracker
        for index in self._stored:
            if tracker.touched[index] < 0 and self._buffers.reached(self._named[index].param):
                tracker.touched[index] = max(tracker.micro_seen - 1, 0)

    def _flags(self) -> int:
        tracker, found = self._tracker, 0
        if any(tracker.touched[index] < 0 for index in self._stored):
            found |= flags.UNTOUCHED
        for index in self._stored:
            if tracker.touched[index] > 0 and tracker.ever[index] and self._buffers.adds_old(self._named[index].param):
                found |= flags.LATE_TOUCH
        return found

    def _spec(self, named: NamedParam) -> ParamSpec:
        param, held = named.param, self._buffers.holds(named.param)
        shape = self._buffers.shape(param)
        trained = held or math.prod(shape) == 0
        return ParamSpec(
            name=named.name,
            shape=shape,
            dtype=dtype_name(self._buffers.dtype(param) if held else param.dtype),
            status="frozen" if not param.requires_grad else "captured" if trained else "unoptimized",
            aliases=named.aliases,
        )

    def _describe(self, through: str) -> EngineFacts:
        zero, engine = self._zero, self._engine
        return EngineFacts(
            name=f"deepspeed-zero{int(engine.zero_optimization_stage())}",
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            groups=len(zero.param_groups),
            settings={
                "through": through,
                **self._buffers.settings(),
                "loss_scaled": self._buffers.loss_scaled,
                "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
                "gradient_clipping": float(engine.gradient_clipping()),
                "wrapper": type(zero).__name__,
                "optimizer": type(engine.basic_optimizer).__name__,
            },
        )
