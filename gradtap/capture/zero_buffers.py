"""Where each kind of DeepSpeed engine keeps the averaged gradient at its step boundary: the protocol, and the choice.

The kinds are in `zero12_buffers` (a flat partition per group), `zero3_buffers` (a partition per parameter) and
`zero0_buffers` (whole gradients on every rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradtap.types import Ownership

Piece = tuple[int, int, torch.Tensor | None]
"""Elements `[start, stop)` of a parameter and their values, 1-D; None where there is no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Global norms of a step. `true`: of the unscaled gradient. `clipped`: what the engine compared with its limit."""

    true: float
    clipped: float


class Buffers(Protocol):
    """One kind of engine, read from one rank. Nothing here calls a collective."""

    loss_scaled: bool
    """Whether the loss, and so the gradient, was multiplied by the loss scale."""

    def holds(self, param: Any) -> bool:
        """Whether the optimizer trains this parameter."""

    def shape(self, param: Any) -> tuple[int, ...]:
        """The whole parameter's shape."""

    def dtype(self, param: Any) -> torch.dtype:
        """Dtype of the buffer that holds the parameter's gradient."""

    def own(self, param: Any) -> Ownership:
        """Which ranks hold which elements."""

    def settle(self) -> None:
        """Wait for copies to the buffers that are under way."""

    def pieces(self, param: Any) -> list[Piece]:
        """What this rank holds of the parameter, ascending."""

    def reached(self, param: Any) -> bool:
        """Whether the engine itself filled in a zero gradient in this window where backward gave none."""

    def adds_old(self, param: Any) -> bool:
        """Whether a parameter first reached by a later micro-batch gets the last window's content added."""

    def under_way(self) -> bool:
        """Whether micro-batches of the present window ran already."""

    def norms(self, reported: float, before: float, after: float) -> Norms:
        """From the norm that the engine reports, and its loss scale before and after the step."""

    def settings(self) -> dict[str, Any]:
        """What a session says about these buffers."""


def find_buffers(engine: Any) -> Buffers:
    """The buffers of an engine that `zero_checks` has let pass."""
    from gradtap.capture.zero0_buffers import Bf16Buffers, WholeBuffers
    from gradtap.capture.zero3_buffers import ShardBuffers
    from gradtap.capture.zero12_buffers import PartitionBuffers

    name = type(engine.optimizer).__name__
    if name == "DeepSpeedZeroOptimizer":
        return PartitionBuffers(engine.optimizer)
    if name == "DeepSpeedZeroOptimizer_Stage3":
        return ShardBuffers(engine.optimizer)
    return Bf16Buffers(engine.optimizer) if name == "BF16_Optimizer" else WholeBuffers(engine)
