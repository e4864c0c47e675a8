"""From chunks to one gradient or a slice of it: only the chunks that the slice touches are read.

Here: what is missing and why, element by element of the plan. Not here: which capture a step is (`run`, `captures`),
and what counts as damage inside a chunk (`chunks`).
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import DamagedError, IncompleteError
from gradtap.read.captures import CaptureIndex
from gradtap.read.chunks import ChunkReader, FileCache
from gradtap.read.session import Session
from gradtap.read.session_ledger import SessionLedger
from gradtap.read.summaries import SummaryReader
from gradtap.read.tags import TagReader
from gradtap.selection import Selection
from gradtap.store.journal import JournalRecord
from gradtap.types import ChunkPlan


class SessionReader:
    """All that reads one session: its captures, chunks, summaries, ledger and tags."""

    def __init__(self, session: Session, files: FileCache) -> None:
        self.session = session
        self.captures = CaptureIndex(session)
        self.chunks = ChunkReader(session, files)
        self.summaries = SummaryReader(session)
        self.ledger = SessionLedger(session, self.summaries)
        self.tags = TagReader(session.paths)

    def touched(self, param: int, where: Selection) -> list[ChunkPlan]:
        """The chunks of a parameter that hold a selected element, in the order of their elements."""
        chunks = self.session.chunks_of(param)
        low, high = where.hull
        first = max(bisect.bisect_right(chunks, low, key=_start) - 1, 0)
        stop = bisect.bisect_left(chunks, high, key=_start)
        return [c for c in chunks[first:stop] if where.touches(c.start, c.stop)]

    def fill(
        self, chunks: list[ChunkPlan], where: Selection, out: NDArray[Any], *, capture: int, step: int, partial: bool
    ) -> bool:
        """Write the selected elements of a capture into `out`, which the caller has filled with NaN.

        Returns whether all of `chunks` were there; `partial` allows for less. Raises `IncompleteError` for a rank
        that has not committed the capture or a parameter that was not selected for it, `DamagedError` for bytes that
        are not what was committed.
        """
        whole = True
        for chunk in chunks:
            record = self._record(chunk, capture, step, partial=partial)
            if record is None:
                whole = False
            elif not record.present[chunk.slot]:
                if not partial:
                    raise IncompleteError(self._left_out(chunk, step))
                whole = False
            else:
                crc = int(record.crcs[chunk.slot])
                where.scatter(chunk.start, self.chunks.values(chunk, capture, step, crc), out)
        return whole

    def check(self, chunks: list[ChunkPlan], *, capture: int, step: int) -> None:
        """Look, in the journals alone, whether a capture holds all of `chunks`. Raises as `fill` for what it reads."""
        for chunk in chunks:
            record = self._record(chunk, capture, step, partial=False)
            if record is not None and not record.present[chunk.slot]:
                raise IncompleteError(self._left_out(chunk, step))

    def _record(self, chunk: ChunkPlan, capture: int, step: int, *, partial: bool) -> JournalRecord | None:
        record = self.captures.record(chunk.owner, capture)
        if record is not None and record.state == "committed" and record.step == step:
            return record
        if partial:
            return None
        found = "no record" if record is None else f"{record.state} for step {record.step}"
        raise DamagedError(
            f"{self.captures.journal_path(chunk.owner)} has {found} at capture {capture}, which was published as step "
            f"{step}; run `gradtap verify {self.session.run}`"
        )

    def _left_out(self, chunk: ChunkPlan, step: int) -> str:
        plan = self.session.plan
        name = plan.params[plan.arrays[chunk.array].param].name
        return (
            f"{name!r} was not captured at step {step}: the selection of session {self.session.name} left it out; ask "
            "for another step or parameter, or for partial=True, which reads it as NaN"
        )


def _start(chunk: ChunkPlan) -> int:
    return chunk.start


def blank(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """An array of NaN, so that nothing unread can pass for a value."""
    return np.full(shape, np.nan, np.float64 if dtype == "float64" else np.float32)
