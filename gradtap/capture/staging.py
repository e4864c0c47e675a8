"""Copies this rank's chunks from the engine's buffers to reused host memory, and hands them on. Encodes nothing.

    gradients --copy--> slab [piece|piece|piece] --sink(piece, done)--> another thread ... done() --> slab is free

A slab holds many pieces; it is free again when each of its pieces is done. A step larger than all slabs streams through
them: the copy then waits for slabs to come back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradtap.capture.memory import available_bytes, local_ranks
from gradtap.capture.slabs import Slab, SlabPool
from gradtap.capture.streams import CopyStream
from gradtap.errors import CaptureError
from gradtap.types import ChunkPlan, LocalGrad, SessionPlan, StagedPiece

Sink = Callable[[StagedPiece, Callable[[], None]], None]

_ALIGN = 64
_LEAST_BUDGET = 64 * 2**20
# Of the memory that is there at attach, all ranks together take no more than one part in so many.
_SHARE = 4
_TORCH = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# NumPy has no bfloat16: its bits travel as uint16.
_NUMPY: dict[str, Any] = {"float64": np.float64, "float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent whole chunks of one array that are copied, and handed on, together."""

    param: int
    start: int
    stop: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in the captured dtype."""
        return (self.stop - self.start) * _TORCH[self.dtype].itemsize


class Staging:
    """The host buffers of one rank, and the plan of what goes into them.

    `chunks` are this rank's chunks of `plan`. `budget` is the most bytes of host memory (None: twice a step, at least
    64 MiB, at most this rank's share of a quarter of what `memory.available_bytes` finds), yet never less than two
    slabs. Slabs are allocated when first needed, pinned where the gradients are on a GPU. `slab_bytes` grows to hold
    the largest chunk.
    """

    def __init__(self, plan: SessionPlan, chunks: Sequence[ChunkPlan], *, budget: int | None, slab_bytes: int) -> None:
        self._names = tuple(param.name for param in plan.params)
        single = [(chunk, _run(plan, chunk)) for chunk in chunks]
        self.slab_bytes = max([_padded(slab_bytes), *(_padded(run.nbytes) for _, run in single)])
        self._runs = tuple(_joined(single, self.slab_bytes))
        self.step_bytes = sum(run.nbytes for run in self._runs)
        self.step_slabs = _slabs_needed(self._runs, self.slab_bytes)
        limit = _default_budget(self.step_bytes) if budget is None else budget
        self._pool = SlabPool(self.slab_bytes, max(2, limit // self.slab_bytes))
        self._stream = CopyStream()

    @property
    def budget(self) -> int:
        """Most bytes of host memory that the slabs can take."""
        return self._pool.count * self.slab_bytes

    @property
    def fits(self) -> bool:
        """Whether a whole step fits into the slabs; else it streams through them while training waits."""
        return self.step_slabs <= self._pool.count

    def room(self) -> bool:
        """Whether a whole step could be copied now without waiting."""
        return self._pool.room >= self.step_slabs

    def copy(self, grads: Sequence[LocalGrad], sink: Sink, wanted: Callable[[int], bool] = lambda param: True) -> float:
        """Copy this rank's chunks of every parameter that is `wanted` (by its index); seconds waited for slabs.

        `sink` gets each piece at once, in the order of the plan, and must arrange that its `done` is called, from any
        thread. Raises `CaptureError` where `grads` do not cover a chunk, or after `abort`.
        """
        held: dict[int, list[LocalGrad]] = {}
        for grad in grads:
            held.setdefault(grad.param, []).append(grad)
        before = self._pool.waited
        self._stream.begin()
        slab: Slab | None = None
        try:
            for run in self._runs:
                if not wanted(run.param):
                    continue
                sources = self._cover(run, held.get(run.param, []))
                if slab is not None and slab.used + run.nbytes > self.slab_bytes:
                    self._pool.give(slab)
                    slab = None
                slab = slab or self._pool.take(_on_gpu(sources))
                self._hand_on(slab, run, sources, sink)
        finally:
            if slab is not None:
                self._pool.give(slab)
            self._stream.end()
        return self._pool.waited - before

    def abort(self, reason: str = "the recorder's worker has stopped") -> None:
        """Wake a waiting `copy` with `CaptureError`; for the consumer to call when it dies."""
        self._pool.abort(reason)

    def close(self) -> None:
        """Let go of the memory. Pieces that were handed on stay readable."""
        self._pool.close()

    def _cover(self, run: Run, held: Sequence[LocalGrad]) -> list[tuple[int, int, Any]]:
        sources, at = [], run.start
        # A block that cuts rows gives a piece for each row: not all of them are looked through for each run.
        for grad in held[max(0, bisect_left(held, at, key=lambda grad: grad.start) - 1) :]:
            if grad.start >= run.stop:
                break
            first, last = max(at, grad.start), min(run.stop, grad.stop)
            if first == at and first < last:
                values = None if grad.tensor is None else grad.tensor[first - grad.start : last - grad.start]
                self._check_dtype(run, values)
                sources.append((first - run.start, last - run.start, values))
                at = last
        if at != run.stop:
            raise CaptureError(
                f"the engine holds elements up to {at} of {self._names[run.param]} on this rank, "
                f"but this session's plan needs {run.start} to {run.stop}: was the engine set up anew after attach?"
            )
        return sources

    def _check_dtype(self, run: Run, values: torch.Tensor | None) -> None:
        if values is not None and values.dtype != _TORCH[run.dtype]:
            raise CaptureError(
                f"the gradient of {self._names[run.param]} is {values.dtype}, but was {run.dtype} at attach: "
                "cast the model before attach"
            )

    def _hand_on(self, slab: Slab, run: Run, sources: Sequence[tuple[int, int, Any]], sink: Sink) -> None:
        memory = slab.memory[slab.used : slab.used + run.nbytes]
        slab.used += _padded(run.nbytes)
        target = memory.view(_TORCH[run.dtype])
        waits = []
        for first, last, values in sources:
            if values is None:
                target[first:last].zero_()
            else:
                waits.append(self._stream.copy(target[first:last], values))
        # Copies of one device run in order on one stream: the last one's end is the end of all.
        ready = next((wait for wait in reversed(waits) if wait is not None), None)
        piece = StagedPiece(
            param=run.param, start=run.start, stop=run.stop, values=memory.numpy().view(_NUMPY[run.dtype]), ready=ready
        )
        sink(piece, self._pool.hold(slab))


def _run(plan: SessionPlan, chunk: ChunkPlan) -> Run:
    param = plan.arrays[chunk.array].param
    return Run(param, chunk.start, chunk.stop, plan.params[param].dtype)


def _joined(single: Iterable[tuple[ChunkPlan, Run]], most: int) -> Iterable[Run]:
    array, held = -1, None
    for chunk, run in sorted(single, key=lambda pair: (pair[0].array, pair[0].start)):
        if held is not None:
            longer = Run(held.param, held.start, run.stop, held.dtype)
            if chunk.array == array and run.start == held.stop and _padded(longer.nbytes) <= most:
                held = longer
                continue
            yield held
        array, held = chunk.array, run
    if held is not None:
        yield held


def _slabs_needed(runs: Sequence[Run], slab_bytes: int) -> int:
    slabs, used = 0, slab_bytes + 1
    for run in runs:
        if used + run.nbytes > slab_bytes:
            slabs, used = slabs + 1, 0
        used += _padded(run.nbytes)
    return slabs


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _on_gpu(sources: Sequence[tuple[int, int, Any]]) -> bool:
    return any(values is not None and values.device.type == "cuda" for _, _, values in sources)


def _default_budget(step_bytes: int) -> int:
    return min(max(2 * step_bytes, _LEAST_BUDGET), available_bytes() // _SHARE // local_ranks())
