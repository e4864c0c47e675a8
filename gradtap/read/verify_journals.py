"""Checks the journals of one session, and says why captures are not complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradtap import words
from gradtap.errors import GradtapError, StepNotFoundError
from gradtap.plan.chunks import chunk_count
from gradtap.plan.schedule import Schedule
from gradtap.read.assemble import SessionReader
from gradtap.read.report import Findings
from gradtap.read.session import SessionState
from gradtap.store.journal import JournalReader, JournalRecord
from gradtap.store.session import plan_checksum

MOST_ROWS = 2**24
"""Ledger rows looked at on the word of a closed mark alone."""

LOST = "its captures cannot be checked, so they are not served; restore it from a copy of the run"


class Journals:
    """The journals of a session, read once, record by record.

    After `check`: `extent` is the highest capture of any rank + 1, `steps[k]` the step of capture k where every rank
    committed it, else -1, `times[k]` when the last of them did (else NaN), `unreadable` the captures of
    which some record is damaged, `rows` the ledger rows, `whole` whether every rank's journal reads, `closed` whether
    the session was when the check began.
    """

    def __init__(self, reader: SessionReader, found: Findings, *, state: SessionState) -> None:
        self.reader, self.found, self.state = reader, found, state
        self.session = reader.session
        self.closed = state == "closed"
        self.extent = self.rows = 0
        self.whole = True
        self.steps: NDArray[np.int64] = np.empty(0, np.int64)
        self.times: NDArray[np.float64] = np.empty(0)
        self.unreadable: set[int] = set()
        self._open: dict[int, JournalReader] = {}

    def check(self) -> None:
        """All checks of journals."""
        self.reader.captures.refresh()
        for rank in range(self.session.plan.world):
            self._check_header(rank)
        self.whole = len(self._open) == self.session.plan.world
        self.extent = max((self._reach(rank) for rank in self._open), default=0)
        self.rows = max(self._ledger_rows(), *(self._marked_rows(journal) for journal in self._open.values()), 0)
        self.found.expect(self.extent * len(self._open))
        self._check_records()
        self._say_state()
        for journal in self._open.values():
            journal.close()

    def _ledger_rows(self) -> int:
        try:
            return len(self.reader.ledger.steps())
        except GradtapError:
            return 0

    def _marked_rows(self, journal: JournalReader) -> int:
        mark = journal.closed
        return 0 if mark is None else min(mark.rows, MOST_ROWS)

    def _check_header(self, rank: int) -> None:
        path = self.session.paths.journal(rank)
        if not path.exists():
            if self.closed or self.reader.captures.steps.size:
                self.found.damage(path, f"the journal of rank {rank} is missing", LOST)
            elif self.state != "live":
                what = f"rank {rank} wrote no journal: it never began, or its file is lost"
                self.found.note(path, what, "without it no capture is complete; check that all ranks share the store")
            return
        try:
            journal = self._open[rank] = JournalReader(path)
            header, closed = journal.header, journal.closed
        except GradtapError as error:
            self.found.damage(path, str(error), LOST)
            if rank in self._open:
                self._open.pop(rank).close()
            return
        self.found.checked["journals"] += 1
        plan = self.session.plan
        wanted = (rank, self.session.nonce, chunk_count(plan, rank), plan_checksum(plan))
        if (header.rank, header.nonce, header.chunks, header.plan_crc) != wanted:
            self.found.damage(path, f"it is the journal of another rank, session or plan than {rank} of this one", LOST)
            self._open.pop(rank).close()
        elif self.closed and closed is None:
            self.found.damage(path, "the session is closed, this journal is not", LOST)

    def _reach(self, rank: int) -> int:
        journal = self._open[rank]
        reach, mark = journal.last() + 1, journal.closed
        if mark is not None and mark.captures > reach:
            # At the very end a damaged record looks like one that was cut off by a kill; a closed journal has none.
            self.unreadable.update(range(reach, min(mark.captures, journal.slots)))
            what = f"the records from capture {reach} on are lost, {mark.captures} captures were recorded"
            self.found.damage(journal.path, what, LOST)
        return max(reach, 0 if mark is None else min(mark.captures, journal.slots))

    def _check_records(self) -> None:
        schedule = self._schedule()
        self.steps = np.full(self.extent, -1, np.int64)
        self.times = np.full(self.extent, np.nan)
        why: dict[str, list[tuple[int, int | None]]] = defaultdict(list)
        for capture in range(self.extent):
            records = {rank: self._record(rank, capture) for rank in self._open}
            self.found.advance(len(records))
            due = _due(schedule, capture)
            self._check_steps(capture, due, records)
            steps = {r.step for r in records.values() if r is not None and r.state == "committed"}
            reason = self._incomplete(records)
            if reason is None and len(steps) == 1:
                self.steps[capture] = steps.pop()
                self.times[capture] = max(r.time for r in records.values() if r is not None)
            elif capture not in self.unreadable:
                why[reason or "ranks recorded different steps under one number"].append((capture, due))
        if self.state != "live":
            for reason, captures in why.items():
                self._say_incomplete(reason, captures)

    def _record(self, rank: int, capture: int) -> JournalRecord | None:
        journal = self._open[rank]
        try:
            record = journal.record(capture)
        except GradtapError as error:
            self.unreadable.add(capture)
            self.found.damage(journal.path, str(error), f"this capture is not served; {LOST}", step=None)
            return None
        self.found.checked["records"] += record is not None
        return record

    def _check_steps(self, capture: int, due: int | None, records: dict[int, JournalRecord | None]) -> None:
        for rank, record in records.items():
            if record is not None and record.state == "committed" and due is not None and record.step != due:
                what = f"capture {capture} is step {record.step} here, step {due} in the schedule"
                self.found.damage(self._open[rank].path, what, LOST, step=record.step)

    def _incomplete(self, records: dict[int, JournalRecord | None]) -> str | None:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank in range(self.session.plan.world):
            record = records.get(rank)
            ranks["missing" if record is None else record.state].append(rank)
        if ranks["dropped"]:
            return f"{words.ranks(ranks['dropped'])} dropped it"
        if ranks["failed"]:
            return f"it failed on {words.ranks(ranks['failed'])}"
        return f"{words.ranks(ranks['missing'])} did not commit it" if ranks["missing"] else None

    def _say_incomplete(self, reason: str, captures: Sequence[tuple[int, int | None]]) -> None:
        shown = ", ".join(str(c if step is None else step) for c, step in captures[:8])
        more = f" and {len(captures) - 8} more" if len(captures) > 8 else ""
        what = f"not complete, steps {shown}{more}: {reason}"
        cure = "readers leave them out; partial=True reads what is there"
        self.found.note(self.session.paths.root, what, cure, step=captures[0][1])

    def _say_state(self) -> None:
        if self.state == "unclosed":
            complete = int(np.count_nonzero(self.steps >= 0))
            what = f"the job ended without closing this session; its {complete} complete captures are readable"
            self.found.note(self.session.paths.session_json, what, "nothing to do: the next start adds a session")
        elif self.state == "live":
            what = "a job is writing this session: what it has not committed yet was not looked at"
            self.found.note(self.session.paths.session_json, what, "check again once it has ended")

    def _schedule(self) -> Schedule | None:
        try:
            return self.session.schedule
        except GradtapError:
            return None


def _due(schedule: Schedule | None, capture: int) -> int | None:
    try:
        return None if schedule is None else schedule.step(capture)
    except StepNotFoundError:
        return None
