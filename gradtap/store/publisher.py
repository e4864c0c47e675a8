"""Makes complete captures visible to every reader: merged ledger, merged summaries, `_time`, and last `_step`.

Follows the ranks' journals; everything it writes can be rebuilt from the ranks' own rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap import words
from gradtap.config import Settings
from gradtap.flags import NORM_MISMATCH
from gradtap.plan.rules import StepsRule
from gradtap.plan.schedule import ChangeEntry
from gradtap.store.growth import write_group
from gradtap.store.journal_set import JournalSet
from gradtap.store.ledger_fields import EARLY_FIELDS, FIELDS_BY_NAME, LATE_FIELDS
from gradtap.store.norm_check import NormCheck
from gradtap.store.paths import SessionPaths
from gradtap.store.row_merger import RowMerger
from gradtap.store.row_specs import STEP_PATH, TIME_PATH, by_path, merged_specs
from gradtap.store.rows import AppendRows, ReplaceRows, read_rows
from gradtap.store.schedule_log import append_entry, read_schedule
from gradtap.store.session import SessionHead
from gradtap.store.shard import ShardSet
from gradtap.types import Report

BATCH = 1024
"""Most rows taken in one round, so that a round of a follower that fell behind stays bounded."""

AHEAD = 8
"""Steps that a change of the schedule lies ahead of every journal, so that ranks read it in time."""

LAG = 64
"""Captures that a rank may be behind the first one before it is said."""


class Publisher:
    """Synchronous half of the follower: `publish` does one round."""

    def __init__(self, paths: SessionPaths, head: SessionHead, *, settings: Settings, report: Report) -> None:
        self._paths, self._head, self._report = paths, head, report
        share = max(1, settings.open_files // 2)
        self._journals = JournalSet(paths, head.plan.world, most_open=share)
        self._merger = RowMerger(paths, head)
        self._check = NormCheck(head.plan.params)
        self._shards = ShardSet(share)
        self._specs = by_path(merged_specs(head.layout))
        self._append: dict[str, AppendRows] = {}
        self._replace: dict[str, ReplaceRows] = {}
        for path, spec in self._specs.items():
            if spec.mode == "append":
                self._append[path] = AppendRows(paths.zarr, spec, self._shards)
            else:
                self._replace[path] = ReplaceRows(paths.zarr, spec)
        self._length = {"capture": settings.capacity, "row": settings.capacity}
        self._next_capture = self._next_row = self._next_late = 0
        self._mismatch = self._lag_said = False

    def publish(self) -> bool:
        """One round: grow ahead of need, merge new ledger rows, new complete captures, then late fields.

        Whether a round took as many rows as it may, so that more may wait.
        """
        last = self._journals.last()
        closed = {rank: mark.rows for rank, mark in self._journals.closed().items()}
        start, rows = self._next_row, self._merger.ready(self._next_row, BATCH, closed)
        self._grow(captures=max(last.values(), default=-1) + 1, rows=start + rows)
        if rows:
            self._publish_ledger(start, start + rows)
        self._publish_captures(last)
        late = self._publish_late()
        self._flush()
        self._say_lag(last)
        return max(rows, late) >= BATCH

    def unclosed(self) -> list[int]:
        """Ranks whose journal is not marked closed."""
        closed = self._journals.closed()
        return [rank for rank in range(self._head.plan.world) if rank not in closed]

    def progress(self) -> tuple[int, ...]:
        """Changes whenever a rank has journaled more."""
        return tuple(self._journals.last().values())

    def trim(self) -> None:
        """Trim every array to the session's captures and rows. All ranks must have closed."""
        marks = self._journals.closed().values()
        captures, rows = max(mark.captures for mark in marks), max(mark.rows for mark in marks)
        write_group(self._paths, self._head.layout, self._head.codec, captures=captures, rows=rows)

    def seal(self) -> None:
        """Seal the merged arrays. All are tried; raises the first failure."""
        self._shards.close(seal=True)

    def close(self) -> None:
        """Give all files back."""
        self._journals.close()
        self._shards.close()

    def _grow(self, *, captures: int, rows: int) -> None:
        grown = dict(self._length)
        for axis, count in {"capture": captures, "row": rows}.items():
            while count * 4 > grown[axis] * 3:
                grown[axis] *= 2
        if grown != self._length:
            write_group(self._paths, self._head.layout, self._head.codec, captures=grown["capture"], rows=grown["row"])
            self._length = grown

    def _publish_ledger(self, start: int, stop: int) -> None:
        for field in EARLY_FIELDS:
            merged = self._merger.field(field, start, stop)
            if field.name == "flags":
                merged = self._merger.flags(merged, start, stop) | np.uint64(NORM_MISMATCH if self._mismatch else 0)
            self._write(f"_ledger/{field.name}", start, merged)
        self._next_row = stop

    def _publish_captures(self, last: dict[int, int]) -> None:
        """A capture is complete when every rank committed it; later records of every rank make a hole final."""
        if len(last) < self._head.plan.world:
            return
        while self._next_capture <= min(last.values()):
            self._publish_capture(self._next_capture)
            self._next_capture += 1

    def _publish_capture(self, capture: int) -> None:
        heads = [head for head in self._journals.heads(capture) if head is not None and head.state == "committed"]
        if len(heads) < self._head.plan.world:
            return
        steps = {head.step for head in heads}
        if len(steps) != 1:
            self._report(f"ranks disagree on the step of capture {capture}: {sorted(steps)}; it stays invisible")
            return
        for stat, values in self._merger.statistics(capture).items():
            self._write(f"_summary/{stat}", capture, values)
        self._write(TIME_PATH, capture, [np.float64(max(head.time for head in heads))])
        self._write(STEP_PATH, capture, [np.int64(steps.pop())])

    def _publish_late(self) -> int:
        """Late fields are rank 0's; they are known up to the last row whose `state` is. Rows taken.

        A row whose capture is still on its way waits for it: its norm comes from the capture's summary.
        """
        start, stop = self._next_late, min(self._next_row, self._next_late + BATCH)
        captures = self._merger.rank_field(0, "capture", start, stop)
        waiting = np.flatnonzero(captures >= self._next_capture)
        state = self._merger.rank_field(0, "state", start, stop)[: int(waiting[0]) if waiting.size else None]
        known = np.flatnonzero(state != FIELDS_BY_NAME["state"].fill)
        if not known.size:
            return 0
        stop = start + int(known[-1]) + 1
        for field in LATE_FIELDS:
            self._write(f"_ledger/{field.name}", start, self._merger.field(field, start, stop))
        self._publish_norms(start, captures[: stop - start])
        self._next_late = stop
        return stop - start

    def _publish_norms(self, start: int, captures: NDArray[Any]) -> None:
        found = [self._norm(int(capture)) for capture in captures]
        self._write("_ledger/norm", start, [norm for norm, _ in found])
        for row, (norm, whole) in enumerate(found, start):
            if whole and not self._check.done and math.isfinite(norm):
                self._compare(row, norm)

    def _norm(self, capture: int) -> tuple[float, bool]:
        """Norm of what was captured, and whether that was every parameter; NaN where no summary is kept."""
        spec = self._specs.get("_summary/l2")
        if spec is None or capture < 0:
            return math.nan, False
        l2 = read_rows(self._paths.zarr, spec, capture, capture + 1)[0]
        taken = read_rows(self._paths.zarr, self._specs["_summary/zeros"], capture, capture + 1)[0] >= 0
        return (float(np.hypot.reduce(l2[taken])) if taken.any() else math.nan), bool(taken.all())

    def _compare(self, row: int, norm: float) -> None:
        engine = float(self._merger.rank_field(0, "norm_engine", row, row + 1)[0])
        merged = self._merger.field(FIELDS_BY_NAME["flags"], row, row + 1)
        flags = int(self._merger.flags(merged, row, row + 1)[0])
        if self._check.disagrees(norm, engine, flags):
            self._stop_capturing(row, norm, engine)

    def _stop_capturing(self, row: int, norm: float, engine: float) -> None:
        """Label every row there is and to come, and end the schedule a little ahead of all ranks."""
        self._mismatch = True
        self._flush()
        flags = read_rows(self._paths.zarr, self._specs["_ledger/flags"], 0, self._next_row)
        self._write("_ledger/flags", 0, flags | np.uint64(NORM_MISMATCH))
        schedule = read_schedule(self._paths.schedule_log)
        assert schedule is not None  # rows are numbered from its first step
        first = schedule.first_step
        last = self._journals.last()
        heads = [head for capture in set(last.values()) for head in self._journals.heads(capture) if head is not None]
        ahead = max([first + self._next_row, *(head.step for head in heads)]) + AHEAD
        append_entry(self._paths.schedule_log, ChangeEntry(from_step=ahead, rule=StepsRule(()), select=None))
        self._report(
            f"the norm of what was captured at step {first + row} is {norm:.6g}, the engine says {engine:.6g}: the "
            "ownership map or the scale of this engine is not what gradtap expects. Capturing stops, what is stored "
            "is flagged norm-mismatch; please report it with the versions that `gradtap info` prints"
        )

    def _write(self, path: str, start: int, values: Sequence[Any] | NDArray[Any]) -> None:
        if path in self._replace:
            self._replace[path].write(dict(enumerate(values, start)))
            return
        for row, value in enumerate(values, start):
            self._append[path].write(row, value)

    def _flush(self) -> None:
        """`_step` last: a capture that reads as complete has its rows."""
        for path in sorted(self._replace, key=lambda path: (path == STEP_PATH, path)):
            self._replace[path].flush()

    def _say_lag(self, last: dict[int, int]) -> None:
        """A rank that journals no more makes every later capture incomplete: say so while it can be mended."""
        first = max(last.values(), default=-1)
        behind = [rank for rank in range(self._head.plan.world) if first - last.get(rank, -1) > LAG]
        if behind and not self._lag_said:
            self._lag_said = True
            self._report(
                f"{words.ranks(behind)} journaled nothing for more than {LAG} captures, so none since then is "
                "complete; see the output there"
            )
