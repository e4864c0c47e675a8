"""What is known of each step: one row a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradtap.errors import DamagedError
from gradtap.flags import names_of
from gradtap.query.answer import Answer
from gradtap.query.words import holds, range_of

if TYPE_CHECKING:
    from gradtap.read import Run

COLUMNS = ("session", "record", "time", "raw_bytes", "stored_bytes", "state", "norm", "flags")
"""Columns of the ledger that a row has; one that the run does not have is empty."""


def steps(run: Run, within: str = "", *, tags: bool = False) -> Answer:
    """One row for each step that the ledger has, captured or not, ascending; `first` and `last` are those of the run.

    `within` is a range of steps. `time` is in seconds since 1970-01-01 UTC. With `tags` what the training logged with
    the step, None where that does not read, and why under `tags_error`. Raises `UsageError` for another range.
    """
    wanted = range_of(within)
    ledger, complete = run.ledger, set(run.steps)
    chosen = [at for at, step in enumerate(ledger.steps) if holds(wanted, step)]
    numbers = [ledger.steps[at] for at in chosen]
    # A column at a time: a row at a time would read every column for every step. Plain values of the chosen rows alone.
    absent = [None] * len(chosen)
    columns = {name: ledger[name][chosen].tolist() if name in ledger else absent for name in COLUMNS}
    columns["norm"] = _norms(run, complete, numbers, columns)
    attempts = run.attempt_counts(numbers)
    rows = [
        {
            "step": step,
            "attempt": attempt or None,
            "complete": step in complete,
            **{name: column[at] for name, column in columns.items()},
            "flags": list(names_of(columns["flags"][at] or 0)),
            **(tags_of(run, step) if tags else {}),
        }
        for at, (step, attempt) in enumerate(zip(numbers, attempts, strict=True))
    ]
    known = ledger.steps
    facts = {"run": run.id, "first": known[0] if known else None, "last": known[-1] if known else None}
    return Answer(query="steps", facts=facts, rows=rows, rows_name="steps")


def tags_of(run: Run, step: int) -> dict[str, Any]:
    """What the training logged with a step as `tags`; None, and `tags_error`, where that does not read."""
    try:
        return {"tags": run.tags_of(step)}
    except DamagedError as error:
        return {"tags": None, "tags_error": str(error)}


def _norms(run: Run, complete: set[int], steps: Sequence[int], columns: Mapping[str, list[Any]]) -> list[float | None]:
    """The norms, None where there is none to know: nothing was captured, or its session keeps no summaries."""
    norms = columns["norm"]
    odd = [at for at, norm in enumerate(norms) if norm is not None and math.isnan(norm)]
    if not odd:
        return norms
    plain = {session.name for session in run.sessions if session.summary == "none"}
    for at in odd:
        if steps[at] not in complete or columns["session"][at] in plain:
            norms[at] = None
    return norms
