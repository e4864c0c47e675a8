"""The window that was under way at attach: its first micro-batches were not seen, so its factor cannot be known."""

from __future__ import annotations

import math

from gradtap.capture.scale import window_factor
from gradtap.flags import JOINED_LATE


class FirstWindow:
    """Tells a window that attach came into from a ragged one, which both hold fewer micro-batches than the divisor."""

    def __init__(self) -> None:
        self._joined = False

    @property
    def flags(self) -> int:
        """JOINED_LATE in the window that was under way at attach."""
        return JOINED_LATE if self._joined else 0

    def attached(self, under_way: bool) -> None:
        """Whether gradients of a window under way lay there at attach."""
        self._joined = under_way

    def ended(self) -> None:
        """The first window is over."""
        self._joined = False

    def factor(self, divisor: float, micro_seen: int) -> float:
        """`window_factor`, or NaN for a window that was joined and whose count therefore says nothing."""
        return math.nan if self._joined and micro_seen < divisor else window_factor(divisor, micro_seen)
