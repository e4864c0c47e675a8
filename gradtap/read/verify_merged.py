"""Compares the merged rows of a session with what the ranks' own rows and the journals make of them.

A crc32c does not bind a row to its place: rows that lie under another name pass every check of their bytes. Not here:
whether rows read at all (`verify_rows`), and the gradients themselves (`verify_norms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import GradtapError
from gradtap.flags import NORM_MISMATCH
from gradtap.read.assemble import SessionReader
from gradtap.read.report import Findings
from gradtap.read.verify_journals import Journals
from gradtap.store.ledger_fields import RANK_FIELDS, SUMMARY_STATS, LedgerField
from gradtap.store.row_specs import TIME_PATH, rank_prefix
from gradtap.store.rows import RowSpec

Array = NDArray[Any]

COPY = "one of the two lies in the wrong place or was changed; restore both from a copy of the run"
BLOCK_BYTES = 32 * 2**20
BLOCK_ROWS = 4096
CLOSE = 1e-6
"""Relative difference at which two computations of one statistic count as the same."""

ROUNDING = 1e-9

LAST_FLUSHED = "wait_seconds"
"""The field of a ledger row that the writer brings to the disk last of those that are known at the step."""


class MergedCheck:
    """The merged rows of one session; `published` has the step of each capture that was published, -1 elsewhere."""

    def __init__(
        self,
        reader: SessionReader,
        journals: Journals,
        published: NDArray[np.int64],
        specs: Mapping[str, RowSpec],
        found: Findings,
    ) -> None:
        self.reader, self.session = reader, reader.session
        self.journals, self.specs, self.found = journals, specs, found
        reach = min(len(published), len(journals.steps))
        self.steps = np.where(published[:reach] == journals.steps[:reach], journals.steps[:reach], -1)

    def check(self) -> None:
        """All comparisons. Rows that do not read are passed by: `check_rows` has named them."""
        for field in RANK_FIELDS:
            if self._both(field):
                for start, stop in _blocks(self.journals.rows, self._ledger_bytes(field)):
                    self._quietly(self._check_field, field, start, stop)
        for start, stop in _blocks(self.journals.rows, 8):
            self._quietly(self._check_numbers, start, stop)
        for stat in SUMMARY_STATS:
            if f"_summary/{stat}" in self.specs:
                self._quietly(self._check_stat, stat)
        for start, stop in _blocks(self.journals.rows, 8):
            self._quietly(self._check_norm, start, stop)
        self._quietly(self._check_times)

    def _quietly(self, part: Any, *args: Any) -> None:
        try:
            part(*args)
        except GradtapError:
            # Found by the checks of metadata and of rows, which look at every file.
            return

    def _both(self, field: LedgerField) -> bool:
        ranks = range(1 if field.merge == "first" else self.session.plan.world)
        paths = (f"{rank_prefix('ledger', rank)}/{field.name}" for rank in ranks)
        return f"_ledger/{field.name}" in self.specs and all(path in self.specs for path in paths)

    def _ledger_bytes(self, field: LedgerField) -> int:
        ranks = 1 if field.merge == "first" else self.session.plan.world
        return max(1, self.specs[f"_ledger/{field.name}"].row_bytes) * (ranks + 1)

    def _check_field(self, field: LedgerField, start: int, stop: int) -> None:
        spec = self.specs[f"_ledger/{field.name}"]
        # The mark first and the ranks last: a job that writes meanwhile goes the other way.
        whole = self._published_rows(field, start, stop)
        held = self.session.read(spec, start, stop)
        steps = self._steps_of_all(start, stop)
        own = self.reader.ledger.from_ranks(field, start, stop)
        if own.shape != held.shape:
            return
        if field.name == "flags":
            # Rank 0 adds it to rows of all ranks when the norms disagree.
            held, own = held & ~np.uint64(NORM_MISMATCH), own & ~np.uint64(NORM_MISMATCH)
        other = ~_same(held, own)
        there = whole | ~_alike(held, np.asarray(spec.fill, held.dtype)).reshape(stop - start, -1).all(axis=1)
        skip = field.name == "step" and self.journals.closed
        for at in np.flatnonzero(other & there & (steps >= 0)) if not skip else ():
            row = start + int(at)
            what = f"{field.name} of ledger row {row} is {_said(held[at])}, the ranks' own rows make {_said(own[at])}"
            self.found.damage(self._file(spec, row), what, COPY, step=int(steps[at]))

    def _published_rows(self, field: LedgerField, start: int, stop: int) -> NDArray[np.bool_]:
        """Rows of which this field must have been published; late fields are compared where they are there."""
        if field.late:
            return np.zeros(stop - start, bool)
        if self.journals.closed:
            return np.ones(stop - start, bool)
        spec = self.specs.get(f"_ledger/{LAST_FLUSHED}")
        return np.zeros(stop - start, bool) if spec is None else ~np.isnan(self.session.read(spec, start, stop))

    def _steps_of_all(self, start: int, stop: int) -> NDArray[np.int64]:
        """The step of each row that every rank has, by rank 0; -1 for the others."""
        steps = np.empty(0, np.int64)
        for rank in range(self.session.plan.world):
            spec = self.specs.get(f"{rank_prefix('ledger', rank)}/step")
            own = np.full(stop - start, -1) if spec is None else self.session.read(spec, start, stop)
            steps = np.array(own, np.int64) if rank == 0 else np.where(own >= 0, steps, -1)
        return steps

    def _check_numbers(self, start: int, stop: int) -> None:
        """`step` = row + first step, in the merged rows and in those of each rank."""
        first = self.session.first_step
        if first is None:
            return
        wanted = np.arange(start, stop) + first
        for prefix in ("_ledger", *(rank_prefix("ledger", rank) for rank in range(self.session.plan.world))):
            spec = self.specs.get(f"{prefix}/step")
            if spec is None:
                continue
            held = self.session.read(spec, start, stop)
            for at in np.flatnonzero((held >= 0) & (held != wanted)):
                what = f"step of ledger row {start + int(at)} is {held[at]}, the schedule makes it {wanted[at]}"
                self.found.damage(self._file(spec, start + int(at)), what, COPY, step=int(wanted[at]))

    def _check_norm(self, start: int, stop: int) -> None:
        spec, captures = self.specs.get("_ledger/norm"), self.specs.get("_ledger/capture")
        if spec is None or captures is None or "l2" not in self.reader.summaries.stats:
            return
        held, numbers = self.session.read(spec, start, stop), self.session.read(captures, start, stop)
        known = (numbers >= 0) & (numbers < len(self.steps)) & ~np.isnan(held)
        known[known] &= self.steps[numbers[known]] >= 0
        rows = np.flatnonzero(known)
        ordered = rows[np.argsort(numbers[rows], kind="stable")]
        if not rows.size or (np.diff(numbers[ordered]) <= 0).any():
            return
        made = self.reader.ledger.captured_norms(numbers[ordered].astype(np.int64))
        for at, norm in zip(ordered, made, strict=True):
            if not _alike(held[at], norm, CLOSE):
                row = start + int(at)
                what = f"norm of ledger row {row} is {held[at]:.9g}, the l2 of its capture make {norm:.9g}"
                self.found.damage(self._file(spec, row), what, COPY, step=int(self.steps[numbers[at]]))

    def _check_stat(self, stat: str) -> None:
        spec, summaries = self.specs[f"_summary/{stat}"], self.reader.summaries
        names = summaries.names_of(stat)
        for start, stop in _blocks(len(self.steps), spec.row_bytes + summaries.ranks_row_bytes(stat)):
            held, own = self.session.read(spec, start, stop), summaries.from_ranks(stat, start, stop)
            # Pieces whose means cancel leave a small one behind: their spread says what its rounding may be.
            spread = self.specs.get("_summary/std") if stat == "mean" else None
            slack: Any = 0.0
            if spread is not None and spread.row_shape == spec.row_shape:
                slack = ROUNDING * np.nan_to_num(self.session.read(spread, start, stop), posinf=0.0)
            same = _alike(held, own, CLOSE, slack)
            same = same if same.ndim == 2 else np.asarray(same.all(axis=2))
            for at in np.flatnonzero((self.steps[start:stop] >= 0) & ~same.all(axis=1)):
                capture, columns = start + int(at), np.flatnonzero(~same[at])
                one, more = columns[0], f" and {len(columns) - 1} parameters more" if len(columns) > 1 else ""
                what = (
                    f"{stat} of capture {capture} is {_said(held[at][one])} for {names[one]!r}{more}, the ranks' own "
                    f"rows make {_said(own[at][one])}"
                )
                file, step = self._file(spec, capture), int(self.steps[capture])
                self.found.damage(file, what, COPY, param=names[one], step=step)

    def _check_times(self) -> None:
        spec = self.specs.get(TIME_PATH)
        if spec is None:
            return
        for start, stop in _blocks(len(self.steps), 8):
            held, times = self.session.read(spec, start, stop), self.journals.times[start:stop]
            for at in np.flatnonzero((self.steps[start:stop] >= 0) & ~_alike(held, times)):
                capture = start + int(at)
                what = f"the time of capture {capture} is {held[at]}, the journals say {times[at]}"
                self.found.damage(self._file(spec, capture), what, COPY, step=int(self.steps[capture]))

    def _file(self, spec: RowSpec, row: int) -> Any:
        return spec.file(self.session.paths.zarr, row // spec.rows)


def _blocks(length: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    size = min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1, row_bytes)))
    for start in range(0, length, size):
        yield start, min(length, start + size)


def _same(held: Array, own: Array) -> NDArray[np.bool_]:
    """Which rows are equal in all their values."""
    return np.asarray(_alike(held, own).reshape(len(held), -1).all(axis=1))


def _alike(held: Array, own: Array, close: float = 0.0, slack: Any = 0.0) -> NDArray[np.bool_]:
    """Which values are equal, a NaN being equal to a NaN; floating ones within `close` of their size, plus `slack`."""
    if np.asarray(held).dtype.kind != "f":
        return np.asarray(held == own)
    with np.errstate(all="ignore"):
        near = np.abs(held - own) <= close * np.maximum(np.abs(held), np.abs(own)) + slack
    finite = np.isfinite(held) & np.isfinite(own)
    return np.asarray((held == own) | (np.isnan(held) & np.isnan(own)) | (near & finite))


def _said(value: Any) -> str:
    values = np.asarray(value)
    shown = ", ".join(f"{v:.9g}" if values.dtype.kind == "f" else str(v) for v in values.ravel()[:4])
    return f"[{shown}{', ...' if values.size > 4 else ''}]" if values.ndim else shown
