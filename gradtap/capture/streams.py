"""Copies from a device to pinned host memory on a side stream, in order before the optimizer's own work."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CopyStream:
    """One side stream for each device that a copy has come from; none where all gradients are in host memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._used: dict[torch.device, torch.cuda.Event] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None] | None:
        """Copy; None where it is done on return, else a function that waits until `target` may be read."""
        if source.device.type != "cuda":
            target.copy_(source)
            return None
        side = self._side(source.device)
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(side)
        # The gradient may be freed by the step before the copy has run: keep its memory from being given away.
        source.record_stream(side)
        self._used[source.device] = event
        return event.synchronize

    def begin(self) -> None:
        """A step's copies start: they must see everything that the compute streams were given so far."""
        for device, side in self._streams.items():
            side.wait_stream(torch.cuda.current_stream(device))

    def end(self) -> None:
        """A step's copies are queued: later work of the compute streams (the in-place step) waits for them."""
        for device, event in self._used.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._used.clear()

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]
