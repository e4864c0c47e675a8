"""The scale ledger: what is known of each step, captured or not, joined over the sessions of a run.

Merged columns where rank 0 has published them; rows that it has not reached (a live run's last second, a killed run's
last rows) are merged here from the ranks' own. What only the next step tells reads as unknown until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import NotFoundError, StepNotFoundError, nearest
from gradtap.flags import UNTOUCHED, names_of
from gradtap.read.session import Session
from gradtap.read.summaries import SummaryReader
from gradtap.store.ledger_fields import FIELDS_BY_NAME, LEDGER_FIELDS, RECORD_NAMES, STATE_NAMES, LedgerField
from gradtap.store.merge import merge_field
from gradtap.store.row_specs import rank_prefix
from gradtap.store.rows import read_rows

Array = NDArray[Any]

BLOCK = 4096

SPARSE = 64
"""Rows that lie further apart than this are read one by one."""


class SessionLedger:
    """Ledger rows of one session: row = step - first step."""

    def __init__(self, session: Session, summaries: SummaryReader) -> None:
        self.session = session
        self._summaries = summaries
        self._steps: NDArray[np.int64] = np.empty(0, np.int64)

    def steps(self) -> NDArray[np.int64]:
        """The step of each row so far, -1 where there is no row. Reads on from where the last call ended."""
        while True:
            start = len(self._steps)
            fresh = self.column("step", start, start + BLOCK)
            there = np.flatnonzero(fresh >= 0)
            if not there.size:
                return self._steps
            self._steps = np.concatenate([self._steps, fresh[: there[-1] + 1]])
            if there[-1] + 1 < BLOCK:
                return self._steps

    def column(self, name: str, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of a field, shape (rows, ...). Raises `DamagedError` for damaged rows."""
        field = FIELDS_BY_NAME[name]
        values = np.array(self._merged(name, start, stop))
        if field.merge == "merged":
            return self._norms(values, start, stop)
        marker = "state" if field.late else "step"
        known = values if name == marker else self._merged(marker, start, stop)
        behind = np.flatnonzero(known == FIELDS_BY_NAME[marker].fill)
        if behind.size:
            first, last = int(behind[0]), int(behind[-1]) + 1
            values[behind] = self._from_ranks(field, start + first, start + last)[behind - first]
        return values

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
            if bits & UNTOUCHED and self.column("touched", row, row + 1)[0, param] >= 0:
                bits &= ~UNTOUCHED
            found.append((value, bits))
        return found

    def _at(self, name: str, rows: NDArray[np.int64]) -> Array:
        if not rows.size:
            return np.empty(0)
        first, last = int(rows[0]), int(rows[-1])
        if last - first < SPARSE * len(rows):
            return self.column(name, first, last + 1)[rows - first]
        return np.concatenate([self.column(name, row, row + 1) for row in rows.tolist()])

    def _merged(self, name: str, start: int, stop: int) -> Array:
        return read_rows(self.session.paths.zarr, self.session.rows[f"_ledger/{name}"], start, stop)

    def _from_ranks(self, field: LedgerField, start: int, stop: int) -> Array:
        ranks = 1 if field.merge == "first" else self.session.plan.world
        return merge_field(field, [self._rank_rows(rank, field.name, start, stop) for rank in range(ranks)])

    def _rank_rows(self, rank: int, name: str, start: int, stop: int) -> Array:
        spec = self.session.rank_rows(rank)[f"{rank_prefix('ledger', rank)}/{name}"]
        return read_rows(self.session.paths.zarr, spec, start, stop)

    def _norms(self, values: Array, start: int, stop: int) -> Array:
        unknown = np.flatnonzero(np.isnan(values))
        if unknown.size and "l2" in self._summaries.stats:
            captures = self.column("capture", start, stop)[unknown]
            committed = self.column("record", start, stop)[unknown] == 1
            rows = unknown[committed & (captures >= 0)]
            every = np.arange(len(self._summaries.names))
            found = self._summaries.rows("l2", captures[committed & (captures >= 0)].astype(np.int64), every)
            values[rows] = np.hypot.reduce(found, axis=1)
        return values


