"""What an intercepted clip call says: limit, norm and coefficient. Holds a norm on its device until it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from gradtap.capture.scale import clip_coefficient

ClipFacts = tuple[Any | None, Callable[[], float] | None]


class ClipWatch:
    """The clip calls of one window. Facts are known only where one call, by norm, covered every stored parameter."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = frozenset(id(param) for param in params)
        self.reset()

    def reset(self) -> None:
        """A new window: no call yet."""
        self.limit = math.nan
        self._norm: Any = None
        self._norm_type = 2.0
        self._calls = 0
        self._whole = False

    def concerns(self, params: Sequence[Any]) -> bool:
        """Whether a call on `params` changes a stored gradient."""
        return any(id(param) in self._params for param in params)

    def begin(self, params: Sequence[Any], limit: float, norm_type: float) -> None:
        """A call by norm, before it changes anything."""
        self._calls += 1
        self._whole = self._calls == 1 and self._params <= {id(param) for param in params}
        self.limit = limit if self._whole else math.nan
        self._norm_type = norm_type

    def end(self, norm: Any) -> None:
        """The norm that the call returned (a tensor, kept as it is)."""
        if hasattr(norm, "placements"):
            # Of DTensors torch returns a norm that may be in parts, which only a collective would put together.
            norm = norm.detach()._local_tensor if all(each.is_replicate() for each in norm.placements) else None
        self._norm = norm.detach() if hasattr(norm, "detach") else norm

    def by_value(self) -> None:
        """A call by value: no one coefficient describes it."""
        self._calls += 1
        self._whole, self.limit = False, math.nan

    def facts(self) -> ClipFacts:
        """(L2 norm or None, coefficient or None), not yet read from the device."""
        if not self._whole or self._norm is None:
            return None, None
        norm, limit = self._norm, self.limit
        return (norm if self._norm_type == 2 else None), lambda: clip_coefficient(float(norm), limit)
