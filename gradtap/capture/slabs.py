"""A pool of reused host buffers (slabs), each given back when its last piece is done. Knows nothing of gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from gradtap.errors import CaptureError


class Slab:
    """One host buffer; `holds` counts those who still read or fill it."""

    __slots__ = ("holds", "memory", "used")

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.holds = 0
        self.used = 0


class SlabPool:
    """`count` slabs of `nbytes`, allocated when first needed. `take` waits for one to come back.

    Slabs may be given back from any thread. After `abort`, every wait ends in `CaptureError`.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes, self._count = nbytes, count
        self._free: list[Slab] = []
        self._made = 0
        self._changed = threading.Condition()
        self._aborted = ""
        self.waited = 0.0

    @property
    def room(self) -> int:
        """Slabs that could be taken now without waiting."""
        with self._changed:
            return len(self._free) + self._count - self._made

    @property
    def count(self) -> int:
        """Most slabs that there can be."""
        return self._count

    def take(self, pinned: bool) -> Slab:
        """A slab with one hold on it. Raises `CaptureError` after `abort`."""
        with self._changed:
            if not self._free and self._made == self._count and not self._aborted:
                self._wait()
            if self._aborted:
                raise CaptureError(self._aborted)
            if self._free:
                slab = self._free.pop()
            else:
                self._made += 1
                slab = Slab(self._nbytes, pinned)
            slab.holds, slab.used = 1, 0
            return slab

    def hold(self, slab: Slab) -> Callable[[], None]:
        """Add a hold; the function that gives it back, once, however often it is called."""
        with self._changed:
            slab.holds += 1
        given = [False]

        def done() -> None:
            with self._changed:
                if not given[0]:
                    given[0] = True
                    self._give(slab)

        return done

    def give(self, slab: Slab) -> None:
        """Give back the hold that `take` made."""
        with self._changed:
            self._give(slab)

    def abort(self, reason: str) -> None:
        """Wake every waiter with a `CaptureError` of this reason, and let none wait again."""
        with self._changed:
            self._aborted = self._aborted or reason
            self._changed.notify_all()

    def close(self) -> None:
        """Abort, and let go of the memory."""
        self.abort("the recorder is closed")
        with self._changed:
            self._free.clear()

    def _give(self, slab: Slab) -> None:
        slab.holds -= 1
        if slab.holds == 0 and not self._aborted:
            self._free.append(slab)
            self._changed.notify()

    def _wait(self) -> None:
        start = time.perf_counter()
        while not self._free and not self._aborted:
            self._changed.wait()
        self.waited += time.perf_counter() - start
