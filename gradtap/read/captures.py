"""Which captures of a session are complete, and what became of one that is not.

`_step` (what rank 0 has published) serves for the bulk, the journals for what lies beyond it: a capture is complete
when every rank's journal has committed it for one and the same step. A look costs one `stat` a rank while nothing
changes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import DamagedError, StoreError
from gradtap.plan.chunks import chunk_count
from gradtap.read.session import Session, Signature, file_signature
from gradtap.store.journal import JournalReader, JournalRecord, RecordHead
from gradtap.store.row_specs import STEP_PATH

NOT_COMPLETE = -1

MOST_JOURNALS = 128
"""Journals held open at once: a run of 1,024 ranks must not use up a reader's file descriptors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureState:
    """What the journals say of one capture: ranks by what they did with it.

    `strayed` has the ranks that journaled another step under this number, which makes the capture void.
    """

    capture: int
    committed: tuple[int, ...]
    dropped: tuple[int, ...]
    failed: tuple[int, ...]
    strayed: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every rank committed it."""
        return not (self.dropped or self.failed or self.strayed or self.missing)


class CaptureIndex:
    """The complete captures of one session, followed while it grows. For any thread.

    `steps[k]` is the step of capture k, -1 where it is not complete; valid up to the last `refresh`.
    """

    def __init__(self, session: Session) -> None:
        self._lock = threading.RLock()
        self._journals: OrderedDict[int, JournalReader] = OrderedDict()
        self.session = session
        self.version = 0
        self.begun = 0
        self._room: NDArray[np.int64] = np.empty(64, np.int64)
        self.steps: NDArray[np.int64] = self._room[:0]
        self._known = 0
        self._final = False
        self._seen: tuple[Signature | None, ...] | None = None
        self._records: OrderedDict[tuple[int, int], JournalRecord] = OrderedDict()

    def refresh(self) -> int:
        """Look at the journals; the number that it returns changes exactly when something else has become known."""
        with self._lock:
            if self._final:
                return self.version
            closed = self.session.closed is not None
            ranks = range(self.session.plan.world)
            seen = tuple(file_signature(self.journal_path(r)) for r in ranks)
            if seen != self._seen or closed:
                self._advance([self._length(r) for r in ranks])
                self._seen, self._final = seen, closed
            return self.version

    def _advance(self, lengths: list[int | None]) -> None:
        there = [length for length in lengths if length is not None]
        # Below the shortest journal every rank has passed by, so that what is not complete there never will be.
        whole = len(there) == len(lengths)
        low, high = min(there) if whole else self._known, max(there, default=0)
        # Where a journal is lost or cut, what was published must not disappear: reading a gradient then says why.
        published = self._extent(low, high or self.session.capacity)
        low, high = max(low, published), max(high, published)
        if low <= self._known and high == self.begun:
            return
        if low > self._known:
            self._append(self._resolve(self._known, low))
        self._known, self.begun = max(low, self._known), high
        self.version += 1

    def _append(self, fresh: NDArray[np.int64]) -> None:
        # Room doubles: a run of a million captures, followed one by one, must not copy them all each time.
        end = len(self.steps) + len(fresh)
        if end > len(self._room):
            room = np.empty(1 << end.bit_length(), np.int64)
            room[: len(self.steps)] = self.steps
            self._room = room
        self._room[len(self.steps) : end] = fresh
        self.steps = self._room[:end]

    def _extent(self, first: int, stop: int) -> int:
        published = np.flatnonzero(self._published(first, stop) >= 0) if stop > first else np.empty(0, np.int64)
        return first + int(published[-1]) + 1 if published.size else 0

    def _resolve(self, first: int, stop: int) -> NDArray[np.int64]:
        steps = self._published(first, stop)
        for at in np.flatnonzero(steps < 0):
            steps[at] = self._agreed(first + int(at))
        return steps

    def _published(self, first: int, stop: int) -> NDArray[np.int64]:
        try:
            spec = self.session.arrays.get(STEP_PATH)
            if spec is not None:
                return np.array(self.session.read(spec, first, stop), np.int64)
        except DamagedError:
            # `_step` is derived: the journals say the same. `verify` reports the damage.
            pass
        return np.full(stop - first, NOT_COMPLETE, np.int64)

    def _agreed(self, capture: int) -> int:
        step = NOT_COMPLETE
        for rank in range(self.session.plan.world):
            try:
                head = self._head(rank, capture)
            except StoreError:
                return NOT_COMPLETE
            if head is None or head.state != "committed" or step not in (NOT_COMPLETE, head.step):
                return NOT_COMPLETE
            step = head.step
        return step

    def _head(self, rank: int, capture: int) -> RecordHead | None:
        # Without the checksums of all chunks, which may be megabytes: whoever reads a gradient checks them.
        with self._lock:
            journal = self._journal(rank)
            return None if journal is None else journal.head(capture)

    def state(self, capture: int, step: int) -> CaptureState:
        """What each rank did with a capture. Reads one record a rank. Raises `DamagedError` for a damaged one."""
        ranks: dict[str, list[int]] = {"committed": [], "dropped": [], "failed": [], "strayed": [], "missing": []}
        for rank in range(self.session.plan.world):
            record = self.record(rank, capture)
            if record is None:
                ranks["missing"].append(rank)
            elif record.state == "committed" and record.step != step:
                ranks["strayed"].append(rank)
            else:
                ranks[record.state].append(rank)
        return CaptureState(capture=capture, **{k: tuple(v) for k, v in ranks.items()})

    def record(self, rank: int, capture: int) -> JournalRecord | None:
        """One rank's record of a capture, None where it has none.

        Raises `DamagedError` for a record that is not what was written.
        """
        key = rank, capture
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
                return self._records[key]
            journal = self._journal(rank)
            record = None if journal is None else journal.record(capture)
            if record is not None:
                self._records[key] = record
                while len(self._records) > max(64, 2 * self.session.plan.world):
                    self._records.popitem(last=False)
            return record

    def journal_path(self, rank: int) -> Path:
        """The file of a rank's journal."""
        return self.session.paths.journal(rank)

    def close(self) -> None:
        """Let go of the journals."""
        with self._lock:
            while self._journals:
                self._journals.popitem()[1].close()

    def __del__(self) -> None:
        self.close()

    def _journal(self, rank: int) -> JournalReader | None:
        found = self._journals.pop(rank, None)
        if found is None:
            if not self.journal_path(rank).exists():
                return None
            found = self._opened(rank)
        self._journals[rank] = found
        while len(self._journals) > MOST_JOURNALS:
            self._journals.popitem(last=False)[1].close()
        return found

    def _opened(self, rank: int) -> JournalReader:
        journal = JournalReader(self.journal_path(rank))
        header, plan = journal.header, self.session.plan
        if (header.rank, header.nonce, header.chunks) != (rank, self.session.nonce, chunk_count(plan, rank)):
            journal.close()
            raise DamagedError(
                f"{journal.path} is not the journal of rank {rank} of this session (it says rank {header.rank}, "
                f"{header.chunks} chunks); run `gradtap verify {self.session.run}`"
            )
        return journal

    def _length(self, rank: int) -> int | None:
        try:
            journal = self._journal(rank)
            return None if journal is None else journal.last() + 1
        except DamagedError:
            return None
