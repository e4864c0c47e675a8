"""ZeRO-1 and ZeRO-2 of DeepSpeed: reads this rank's partition at the engine's own step boundary.

The values are those the engine holds when it is about to step: mean over micro-batches and ranks, times the loss scale,
not clipped. Which configurations are refused is in `zero_checks`; the arithmetic of ownership is in `zero_layout`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradtap import flags
from gradtap.capture import zero_layout
from gradtap.capture.changes import ChangeWatch, learning_rates
from gradtap.capture.first_window import FirstWindow
from gradtap.capture.names import NamedParam, dtype_name, named_params
from gradtap.capture.patches import PatchSet, check_free, claim, release
from gradtap.capture.scale import clip_coefficient, split_scale
from gradtap.capture.source import BoundaryListener
from gradtap.capture.touched import TouchTracker
from gradtap.capture.zero_checks import check_engine, check_sparse
from gradtap.errors import AttachError, UnsupportedError
from gradtap.types import EngineFacts, LocalGrad, Ownership, ParamSpec, StepFacts, StepOutcome, StepState


class DeepSpeedZeroSource:
    """`GradSource` of a DeepSpeed engine under ZeRO stage 1 or 2.

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
        self._layout = _layout(self._zero)
        self.params = tuple(self._spec(named) for named in self._named)
        if not any(spec.stored for spec in self.params):
            raise AttachError("no parameter of the model is trained by the optimizer: there is no gradient to record")
        self.ownership = tuple(
            self._own(named) if spec.stored else None for named, spec in zip(self._named, self.params, strict=True)
        )
        self.facts = self._describe(through)
        self._tracker = TouchTracker([named.param for named in self._named])
        self._changes = ChangeWatch(self._named, self.params, lambda: self._zero.param_groups)
        # What an earlier life of this engine left in its buffers is not known.
        self._tracker.ever[:] = engine.global_steps > 0
        self._scaled_by_gas = True
        self._applied = False
        self._overflow = False
        self._norm: Any = None
        self._limit = math.nan
        self._first_window = FirstWindow()

    def install(self, listener: BoundaryListener) -> None:
        """Patch this engine's `_take_model_step` and `backward`, and hook its parameters."""
        claim(self._engine)
        self._first_window.attached(self._window_under_way())
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
        """Views of this rank's partition: float32, or the dtype in which the engine accumulates."""
        self._settle()
        found = []
        for param, (named, spec) in enumerate(zip(self._named, self.params, strict=True)):
            if spec.stored:
                found.extend(self._pieces(param, self._layout[id(named.param)]))
        return found

    def step_facts(self, step: int) -> StepFacts:
        """Facts of the step under way; the loss scale is read before the engine may change it.

        `touched`, and the flags UNTOUCHED and LATE_TOUCH with it, are this rank's view: another rank's backward may
        have reached a parameter that this one's did not. Raises `UnsupportedError` where the model was cast after
        attach.
        """
        self._changes.look(step)
        engine, tracker = self._engine, self._tracker
        scale = float(getattr(self._zero, "loss_scale", 1.0))
        k, rest = split_scale(scale)
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
        norm = math.nan if self._norm is None else float(self._norm)
        coefficient = 1.0 if self._limit == 0 else clip_coefficient(norm, self._limit)
        return StepOutcome(state=state, norm_engine=norm, clip_coef=math.nan if self._overflow else coefficient)

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
            result = original(*args, **kwargs)
            # Read now: the engine resets `_step_applied` before the next boundary calls here again.
            self._applied = bool(self._engine.was_step_applied())
            self._overflow = bool(getattr(self._zero, "overflow", False))
            self._norm = self._engine.get_global_grad_norm()
            listener.after_step()
            self._first_window.ended()
            self._tracker.reset()
            return result

        return take_model_step

    def _window_under_way(self) -> bool:
        """Whether micro-batches of the window ran already; `engine.micro_steps` counts windows under Accelerate."""
        return int(getattr(self._zero, "micro_step_id", -1)) >= 0

    def _settle(self) -> None:
        if not self._zero.cpu_offload:
            return
        wait = getattr(self._zero, "_wait_for_offload_copies", None)
        if callable(wait):
            wait()
        elif torch.cuda.is_available():
            torch.cuda.synchronize()

    def _pieces(self, param: int, place: _Place) -> list[LocalGrad]:
        start, stop, position = zero_layout.place_in_partition(
            place.offset, place.numel, place.partition, place.members.index(place.rank)
        )
        if start == stop:
            return []
        fragments = self._fragments(place.group)
        sizes = [fragment.numel() for fragment in fragments]
        found, at = [], start
        for index, inside, count in zero_layout.cover(sizes, position, stop - start):
            values = fragments[index].detach().reshape(-1)[inside : inside + count]
            found.append(LocalGrad(param=param, start=at, stop=at + count, tensor=values))
            at += count
        return found

    def _fragments(self, group: int) -> Sequence[torch.Tensor]:
        if self._zero.cpu_offload:
            return (self._zero.single_partition_of_fp32_groups[group].grad,)
        held = self._zero.averaged_gradients.get(group)
        if held is None:
            raise UnsupportedError(
                f"DeepSpeed holds no averaged gradients for parameter group {group} at its step boundary; "
                "no backward reached this step, or this version keeps them elsewhere"
            )
        flat = getattr(held, "flat_partition", None)
        return (flat,) if flat is not None else tuple(held)

    def _flags(self) -> int:
        tracker = self._tracker
        stored = [index for index, spec in enumerate(self.params) if spec.stored]
        found = 0
        if any(tracker.touched[index] < 0 for index in stored):
            found |= flags.UNTOUCHED
        # This engine adds what the last window left in its host buffer to a parameter that comes in late.
        if self._zero.cpu_offload and self._zero.partition_gradients:
            for index in stored:
                place = self._layout[id(self._named[index].param)]
                if tracker.touched[index] > 0 and tracker.ever[index] and not self._compact(place.group):
                    found |= flags.LATE_TOUCH
        return found

    def _compact(self, group: int) -> bool:
        compact = getattr(self._zero, "_use_compact_grad_partition_buffer", None)
        return bool(compact(group)) if callable(compact) else False

    def _spec(self, named: NamedParam) -> ParamSpec:
        place = self._layout.get(id(named.param))
        dtype = named.param.dtype if place is None else self._buffer_dtype(place.group)
        trained = place is not None or named.param.numel() == 0
        status = "frozen" if not named.param.requires_grad else "captured" if trained else "unoptimized"
        return ParamSpec(
            name=named.name,
            shape=tuple(named.param.shape),
            dtype=dtype_name(dtype),
            status=status,  # type: ignore[arg-type]
            aliases=named.aliases,
        )

    def _buffer_dtype(self, group: int) -> torch.dtype:
        zero = self._zero
        if zero.cpu_offload:
            return zero.single_partition_of_fp32_groups[group].grad.dtype  # type: ignore[no-any-return]
        return torch.float32 if self._compact(group) else zero.dtype

    def _own(self, named: NamedParam) -> Ownership:
        place = self._layout[id(named.param)]
        bounds = zero_layout.owner_bounds(place.offset, place.numel, place.partition, len(place.members))
        return Ownership(kind="cuts", ranks=place.members, bounds=bounds)

    def _describe(self, through: str) -> EngineFacts:
        zero, engine = self._zero, self._engine
        return EngineFacts(
            name=f"deepspeed-zero{2 if zero.partition_gradients else 1}",
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            groups=len(zero.param_groups),
            settings={
                "through": through,
                "model_dtype": dtype_name(zero.dtype),
                "accumulation_dtype": dtype_name(getattr(zero, "gradient_accumulation_dtype", zero.dtype)),
                "cpu_offload": bool(zero.cpu_offload),
                "round_robin_gradients": bool(getattr(zero, "round_robin_gradients", False)),
                "parameter_alignment": bool(getattr(zero, "parameter_alignment", False)),
                "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
                "gradient_clipping": float(engine.gradient_clipping()),
                "optimizer": type(zero.optimizer).__name__,
            },
        )


