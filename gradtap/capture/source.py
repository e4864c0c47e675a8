"""What the recorder asks of an engine, and what an engine tells the recorder. Protocols only."""

from __future__ import annotations

from typing import Protocol

from gradtap.types import EngineFacts, LocalGrad, Ownership, ParamSpec, StepFacts, StepOutcome


class BoundaryListener(Protocol):
    """Told of each optimizer step, in the training thread, once before and once after."""

    def before_step(self) -> None:
        """Gradients are final, not clipped; the optimizer has not moved."""

    def after_step(self) -> None:
        """The optimizer has moved, or has decided not to. The engine may reuse its buffers from here on."""


class GradSource(Protocol):
    """One engine, seen from one rank. Nothing here calls a collective."""

    facts: EngineFacts
    params: tuple[ParamSpec, ...]
    ownership: tuple[Ownership | None, ...]

    def install(self, listener: BoundaryListener) -> None:
        """Begin to listen. Raises `AttachError` where this engine is listened to already."""

    def remove(self) -> None:
        """Take every hook and patch away again. May be called twice."""

    @property
    def window_open(self) -> bool:
        """Whether a backward has begun since the last update."""

    def next_step(self) -> int | None:
        """Number of the update about to be made, the first being 1; None where the engine cannot tell."""

    def gradients(self) -> list[LocalGrad]:
        """Views of what this rank holds, sorted by (param, start). Valid within `before_step` only.

        Raises `UnsupportedError` for a gradient whose true value cannot be had (sparse, consumed in backward).
        """

    def step_facts(self, step: int) -> StepFacts:
        """The ledger's facts of the step under way. Valid within `before_step` only.

        `touched` is what this rank's backwards reached, and the flags that follow from it (UNTOUCHED, LATE_TOUCH) are
        this rank's view; the view of all ranks follows from their `touched` put together. `learning_rates` has
        `facts.groups` entries, whatever the loop has added since. Warns, once, of parameters that came after attach.
        Raises `UnsupportedError` where a recorded parameter was cast after attach.
        """

    def outcome(self) -> StepOutcome:
        """How the last step ended. To be asked at the next boundary, or at close: it may wait for the device."""
