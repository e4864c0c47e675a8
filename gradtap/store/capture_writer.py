"""One rank's writer: staged pieces in, a committed capture out. Called by one thread, in step order.

Order of a commit: chunk bodies, index entries, summary rows, ledger row, journal record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtap.config import Settings
from gradtap.encode.summary import merge
from gradtap.errors import CaptureError
from gradtap.flags import INEXACT_UNSCALE, NONFINITE
from gradtap.store.chunk_writer import ChunkWriter, Written
from gradtap.store.journal import JournalRecord, JournalWriter, RecordState
from gradtap.store.ledger_fields import EARLY_FIELDS, RECORD_CODES, STATE_CODES
from gradtap.store.numbering import Numbering
from gradtap.store.paths import SessionPaths
from gradtap.store.rank_rows import RankRows
from gradtap.store.session import SessionHead, plan_checksum
from gradtap.store.shard import ShardSet
from gradtap.types import StagedPiece, StepFacts, StepOutcome


@dataclass(slots=True)
class _Open:
    """The step being written."""

    facts: StepFacts
    number: int | None
    wanted: frozenset[int] | None
    written: Written
    failed: bool = False


@dataclass(slots=True)
class _Outcome:
    """What becomes of a step while its parts are tried one after another."""

    state: RecordState | None
    error: Exception | None = None

    def attempt(self, part: Callable[[], object]) -> None:
        """Try one part; its failure is kept, and a committed capture becomes a failed one."""
        try:
            part()
        except Exception as error:
            self.error = self.error or error
            self.state = "failed" if self.state == "committed" else self.state


class CaptureWriter:
    """Writes what one rank owns. A method raises what went wrong; the step it belongs to is then not committed."""

    def __init__(
        self, paths: SessionPaths, head: SessionHead, rank: int, *, settings: Settings, numbering: Numbering
    ) -> None:
        self._paths, self._rank, self._settings, self._numbering = paths, rank, settings, numbering
        self._shards = ShardSet(settings.open_files)
        self._chunks = ChunkWriter(paths, head, rank, self._shards)
        self._rows = RankRows(paths, head.layout, rank, self._shards, capacity=settings.capacity)
        self._journal = JournalWriter(
            paths.journal(rank), rank, len(self._chunks.chunks), head.nonce, plan_checksum(head.plan)
        )
        self._groups = max(head.layout.groups, 1)
        self._open: _Open | None = None
        self._unsynced = 0
        self.committed = 0

    def begin(self, facts: StepFacts, *, capture: bool, wanted: frozenset[int] | None) -> None:
        """Open a step. `wanted`: parameters selected for capture, None for all."""
        self._open = None
        number = self._numbering.number(facts.step) if capture else None
        self._numbering.start(facts.step)
        self._open = _Open(facts, number, wanted, self._chunks.fresh())

    def piece(self, piece: StagedPiece) -> None:
        """Encode and append one staged piece of the open step; nothing where the step failed or is not captured."""
        if piece.ready is not None:
            piece.ready()
        step = self._open
        if step is None or step.number is None or step.failed:
            return
        try:
            self._chunks.write(step.number, piece, step.facts.k, step.written)
        except Exception:
            step.failed = True
            raise

    def fail(self) -> None:
        """Mark the open step as failed: it gets a ledger row, and is never complete."""
        if self._open is not None:
            self._open.failed = True

    def end(self, *, dropped: bool, seconds: float, wait_seconds: float) -> None:
        """Write the open step's summary and ledger rows, then its journal record.

        A failure of one is the capture's, which is then journaled as failed. Raises the first.
        """
        step, self._open = self._open, None
        if step is None:
            return
        row = self._numbering.row(step.facts.step)
        outcome = _Outcome(self._state(step, dropped=dropped))
        if outcome.state == "committed":
            outcome.attempt(lambda: self._summarise(step))
        outcome.attempt(lambda: self._rows.reach(capture=step.number, row=row))
        took = {"seconds": seconds, "wait_seconds": wait_seconds}
        outcome.attempt(lambda: self._rows.write_ledger(row, self._ledger(step, outcome.state) | took))
        state, number = outcome.state, step.number
        if state is not None and number is not None:
            outcome.attempt(lambda: self._commit(step, number, state))
        outcome.attempt(self._chunks.seal_full)
        if outcome.error is not None:
            raise outcome.error

    def outcome(self, step: int, outcome: StepOutcome) -> None:
        """Write the late fields of a step."""
        late = {
            "state": STATE_CODES[outcome.state],
            "norm_engine": outcome.norm_engine,
            "clip_coef": outcome.clip_coef,
        }
        self._rows.write_ledger(self._numbering.row(step), late)

    def tags(self, line: bytes) -> None:
        """Append one line of user tags."""
        with open(self._paths.tags(self._rank), "ab") as file:
            file.write(line)

    def close(self) -> None:
        """Seal the shards, trim this rank's own arrays, mark the journal closed.

        All are tried; raises the first failure.
        """
        outcome = _Outcome("committed")
        outcome.attempt(lambda: self._shards.close(seal=True))
        outcome.attempt(self._shards.close)
        outcome.attempt(self._rows.trim)
        outcome.attempt(self._journal.sync)
        outcome.attempt(lambda: self._journal.mark_closed(self._rows.captures, self._rows.rows, time.time()))
        outcome.attempt(self._journal.close)
        if outcome.error is not None:
            raise outcome.error

    def discard(self) -> None:
        """Give files back; what was begun is not finished."""
        self._shards.close()
        self._journal.close()

    def _state(self, step: _Open, *, dropped: bool) -> RecordState | None:
        if step.number is None:
            return None
        self._numbering.refresh()
        if dropped or self._numbering.number(step.facts.step) != step.number:
            return "dropped"
        return "failed" if step.failed else "committed"

    def _summarise(self, step: _Open) -> None:
        missing = np.count_nonzero(step.written.present != self._chunks.due(step.wanted))
        if missing:
            raise CaptureError(f"{missing} chunks of the capture never came; please report this defect")
        if step.number is not None:
            merged = {index: merge(parts) for index, parts in step.written.summaries.items()}
            self._rows.write_summaries(step.number, merged)

    def _ledger(self, step: _Open, state: RecordState | None) -> dict[str, Any]:
        written, facts = step.written, step.facts
        parts = [part for parts in written.summaries.values() for part in parts]
        flags = facts.flags | (INEXACT_UNSCALE if written.inexact else 0)
        flags |= NONFINITE if any(part.nan or part.inf for part in parts) else 0
        computed = {
            "capture": -1 if step.number is None else step.number,
            "learning_rate": self._rates(facts.learning_rates),
            "flags": flags,
            "record": RECORD_CODES[state],
            "raw_bytes": written.raw_bytes,
            "stored_bytes": written.stored_bytes,
            "inexact": written.inexact,
        }
        told = {f.name for f in EARLY_FIELDS} - set(computed) - {"seconds", "wait_seconds"}
        return computed | {name: getattr(facts, name) for name in told}

    def _rates(self, rates: tuple[float, ...]) -> list[float]:
        """As many as the session has groups: the optimizer may have got more since, or fewer."""
        return [*rates, *[math.nan] * self._groups][: self._groups]

    def _commit(self, step: _Open, number: int, state: RecordState) -> None:
        self._unsynced += 1
        sync = 0 < self._settings.fsync_every <= self._unsynced
        if sync:
            self._shards.sync_all()
        written = step.written
        record = JournalRecord(
            capture=number,
            step=step.facts.step,
            state=state,
            raw_bytes=written.raw_bytes,
            stored_bytes=written.stored_bytes,
            time=step.facts.time,
            crcs=written.crcs,
            present=written.present,
        )
        self._journal.write(record)
        self.committed += state == "committed"
        if sync:
            self._journal.sync()
            self._unsynced = 0
