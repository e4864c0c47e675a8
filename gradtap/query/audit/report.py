"""The walk over the ledger, part by part, and the answer. A run of a million steps is never in memory whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtap.query.answer import Answer
from gradtap.query.audit.counters import COUNTERS
from gradtap.query.audit.finding import Engine, Finding, Part, Tally
from gradtap.query.audit.missing import NOT_JUDGED
from gradtap.query.audit.parameters import Stale, StaleTally, first_nonfinite, flagged
from gradtap.query.audit.scales import ODD, SCALES, SKIPS
from gradtap.query.audit.windows import WINDOWS

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.read.ledger import Ledger

FINDERS = (*WINDOWS, *SCALES, *COUNTERS)

COLUMNS = (
    *("step", "k", "factor", "loss_scale", "micro_seen", "accum_engine", "accum_loop", "divisor"),
    *("learning_rate", "flags", "state"),
)
ROWS = 2**16
"""Rows of the narrow columns that are looked at together."""

TOUCHED_BYTES = 2**25
"""Bytes of the wide one."""

LEAST = 64
"""Rows that are looked at together however wide they are."""

ORDER = ("error", "warning", "info")


def audit(run: Run) -> Answer:
    """One row for each finding, the gravest first; `not_judged` has what this ledger cannot tell, and what it lacks.

    `steps` are those of the ledger, captured or not. Reads the ledger, and the statistics of one step at most. Raises
    `DamagedError` for a ledger that does not read.
    """
    ledger = run.ledger
    found = _findings(run, ledger)
    known = ledger.steps
    facts = {
        "run": run.id,
        "steps": len(known),
        "first": known[0] if known else None,
        "last": known[-1] if known else None,
        "not_judged": dict(NOT_JUDGED),
    }
    return Answer(query="audit", facts=facts, rows=[asdict(each) for each in found], rows_name="findings")


def findings(run: Run) -> tuple[Finding, ...]:
    """The findings alone. Raises as `audit`."""
    return _findings(run, run.ledger)


def _findings(run: Run, ledger: Ledger) -> tuple[Finding, ...]:
    tallies = {finder.code: Tally(finder=finder) for finder in FINDERS}
    old, decided = StaleTally(), 0
    for session, start, stop in _stretches(ledger):
        source = ledger.sessions[session]
        engine = Engine(name=str(source.head.engine["name"]), settings=source.head.engine.get("settings", {}))
        stale = Stale(params=source.plan.params) if engine.keeps and "touched" in ledger else None
        rows = ROWS if stale is None else max(LEAST, min(ROWS, TOUCHED_BYTES // (4 * max(1, len(stale.params)))))
        for part, begin, end in _parts(ledger, engine, start, stop, rows):
            decided += int(np.count_nonzero(part["state"][part.own] != "unknown"))
            for tally in tallies.values():
                tally.look(part)
            if stale is not None:
                _look_stale(old, stale, part, ledger, begin, end)
    made = [tally.finding(**_more(run, tally, decided)) for tally in tallies.values()]
    known = [each for each in (*made, old.finding()) if each is not None]
    return tuple(sorted(known, key=lambda each: (ORDER.index(each.severity), each.first)))


def _look_stale(old: StaleTally, stale: Stale, part: Part, ledger: Ledger, begin: int, end: int) -> None:
    touched = ledger.part("touched", begin, end) if flagged(part) else None
    if touched is not None:
        # Of sessions that differ in parameters the narrower is filled up.
        touched = touched[:, : len(stale.params)]
    steps, flags = part["step"][part.own], part["flags"][part.own]
    old.add(steps, stale.params, *stale.look(flags, touched))


def _more(run: Run, tally: Tally, decided: int) -> dict[str, Any]:
    """Evidence that is not one row's."""
    if tally.count and tally.finder is SKIPS:
        return {"rate": tally.count / decided, "of": decided}
    if tally.count and tally.finder is ODD:
        return first_nonfinite(run, tally.first)
    return {}


def _stretches(ledger: Ledger) -> Iterator[tuple[int, int, int]]:
    """Session, start and stop of rows that follow each other in one session."""
    at = ledger.sessions_of_rows
    bounds = [0, *(np.flatnonzero(np.diff(at)) + 1).tolist(), len(at)]
    for start, stop in itertools.pairwise(bounds):
        if stop > start:
            yield int(at[start]), start, stop


def _parts(ledger: Ledger, engine: Engine, start: int, stop: int, rows: int) -> Iterator[tuple[Part, int, int]]:
    for begin in range(start, stop, rows):
        end = min(begin + rows, stop)
        low, high = max(begin - 1, start), min(end + 1, stop)
        columns = {name: _column(ledger, name, low, high) for name in COLUMNS}
        yield Part(engine=engine, columns=columns, own=slice(begin - low, end - low)), begin, end


def _column(ledger: Ledger, name: str, low: int, high: int) -> Any:
    if name in ledger:
        return ledger.part(name, low, high)
    # A ledger of another version lacks it: unknown.
    kinds: dict[str, Any] = {"state": "unknown", "flags": np.uint64(0), "k": 0, "step": -1}
    blank = -1 if name in ("micro_seen", "accum_engine", "accum_loop") else np.nan
    return np.full(high - low, kinds.get(name, blank))
