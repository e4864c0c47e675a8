"""Makes complete captures visible to every reader: merged ledger, merged summaries, `_time`, and last `_step`.

Follows the ranks' journals; everything it writes can be rebuilt from the ranks' own rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.config import Settings
from gradtap.flags import LATE_TOUCH, NONFINITE, NORM_MISMATCH, UNTOUCHED
from gradtap.plan.chunks import rank_pieces
from gradtap.plan.rules import StepsRule
from gradtap.plan.schedule import ChangeEntry
from gradtap.store.growth import write_group
from gradtap.store.journal import JournalReader
from gradtap.store.ledger_fields import EARLY_FIELDS, FIELDS_BY_NAME, LATE_FIELDS, stats_of
from gradtap.store.merge import merge_field, merge_stats
from gradtap.store.paths import SessionPaths
from gradtap.store.row_specs import STEP_PATH, TIME_PATH, by_path, merged_specs, rank_prefix, rank_specs
from gradtap.store.rows import AppendRows, ReplaceRows, read_rows
from gradtap.store.schedule_log import append_entry
from gradtap.store.session import SessionHead
from gradtap.store.shard import ShardSet
from gradtap.types import Report

Array = NDArray[Any]

BATCH = 1024
"""Most rows taken in one round, so that a round of a follower that fell behind stays bounded."""

CHECKED_CAPTURES = 3
"""Captures whose norm is compared with the engine's own: a wrong ownership map or scale shows at once."""

INCOMPARABLE = UNTOUCHED | LATE_TOUCH | NONFINITE
"""With offload, ZeRO leaves what the window did not touch out of its norm, though it applies it again."""

NORM_TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
"""Relative; the engine sums in the gradient's own precision."""


