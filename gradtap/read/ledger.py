"""The scale ledger: what is known of each step, captured or not, joined over the sessions of a run.

How the rows of one session are read is in `session_ledger`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import NotFoundError, StepNotFoundError, UsageError, nearest
from gradtap.flags import names_of
from gradtap.read.attempts import last_of_each
from gradtap.read.session import Session
from gradtap.read.session_ledger import SessionLedger
from gradtap.read.steps import one_step
from gradtap.store.ledger_fields import FIELDS_BY_NAME, LEDGER_FIELDS, RECORD_NAMES, STATE_NAMES, LedgerField

Array = NDArray[Any]
Numbers = NDArray[np.int64]


class Ledger(Mapping[str, Array]):
    """The ledger of a run as of the moment it was taken: `ledger["factor"]` is an array aligned with `ledger.steps`.

    Where a step has a complete capture its row is that capture's; else that of the newest session that made the step.
    `state` and `record` are arrays of names, `session` of session names; the other columns have the dtypes of
    `gradtap.store.ledger_fields`, or, where a newer gradtap wrote one that this version does not know, its own. A
    column that only some sessions have reads as unknown in the others. Columns are read when asked for.
    """

    def __init__(self, ledgers: Sequence[SessionLedger], newest: tuple[Numbers, Numbers]) -> None:
        """`newest`: complete steps, ascending, and for each the index in `ledgers` whose attempt is in force."""
        self._ledgers = tuple(ledgers)
        known = [ledger.steps() for ledger in self._ledgers]
        rows = [np.flatnonzero(steps >= 0).astype(np.int64) for steps in known]
        steps = np.concatenate([np.empty(0, np.int64), *(k[r] for k, r in zip(known, rows, strict=True))])
        at = np.concatenate([np.empty(0, np.int64), *(np.full(len(r), i, np.int64) for i, r in enumerate(rows))])
        order = np.lexsort((at, steps))
        order = order[last_of_each(steps[order])]
        self._steps, self._at = steps[order], at[order]
        self._rows = np.concatenate([np.empty(0, np.int64), *rows])[order]
        if len(self._ledgers) > 1:
            self._prefer(*newest)

    def _prefer(self, complete: Numbers, sessions: Numbers) -> None:
        _, mine, theirs = np.intersect1d(self._steps, complete, assume_unique=True, return_indices=True)
        better = self._at.copy()
        better[mine] = sessions[theirs]
        for at in np.unique(better[better != self._at]):
            first = self._ledgers[at].session.first_step
            if first is not None:
                moved = (better == at) & (self._at != at)
                self._at[moved], self._rows[moved] = at, self._steps[moved] - first

    @functools.cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a row, ascending."""
        return tuple(self._steps.tolist())

    @functools.cached_property
    def _fields(self) -> dict[str, LedgerField]:
        """The columns that some session has; of the newest one's kind."""
        found = {name: field for ledger in self._ledgers for name, field in ledger.fields.items()}
        known = [f for f in LEDGER_FIELDS if f.name in found or not self._ledgers]
        return {f.name: f for f in known} | {n: found[n] for n in sorted(found) if n not in FIELDS_BY_NAME}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that some session of the run has."""
        return ("session", *self._fields)

    def __repr__(self) -> str:
        steps = self.steps
        span = f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no steps"
        return f"<gradtap ledger: {span}; columns {', '.join(self.columns)}>"

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Array:
        """One column, aligned with `steps`. Raises `NotFoundError` for an unknown one, `UsageError` for no name."""
        if not isinstance(name, str):
            raise UsageError(f"a column of the ledger is asked for by its name, not by {name!r}; see ledger.columns")
        return self._column(name, np.arange(len(self._steps)))

    def part(self, name: str, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of a column, counted as in `steps`: what a walk over a long run takes at a time.

        Raises as `ledger[name]`.
        """
        return self._column(name, np.arange(start, min(stop, len(self._steps))))

    @property
    def sessions_of_rows(self) -> Numbers:
        """Index of the session whose row each step has, aligned with `steps`."""
        return self._at.copy()

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that these indices are of, oldest first."""
        return tuple(ledger.session for ledger in self._ledgers)

    def row(self, step: int) -> dict[str, Any]:
        """All that is known of one step; `flags` as names. Raises `StepNotFoundError`."""
        at = self._index(step)
        found = {name: self._column(name, np.array([at]))[0] for name in self.columns}
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in found.items()}
        return plain | {"flags": names_of(int(plain.get("flags", 0)))}

    def session_of(self, step: int) -> int:
        """Index of the session whose row a step has. Raises `StepNotFoundError`."""
        return int(self._at[self._index(step)])

    def _index(self, step: int) -> int:
        step = one_step(step)
        at = int(np.searchsorted(self._steps, step))
        if at >= len(self._steps) or self._steps[at] != step:
            near = self._steps[max(0, at - 2) : at + 2].tolist()
            nearby = f"the nearest are {', '.join(map(str, near))}" if near else "it has no row yet"
            raise StepNotFoundError(f"the ledger has no step {step}; {nearby}, see ledger.steps")
        return at

    def _column(self, name: str, which: NDArray[np.int64]) -> Array:
        at, rows = self._at[which], self._rows[which]
        if name == "session":
            names = np.array([ledger.session.name for ledger in self._ledgers] or [""])
            return np.asarray(names[at])
        field = self._fields.get(name)
        if field is None:
            near = nearest(name, self.columns)
            raise NotFoundError(f"the ledger has no column {name!r}{near + ' See' if near else '; see'} ledger.columns")
        parts = [(int(a), np.flatnonzero(at == a)) for a in np.unique(at)]
        found = [(own, self._read(a, name, rows[own])) for a, own in parts if self._alike(a, field)]
        return _named(name, _joined(field, len(which), found))

    def _alike(self, at: int, field: LedgerField) -> bool:
        own = self._ledgers[at].fields.get(field.name)
        return own is not None and (own.dtype, own.wide) == (field.dtype, field.wide)

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
