"""Which micro-batch of the window first reached each parameter, from hooks that store one integer each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradtap.capture.patches import PatchSet


class TouchTracker:
    """Counts the backwards of a window and marks the parameters that each one reaches first.

    A backward that is announced (`begin`/`end` round a wrapped `engine.backward`) is counted by its announcement;
    any other by autograd's own callback at its end. `on_begin` and `on_end` are called at least once for each.

    A backward within a backward (reentrant checkpointing) is no micro-batch of its own. It shows when the outer one
    goes on after it: graph tasks are numbered in the order in which they begin.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = tuple(params)
        self.touched: NDArray[np.int32] = np.full(len(self._params), -1, dtype=np.int32)
        self.ever: NDArray[np.bool_] = np.zeros(len(self._params), dtype=np.bool_)
        self.micro_seen = 0
        self.announced = 0
        self.on_begin: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        self._depth = 0
        self._graph = -1
        self._begun: set[int] = set()
        self._ended: list[int] = []

    def install(self, patches: PatchSet) -> None:
        """Register one hook for each parameter that asks for a gradient."""
        for index, param in enumerate(self._params):
            if param.requires_grad:
                patches.hook(param.register_post_accumulate_grad_hook(self._hook(index)))  # type: ignore[no-untyped-call]

    @property
    def open(self) -> bool:
        """Whether a backward has begun since the last reset."""
        return self._depth > 0 or self.micro_seen > 0 or bool((self.touched >= 0).any())

    def begin(self) -> None:
        """A wrapped backward starts."""
        if self._depth == 0:
            self.on_begin()
        self._depth += 1

    def end(self) -> None:
        """A wrapped backward has ended."""
        self._depth -= 1
        if self._depth == 0:
            self.micro_seen += 1
            self.announced += 1
            self.on_end()

    def reset(self) -> None:
        """A new window: nothing touched, no micro-batch seen."""
        self.ever |= self.touched >= 0
        self.touched = np.full(len(self._params), -1, dtype=np.int32)
        self.micro_seen = self.announced = 0
        self._ended.clear()

    def restart(self) -> None:
        """The window begins anew, in the middle of a backward or not: what was marked before it does not count."""
        self.touched = np.full(len(self._params), -1, dtype=np.int32)
        self.micro_seen = self.announced = 0
        self._ended.clear()

    def marker(self, index: int) -> Callable[[Any], None]:
        """What an engine's own hook calls, within backward, when the gradient of parameter `index` has been reached."""
        return self._hook(index)

    def _hook(self, index: int) -> Callable[[Any], None]:
        def touch(_: Any) -> None:
            if self._depth == 0:
                self._follow_graph()
            if self.touched[index] < 0:
                self.touched[index] = self.micro_seen

        return touch

    def _follow_graph(self) -> None:
        graph = torch._C._current_graph_task_id()
        if graph == self._graph:
            return
        self._graph = graph
        self._drop_nested(graph)
        if graph in self._begun:
            return
        self._begun.add(graph)
        self.on_begin()
        # DDP finalises its buckets in a callback of its own, which may come after this one: queued once more from
        # within, ours runs after it.
        _queue(lambda: _queue(lambda: self._graph_ended(graph)))

    def _graph_ended(self, graph: int) -> None:
        self._graph = -1
        self._begun.discard(graph)
        self._drop_nested(graph)
        self._ended.append(graph)
        self.micro_seen += 1
        self.on_end()

    def _drop_nested(self, graph: int) -> None:
        """Backwards that began after `graph` and have ended before it were part of it."""
        nested = sum(ended > graph for ended in self._ended)
        if nested:
            del self._ended[-nested:]
            self.micro_seen -= nested
            np.minimum(self.touched, self.micro_seen, out=self.touched)


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _nothing() -> None:
    return None