class Publisher:
    """Synchronous half of the follower: `publish` does one round."""

    def __init__(self, paths: SessionPaths, head: SessionHead, *, settings: Settings, report: Report) -> None:
        self._paths, self._head, self._report = paths, head, report
        self._settings = settings
        self._world = head.plan.world
        self._shards = ShardSet(settings.open_files)
        self._specs = by_path(merged_specs(head.layout))
        self._rank_specs = [by_path(rank_specs(head.layout, rank)) for rank in range(self._world)]
        self._append = {
            path: AppendRows(paths.zarr, spec, self._shards)
            for path, spec in self._specs.items()
            if spec.mode == "append"
        }
        self._replace = {
            path: ReplaceRows(paths.zarr, spec) for path, spec in self._specs.items() if spec.mode == "replace"
        }
        self._journals: dict[int, JournalReader] = {}
        self._length = {"capture": settings.capacity, "row": settings.capacity}
        self._next_capture = self._next_row = self._next_late = 0
        self._checked = 0
        self._stopped = False

    def publish(self) -> bool:
        """One round: grow ahead of need, merge new ledger rows, new complete captures, then late fields.

        Whether a round took as many rows as it may, so that more may wait.
        """
        self._open_journals()
        last = self._last_captures()
        first_row, rows = self._next_row, self._ready_rows()
        self._grow(captures=max(last.values(), default=-1) + 1, rows=first_row + rows)
        if rows:
            self._merge_ledger(first_row, first_row + rows)
            self._next_row += rows
        self._publish_captures(last)
        late = self._merge_late()
        self._flush()
        return max(rows, late) >= BATCH

    def _flush(self) -> None:
        """`_step` last: a capture that reads as complete has its rows."""
        for path in sorted(self._replace, key=lambda path: (path == STEP_PATH, path)):
            self._replace[path].flush()

    def unclosed(self) -> list[int]:
        """Ranks whose journal is not marked closed."""
        self._open_journals()
        return [r for r in range(self._world) if r not in self._journals or self._journals[r].closed is None]

    def progress(self) -> tuple[int, ...]:
        """Changes whenever a rank has journaled more."""
        return tuple(journal.last() for journal in self._journals.values())

    def finish(self) -> None:
        """Seal the merged arrays and trim every array to the session's captures and rows."""
        marks = [self._journals[rank].closed for rank in range(self._world)]
        captures = max((mark.captures for mark in marks if mark), default=0)
        rows = max((mark.rows for mark in marks if mark), default=0)
        self._shards.close(seal=True)
        write_group(self._paths, self._head.layout, self._head.codec, captures=captures, rows=rows)

    def _open_journals(self) -> None:
        for rank in range(self._world):
            if rank not in self._journals and self._paths.journal(rank).exists():
                self._journals[rank] = JournalReader(self._paths.journal(rank))

    def _last_captures(self) -> dict[int, int]:
        return {rank: journal.last() for rank, journal in self._journals.items()}

    def _grow(self, *, captures: int, rows: int) -> None:
        need = {"capture": captures, "row": rows}
        grown = dict(self._length)
        for axis, count in need.items():
            while count * 4 > grown[axis] * 3:
                grown[axis] *= 2
        if grown != self._length:
            write_group(self._paths, self._head.layout, self._head.codec, captures=grown["capture"], rows=grown["row"])
            self._length = grown

    def _ready_rows(self) -> int:
        ready = BATCH
        for rank in range(self._world):
            steps = self._rank_rows("ledger", rank, "step", self._next_row, self._next_row + ready)
            missing = np.flatnonzero(steps < 0)
            ready = int(missing[0]) if missing.size else ready
        return ready

    def _rank_rows(self, kind: str, rank: int, name: str, start: int, stop: int) -> Array:
        spec = self._rank_specs[rank][f"{rank_prefix(kind, rank)}/{name}"]
        return read_rows(self._paths.zarr, spec, start, stop)

    def _merge_ledger(self, start: int, stop: int) -> None:
        for field in EARLY_FIELDS:
            ranks = 1 if field.merge == "first" else self._world
            columns = [self._rank_rows("ledger", rank, field.name, start, stop) for rank in range(ranks)]
            merged = merge_field(field, columns)
            if field.name == "flags" and self._stopped:
                merged = merged | np.uint64(NORM_MISMATCH)
            self._write(f"_ledger/{field.name}", start, merged)

    def _write(self, path: str, start: int, values: Array) -> None:
        if path in self._replace:
            self._replace[path].write({start + i: value for i, value in enumerate(values)})
        else:
            for i, value in enumerate(values):
                self._append[path].write(start + i, value)

    def _publish_captures(self, last: dict[int, int]) -> None:
        """A capture is complete when every rank committed it; later records of every rank make a hole final."""
        if len(last) < self._world:
            return
        reach = min(last.values())
        while self._next_capture <= reach:
            self._publish_capture(self._next_capture)
            self._next_capture += 1

    def _publish_capture(self, capture: int) -> None:
        heads = [self._journals[rank].head(capture) for rank in range(self._world)]
        if any(head is None or head.state != "committed" for head in heads):
            return
        steps = {head.step for head in heads if head}
        if len(steps) != 1:
            self._report(f"ranks disagree on the step of capture {capture}: {sorted(steps)}; it stays invisible")
            return
        self._merge_summary(capture)
        time = max(head.time for head in heads if head)
        self._replace[TIME_PATH].write({capture: np.float64(time)})
        self._replace[STEP_PATH].write({capture: np.int64(steps.pop())})

    def _merge_summary(self, capture: int) -> None:
        stats = stats_of(self._head.summary)
        if not stats:
            return
        plan = self._head.plan
        ranks = [rank for rank in range(self._world) if rank_pieces(plan, rank)]
        pieces = [piece for rank in ranks for piece in rank_pieces(plan, rank)]
        column = {param: i for i, param in enumerate(i for i, p in enumerate(plan.params) if p.stored)}
        owner = np.array([column[piece.param] for piece in pieces], int)
        count = np.array([piece.stop - piece.start for piece in pieces], float)
        rows = {
            stat: np.concatenate(
                [self._rank_rows("summary", rank, stat, capture, capture + 1) for rank in ranks], axis=1
            )
            for stat in stats
        }
        for stat, values in merge_stats(rows, owner, count, len(column)).items():
            self._write(f"_summary/{stat}", capture, values)

    def _merge_late(self) -> int:
        """Late fields are rank 0's; a row's are known when its `state` is, or when a later row's are. Rows taken."""
        stop = min(self._next_row, self._next_late + BATCH)
        if stop <= self._next_late:
            return 0
        state = self._rank_rows("ledger", 0, "state", self._next_late, stop)
        captures = self._rank_rows("ledger", 0, "capture", self._next_late, stop)
        waiting = np.flatnonzero(captures >= self._next_capture)
        known = np.flatnonzero(state[: int(waiting[0]) if waiting.size else None] != FIELDS_BY_NAME["state"].fill)
        if not known.size:
            return 0
        stop = self._next_late + int(known[-1]) + 1
        for field in LATE_FIELDS:
            self._write(
                f"_ledger/{field.name}",
                self._next_late,
                self._rank_rows("ledger", 0, field.name, self._next_late, stop),
            )
        self._merge_norm(self._next_late, stop)
        taken, self._next_late = stop - self._next_late, stop
        return taken

    def _merge_norm(self, start: int, stop: int) -> None:
        captures = self._rank_rows("ledger", 0, "capture", start, stop)
        engine = self._rank_rows("ledger", 0, "norm_engine", start, stop)
        norms = np.full(stop - start, math.nan)
        for i, capture in enumerate(captures):
            if self._head.summary == "none" or not 0 <= capture < self._next_capture:
                continue
            l2 = read_rows(self._paths.zarr, self._specs["_summary/l2"], int(capture), int(capture) + 1)
            norms[i] = np.hypot.reduce(l2[0])
            self._check_norm(start + i, float(norms[i]), float(engine[i]))
        self._write("_ledger/norm", start, norms)

    def _check_norm(self, row: int, norm: float, engine: float) -> None:
        if self._checked >= CHECKED_CAPTURES or not (math.isfinite(norm) and math.isfinite(engine)):
            return
        ranks = [self._rank_rows("ledger", rank, "flags", row, row + 1) for rank in range(self._world)]
        if int(np.bitwise_or.reduce(np.concatenate(ranks))) & INCOMPARABLE:
            return
        self._checked += 1
        tolerance = max(NORM_TOLERANCE[p.dtype] for p in self._head.plan.params if p.stored)
        if abs(norm - engine) > tolerance * max(norm, engine) and not self._stopped:
            self._stop_capturing(row, norm, engine)

    def _stop_capturing(self, row: int, norm: float, engine: float) -> None:
        self._stopped = True
        self._flush()
        flags = read_rows(self._paths.zarr, self._specs["_ledger/flags"], 0, self._next_row)
        self._write("_ledger/flags", 0, flags | np.uint64(NORM_MISMATCH))
        first = int(self._rank_rows("ledger", 0, "step", 0, 1)[0])
        ahead = first + self._next_row + CHECKED_CAPTURES
        append_entry(self._paths.schedule_log, ChangeEntry(from_step=ahead, rule=StepsRule(()), select=None))
        self._report(
            f"the norm of what was captured at step {first + row} is {norm:.6g}, the engine says {engine:.6g}: the "
            "ownership map or the scale of this engine is not what gradtap expects. Capturing stops, what is stored "
            "is flagged norm-mismatch; please report it with the versions that `gradtap info` prints"
        )
