"""A source seen through a trainer that runs the loop itself (HF Trainer, Lightning): what it says of accumulation.

The gradients are those of the engine below. Who attaches, and when, is the business of `gradtap.hf` and
`gradtap.lightning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradtap.capture.scale import window_factor
from gradtap.capture.source import BoundaryListener, GradSource
from gradtap.types import EngineFacts, LocalGrad, StepFacts, StepOutcome


class Bell:
    """Rung by a trainer's callback at its step boundary; heard by the source while it is installed."""

    def __init__(self) -> None:
        self.heard: Callable[[], None] | None = None
        self.clipped: Callable[[Any, float, Callable[[], Any]], Any] | None = None

    def ring(self) -> None:
        """The gradients are final and not clipped, says the trainer. Does nothing where no source listens."""
        if self.heard is not None:
            self.heard()

    def clip(self, params: Sequence[Any], limit: float, clip: Callable[[], Any]) -> Any:
        """The trainer clips `params` by their norm, with `clip`, which returns it."""
        return clip() if self.clipped is None else self.clipped(params, limit, clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTarget:
    """What `find_source` gets for a trainer: the object below, and what only the trainer knows.

    accumulation: micro-batches that the trainer means to accumulate, now.
    divided: what the trainer has divided the losses of the window by, beyond what the engine divides by; 1 for a
        trainer that divides by the window's real count.
    limit: norm to which the trainer is about to clip; NaN where it does not, or the engine does.
    engine_counts: the engine has an accumulation of its own (DeepSpeed).
    """

    target: Any
    through: str
    accumulation: Callable[[], int]
    divided: Callable[[], int]
    engine_counts: bool
    limit: Callable[[], float] = lambda: math.nan
    bell: Bell = field(default_factory=Bell)


class ThroughTrainer:
    """`GradSource` of the engine below a trainer."""

    def __init__(self, inner: GradSource, target: TrainerTarget) -> None:
        self._inner, self._target = inner, target
        self.params, self.ownership = inner.params, inner.ownership
        settings = {**inner.facts.settings, "through": target.through}
        settings["trainer_accumulation"] = target.accumulation()
        self.facts: EngineFacts = replace(inner.facts, settings=settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def install(self, listener: BoundaryListener) -> None:
        """Begin to listen, to the trainer's bell too where the engine below has no boundary of its own."""
        self._inner.install(listener)
        self._target.bell.heard = getattr(self._inner, "boundary", None)
        self._target.bell.clipped = getattr(self._inner, "clipped", None)

    def remove(self) -> None:
        """Take everything away again."""
        self._target.bell.heard = self._target.bell.clipped = None
        self._inner.remove()

    @property
    def window_open(self) -> bool:
        """Whether a backward has begun since the last update."""
        return self._inner.window_open

    def next_step(self) -> int | None:
        """As the engine counts."""
        return self._inner.next_step()

    def gradients(self) -> list[LocalGrad]:
        """As the engine holds them."""
        return self._inner.gradients()

    def step_facts(self, step: int) -> StepFacts:
        """The engine's facts, with the trainer's accumulation, and its division where it divides as well."""
        facts = self._inner.step_facts(step)
        loop, seen = self._target.accumulation(), facts.micro_seen
        divisor = facts.divisor * self._target.divided()
        rest = facts.factor / window_factor(facts.divisor, seen)
        return replace(
            facts,
            accum_loop=loop,
            accum_engine=facts.accum_engine if self._target.engine_counts else loop,
            divisor=divisor,
            factor=rest * window_factor(divisor, seen),
            clip_limit=self._target.limit() if math.isnan(facts.clip_limit) else facts.clip_limit,
        )

    def outcome(self) -> StepOutcome:
        """As the engine ended."""
        return self._inner.outcome()