class _Place:
    """Where one parameter lies in its group's flat buffer, and who shares that buffer."""

    __slots__ = ("group", "members", "numel", "offset", "partition", "rank")

    def __init__(self, group: int, offset: int, numel: int, partition: int, members: tuple[int, ...]) -> None:
        self.group, self.offset, self.numel = group, offset, numel
        self.partition, self.members = partition, members
        self.rank = dist.get_rank()


def _layout(zero: Any) -> dict[int, _Place]:
    places: dict[int, _Place] = {}
    for group, plain in enumerate(zero.bit16_groups):
        # Round-robin reordering and alignment gaps are there in some releases only.
        ordered = list(zero.round_robin_bit16_groups[group]) if hasattr(zero, "round_robin_bit16_groups") else plain
        numels = [param.numel() for param in ordered]
        if hasattr(zero, "round_robin_bit16_offsets"):
            offsets = [int(offset) for offset in zero.round_robin_bit16_offsets[group]]
        else:
            offsets = zero_layout.running_offsets(numels)
        members = tuple(dist.get_process_group_ranks(zero.real_dp_process_group[group]))
        partition = int(zero.partition_size[group])
        for param, offset, numel in zip(ordered, offsets, numels, strict=True):
            places[id(param)] = _Place(group, offset, numel, partition, members)
    return places
