"""Whether a gradient was written to between the end of backward and the capture, by torch's version counters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gradtap import flags


class GradVersions:
    """The object and version of each gradient when backward last ended, compared at the capture."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = tuple(params)
        self._seen: list[tuple[int, int] | None] = [None] * len(self._params)
        self.disturbed = False

    def record(self) -> None:
        """A backward has ended, reductions included."""
        self._seen = [_state(param) for param in self._params]

    def flags(self) -> int:
        """`MODIFIED_AFTER_BACKWARD` for a change that was seen, `CLIP_UNKNOWN` for one that could not have been."""
        now = [_state(param) for param in self._params]
        if self.disturbed or any(a is not None and a != b for a, b in zip(self._seen, now, strict=True)):
            return flags.MODIFIED_AFTER_BACKWARD
        unseen = any(a is None and b is not None for a, b in zip(self._seen, now, strict=True))
        return flags.CLIP_UNKNOWN if unseen else 0

    def reset(self) -> None:
        """A new window: no backward has been seen."""
        self._seen = [None] * len(self._params)
        self.disturbed = False


def _state(param: nn.Parameter) -> tuple[int, int] | None:
    grad = param.grad
    return None if grad is None else (id(grad), grad._version)
