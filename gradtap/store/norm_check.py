"""Compares the norm of what was captured with the engine's own, within the first captures. Decides, writes nothing.

A wrong ownership map, scale or divisor shows here at once; no collective is needed, for both norms are in the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gradtap.flags import LATE_TOUCH, NONFINITE, UNTOUCHED
from gradtap.types import ParamSpec

CHECKED_CAPTURES = 3
"""Captures that are compared."""

INCOMPARABLE = UNTOUCHED | LATE_TOUCH | NONFINITE
"""With offload, ZeRO leaves what the window did not touch out of its norm, though it applies it again."""

TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
"""Relative; the engine sums in the gradient's own precision."""


class NormCheck:
    """Looks at the first captures whose norms can be compared."""

    def __init__(self, params: Iterable[ParamSpec]) -> None:
        self._tolerance = max((TOLERANCE[param.dtype] for param in params if param.stored), default=0.0)
        self._left = CHECKED_CAPTURES

    @property
    def done(self) -> bool:
        """Whether nothing is left to compare."""
        return self._left == 0

    def disagrees(self, norm: float, engine: float, flags: int) -> bool:
        """Whether two norms of one capture contradict each other; False where they cannot be compared."""
        if self.done or flags & INCOMPARABLE or not (math.isfinite(norm) and math.isfinite(engine)):
            return False
        self._left -= 1
        wrong = abs(norm - engine) > self._tolerance * max(norm, engine)
        self._left = 0 if wrong else self._left
        return wrong
