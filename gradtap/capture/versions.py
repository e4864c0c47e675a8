"""Whether a gradient was written to between the end of backward and the capture, by torch's version counters.

DTensors are not counted by every operation (clipping's is one), so a sample of their elements is compared instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradtap import flags

_State = tuple["weakref.ref[Any]", int]
_SAMPLE = 1024
"""Elements of one gradient that are compared, evenly spread."""


class GradVersions:
    """The object and version of each gradient when backward last ended, compared at the capture."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = tuple(params)
        self._seen: list[_State | None] = [None] * len(self._params)
        self._samples: dict[int, torch.Tensor] = {}
        self.disturbed = False

    def record(self) -> None:
        """A backward has ended, reductions included."""
        self._seen = [_state(param) for param in self._params]
        self._samples = {
            i: each.clone() for i, param in enumerate(self._params) if (each := _sample(param)) is not None
        }

    def flags(self) -> int:
        """`MODIFIED_AFTER_BACKWARD` for a change that was seen, `CLIP_UNKNOWN` for one that could not have been."""
        now = [_state(param) for param in self._params]
        if self.disturbed or any(a is not None and not _same(a, b) for a, b in zip(self._seen, now, strict=True)):
            return flags.MODIFIED_AFTER_BACKWARD
        if self._samples and self._samples_differ():
            return flags.MODIFIED_AFTER_BACKWARD
        unseen = any(a is None and b is not None for a, b in zip(self._seen, now, strict=True))
        return flags.CLIP_UNKNOWN if unseen else 0

    def dropped(self) -> bool:
        """Whether there were gradients when backward last ended, and none of them is in its place any more."""
        pairs = [(each, param) for each, param in zip(self._seen, self._params, strict=True) if each is not None]
        return bool(pairs) and all(param.grad is None or seen[0]() is not param.grad for seen, param in pairs)

    def reset(self) -> None:
        """A new window: no backward has been seen."""
        self._seen = [None] * len(self._params)
        self._samples = {}
        self.disturbed = False

    def _samples_differ(self) -> bool:
        # One comparison for each dtype: each may wait for a device. Bits are compared, for NaN is not NaN.
        by_kind: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, before in self._samples.items():
            now = _sample(self._params[index])
            if now is None or now.shape != before.shape:
                return True
            pair = by_kind.setdefault((before.device, before.dtype), ([], []))
            pair[0].append(before)
            pair[1].append(now)
        return any(not torch.equal(*(torch.cat(some).view(torch.uint8) for some in pair)) for pair in by_kind.values())


def _sample(param: nn.Parameter) -> torch.Tensor | None:
    """Some elements of the local part of a DTensor gradient, as a view; None for any other gradient."""
    local: torch.Tensor | None = getattr(param.grad, "_local_tensor", None)
    if local is None or local.layout != torch.strided:
        return None
    flat = local.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def _state(param: nn.Parameter) -> _State | None:
    grad: Any = param.grad
    if grad is None:
        return None
    # An operation on a DTensor counts on the outside, one on its local part within.
    local = getattr(grad, "_local_tensor", None)
    return weakref.ref(grad), grad._version + (0 if local is None else local._version)


def _same(seen: _State, now: _State | None) -> bool:
    return now is not None and seen[0]() is now[0]() and seen[1] == now[1]