class Ledger(Mapping[str, Array]):
    """The ledger of a run as of the moment it was taken: `ledger["factor"]` is an array aligned with `ledger.steps`.

    Where a step has a complete capture its row is that capture's; else that of the newest session that made the step.
    `state` and `record` are arrays of names, `session` of session names; the other columns have the dtypes of
    `gradtap.store.ledger_fields`. Columns are read when asked for.
    """

    def __init__(self, ledgers: Sequence[SessionLedger], prefer: Callable[[int], int | None]) -> None:
        self._ledgers = tuple(ledgers)
        chosen: dict[int, tuple[int, int]] = {}
        for at, ledger in enumerate(self._ledgers):
            steps = ledger.steps()
            chosen |= {int(steps[row]): (at, int(row)) for row in np.flatnonzero(steps >= 0)}
        if len(self._ledgers) > 1:
            self._prefer(chosen, prefer)
        self.steps: tuple[int, ...] = tuple(sorted(chosen))
        self._places = np.array([chosen[s] for s in self.steps], np.int64).reshape(-1, 2)

    def _prefer(self, chosen: dict[int, tuple[int, int]], prefer: Callable[[int], int | None]) -> None:
        for step, (at, _) in chosen.items():
            better = prefer(step)
            if better is not None and better != at:
                first = self._ledgers[better].session.first_step
                if first is not None:
                    chosen[step] = better, step - first

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return ("session", *(field.name for field in LEDGER_FIELDS))

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Any:
        return iter(self.columns)

    def __getitem__(self, name: str) -> Array:
        """One column, aligned with `steps`. Raises `NotFoundError` for an unknown one."""
        return self._column(name, np.arange(len(self.steps)))

    def row(self, step: int) -> dict[str, Any]:
        """All that is known of one step; `flags` as names. Raises `StepNotFoundError`."""
        at = int(np.searchsorted(self.steps, step)) if self.steps else 0
        if at >= len(self.steps) or self.steps[at] != step:
            near = list(self.steps[max(0, at - 2) : at + 2])
            raise StepNotFoundError(f"the ledger has no step {step}; the nearest are {near}, see ledger.steps")
        found = {name: self._column(name, np.array([at]))[0] for name in self.columns}
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in found.items()}
        return plain | {"flags": names_of(int(plain["flags"]))}

    def _column(self, name: str, which: NDArray[np.int64]) -> Array:
        if name == "session":
            names = np.array([ledger.session.name for ledger in self._ledgers] or [""])
            return np.asarray(names[self._places[which, 0]])
        if name not in FIELDS_BY_NAME:
            raise NotFoundError(f"the ledger has no column {name!r}{nearest(name, self.columns)} See ledger.columns")
        places = self._places[which]
        parts = [(at, np.flatnonzero(places[:, 0] == at)) for at in np.unique(places[:, 0])]
        found = [(rows, self._read(int(at), name, places[rows, 1])) for at, rows in parts]
        return _named(name, _joined(FIELDS_BY_NAME[name], len(which), found))

    def _read(self, at: int, name: str, rows: NDArray[np.int64]) -> Array:
        first = int(rows.min())
        return self._ledgers[at].column(name, first, int(rows.max()) + 1)[rows - first]


def _joined(field: LedgerField, length: int, parts: Sequence[tuple[NDArray[np.int64], Array]]) -> Array:
    # Sessions may differ in parameter groups: a narrower one is filled up.
    width = tuple(max(sizes) for sizes in zip(*(p.shape[1:] for _, p in parts), strict=True)) if parts else ()
    out = np.full((length, *width), field.fill, field.dtype)
    for rows, part in parts:
        # A column has at most one axis beside the rows.
        if part.ndim == 1:
            out[rows] = part
        else:
            out[rows, : part.shape[1]] = part
    return out


def _named(name: str, values: Array) -> Array:
    names = {"record": RECORD_NAMES, "state": STATE_NAMES}.get(name)
    if names is None:
        return values
    return np.array([names.get(int(v), f"code-{int(v)}") for v in values], dtype=np.str_)
