"""The ledger of one session: rows that rank 0 has published, else the ranks' own rows, merged here.

Those are a live run's last second and a killed run's last rows. What only the next step tells reads as unknown until
then. Which columns there are, the arrays say themselves; joining sessions is in `ledger`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import DamagedError
from gradtap.flags import UNTOUCHED
from gradtap.read.session import Session
from gradtap.read.summaries import SummaryReader
from gradtap.store.ledger_fields import FIELDS_BY_NAME, LEDGER_FIELDS, LedgerField
from gradtap.store.merge import merge_field, settle_untouched
from gradtap.store.rows import RowSpec, held_rows

Array = NDArray[Any]

BLOCK = 4096

SPARSE = 64
"""Rows that lie further apart than this are read one by one."""


class SessionLedger:
    """Ledger rows of one session: row = step - first step. For any thread."""

    def __init__(self, session: Session, summaries: SummaryReader) -> None:
        self.session = session
        self._summaries = summaries
        self._steps: NDArray[np.int64] = np.empty(0, np.int64)

    @functools.cached_property
    def fields(self) -> dict[str, LedgerField]:
        """The columns of this session by name: those of the table that it has, then those that are not in the table."""
        arrays = self.session.arrays
        known = {f.name: f for f in LEDGER_FIELDS if self._has(f.name)}
        return known | {name: _plain_field(name, spec) for name, spec in arrays.unknown_columns().items()}

    def _has(self, name: str) -> bool:
        try:
            return self.session.arrays.get(f"_ledger/{name}") is not None
        except DamagedError:
            # It is there, and reading it says what is wrong with it.
            return True

    def steps(self) -> NDArray[np.int64]:
        """The step of each row so far, -1 where there is no row. Reads on from where the last call ended."""
        known = self._steps
        while True:
            start = len(known)
            fresh = self.column("step", start, start + BLOCK)
            there = np.flatnonzero(fresh >= 0)
            if there.size:
                known = self._steps = np.concatenate([known, fresh[: there[-1] + 1]])
            if not there.size or there[-1] + 1 < BLOCK:
                return known

    def column(self, name: str, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of a field, shape (rows, ...); its fill, no values wide, where the session lacks it.

        Raises `DamagedError` for damaged rows.
        """
        field = self.fields.get(name) or FIELDS_BY_NAME[name]
        spec = self.session.arrays.get(f"_ledger/{name}")
        if spec is None and name != "step":
            return _blank(field, stop - start)
        values = _blank(field, stop - start) if spec is None else np.array(self.session.read(spec, start, stop))
        if name not in FIELDS_BY_NAME:
            return values
        if field.merge == "merged":
            return self._norms(values, start, stop)
        marker = _marker(field)
        known = values if name == marker else self._published(marker, start, stop)
        published = known != FIELDS_BY_NAME[marker].fill
        lost = self._lost(spec, values, published, start)
        if lost.any() and field.name == "flags":
            # What the comparison of norms found stands in the merged rows alone.
            raise self._gone(spec, start + int(np.flatnonzero(lost)[0]))
        behind = np.flatnonzero(~published | lost)
        if behind.size:
            first, last = int(behind[0]), int(behind[-1]) + 1
            values[behind] = self.from_ranks(field, start + first, start + last)[behind - first]
            self._refuse_absent(spec, lost, start)
        return values

    def _lost(self, spec: RowSpec | None, values: Array, published: NDArray[np.bool_], start: int) -> NDArray[np.bool_]:
        """Which published rows of a column are not stored: a file that is gone reads as the fill."""
        lost = np.zeros(len(values), bool)
        if spec is None:
            return lost
        suspect = np.flatnonzero(published & _is_blank(values, spec.fill))
        if suspect.size:
            first, last = int(suspect[0]), int(suspect[-1]) + 1
            held = held_rows(self.session.paths.zarr, spec, start + first, start + last)
            lost[suspect] = ~held[suspect - first]
        return lost

    def _refuse_absent(self, spec: RowSpec | None, lost: NDArray[np.bool_], start: int) -> None:
        """Raise `DamagedError` for lost rows that no rank has either, so that nothing could take their place."""
        at = np.flatnonzero(lost)
        if not at.size:
            return
        first, last = int(at[0]), int(at[-1]) + 1
        steps = self.from_ranks(FIELDS_BY_NAME["step"], start + first, start + last)[at - first]
        if (steps < 0).any():
            raise self._gone(spec, start + int(at[np.flatnonzero(steps < 0)[0]]))

    def _gone(self, spec: RowSpec | None, row: int) -> DamagedError:
        assert spec is not None, "only a stored column has lost rows"
        file = spec.file(self.session.paths.zarr, row // spec.rows)
        return DamagedError(f"{file} is missing, though row {row} of it was published; run `gradtap verify`")

    def facts(self, steps: Sequence[int], param: int) -> list[tuple[float, int]]:
        """Factor and flags of one parameter at ascending steps of this session, one pair for each.

        UNTOUCHED is that of the parameter, not of the step. Factor NaN, no flags, where there is no row.
        """
        first = self.session.first_step
        if first is None:
            return [(float("nan"), 0)] * len(steps)
        rows = np.array(steps, np.int64) - first
        factor, flags = self._at("factor", rows), self._at("flags", rows)
        found = []
        for row, value, bits in zip(rows.tolist(), factor.tolist(), flags.tolist(), strict=True):
            # The bit says that some parameter was not reached; only then is it worth asking which.
            if bits & UNTOUCHED and (self.column("touched", row, row + 1)[0, param : param + 1] >= 0).any():
                bits &= ~UNTOUCHED
            found.append((value, bits))
        return found

    def settled(self, steps: Sequence[int]) -> bool:
        """Whether the rows of ascending steps are final: the session is closed, or all of a row is published."""
        first = self.session.first_step
        if self.session.closed is not None:
            return True
        if first is None or not steps:
            return False
        states = self._published("state", steps[0] - first, steps[-1] - first + 1)
        return bool((states[np.array(steps, np.int64) - steps[0]] != FIELDS_BY_NAME["state"].fill).all())

    def _at(self, name: str, rows: NDArray[np.int64]) -> Array:
        if not rows.size:
            return np.empty(0)
        first, last = int(rows[0]), int(rows[-1])
        if last - first < SPARSE * len(rows):
            return self.column(name, first, last + 1)[rows - first]
        return np.concatenate([self.column(name, row, row + 1) for row in rows.tolist()])

    def _published(self, name: str, start: int, stop: int) -> Array:
        spec = self.session.arrays.get(f"_ledger/{name}")
        return _blank(FIELDS_BY_NAME[name], stop - start) if spec is None else self.session.read(spec, start, stop)

    def from_ranks(self, field: LedgerField, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of a field, merged here from the ranks' own rows. Raises `DamagedError`."""
        ranks = range(1 if field.merge == "first" else self.session.plan.world)
        merged = merge_field(field, [self._rank_rows(rank, field, start, stop) for rank in ranks])
        if field.name != "flags":
            return merged
        touched = self.from_ranks(FIELDS_BY_NAME["touched"], start, stop)
        stored = np.array([p.stored for p in self.session.plan.params], bool)
        if touched.shape[1] != len(stored):
            return merged
        written = self.from_ranks(FIELDS_BY_NAME["step"], start, stop) >= 0
        return settle_untouched(merged, touched, stored, written)

    def _rank_rows(self, rank: int, field: LedgerField, start: int, stop: int) -> Array:
        spec = self.session.arrays.rank("ledger", rank, field.name)
        if spec is not None:
            values = self.session.read(spec, start, stop)
            marker = self.session.arrays.rank("ledger", rank, _marker(field))
            if marker is not None and marker is not spec:
                written = self.session.read(marker, start, stop) != FIELDS_BY_NAME[_marker(field)].fill
                lost = np.flatnonzero(self._lost(spec, values, written, start))
                if lost.size:
                    raise self._gone(spec, start + int(lost[0]))
            return values
        # A rank that has not begun yet; as wide as the merged rows, so that ranks still fit together.
        merged = self.session.arrays.get(f"_ledger/{field.name}")
        return _blank(field, stop - start) if merged is None else merged.blank(stop - start)

    def _norms(self, values: Array, start: int, stop: int) -> Array:
        unknown = np.flatnonzero(np.isnan(values))
        if unknown.size and "l2" in self._summaries.stats:
            captures = self.column("capture", start, stop)[unknown]
            committed = self.column("record", start, stop)[unknown] == 1
            wanted = committed & (captures >= 0)
            values[unknown[wanted]] = self.captured_norms(captures[wanted].astype(np.int64))
        return values

    def captured_norms(self, captures: NDArray[np.int64]) -> Array:
        """Global norms of what was captured: a parameter that the selection left out does not count."""
        l2 = self._summaries.rows("l2", captures, np.arange(len(self._summaries.names_of("l2"))))
        taken = self._summaries.taken(captures)
        if taken is None:
            return np.asarray(np.hypot.reduce(l2, axis=1))
        norms = np.hypot.reduce(np.where(taken, l2, 0.0), axis=1)
        return np.where(taken.any(axis=1), norms, np.nan)


def _marker(field: LedgerField) -> str:
    """The column that says whether a row of this one is written."""
    return "state" if field.late else "step"


def _is_blank(values: Array, fill: float | int) -> NDArray[np.bool_]:
    """Rows that hold nothing but the fill."""
    blank = np.isnan(values) if values.dtype.kind == "f" and np.isnan(fill) else values == fill
    return np.asarray(blank.reshape(len(values), -1).all(axis=1))


def _plain_field(name: str, spec: RowSpec) -> LedgerField:
    about = str(spec.attributes.get("long_name", ""))
    return LedgerField(name, spec.dtype, spec.fill, "merged", about, wide="group" if spec.row_shape else "")


def _blank(field: LedgerField, rows: int) -> Array:
    return np.full((rows, 0) if field.wide else rows, field.fill, field.dtype)
