"""`gradtap steps`: what is known of each step, one line a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtap.cli.arguments import Store
from gradtap.cli.output import Answer, Csv, Json, Jsonl, Listing, emit, form_of, moment, number, opened, size, tags_of
from gradtap.errors import UsageError

if TYPE_CHECKING:
    from gradtap.read import Run


COLUMNS = ("session", "record", "time", "raw_bytes", "stored_bytes", "state", "norm", "flags")
"""Columns of the ledger that the listing shows; one that the run does not have is empty."""


def steps(
    store: Store,
    *,
    within: Annotated[
        str, typer.Option("--range", metavar="A:B:C", help="Steps A up to, not including, B, every C-th.")
    ] = "",
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """List the steps: attempt, time, bytes, state, norm, flags."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    wanted = parse_range(within)
    run = opened(store)
    rows = step_rows(run, wanted, tags=form in ("json", "jsonl"))
    if within and not rows:
        known = run.ledger.steps
        there = f"has steps {known[0]} to {known[-1]}" if known else "has no steps"
        sys.stderr.write(f"gradtap: --range {within} selects no step; the run {there}\n")
    emit(Answer(verb="steps", facts={"store": store}, rows=rows, rows_name="steps", pictures=[_picture(rows)]), form)


def parse_range(text: str) -> Callable[[int], bool]:
    """Whether a step is in `A:B:C` (each part may be left out; a single number is that step).

    Raises `UsageError` for anything else.
    """
    parts = text.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    stride = numbers[2] if len(numbers) == 3 and numbers[2] is not None else 1
    if not 1 <= len(numbers) <= 3 or stride < 1:
        raise UsageError(f"range is {text!r}; give A:B or A:B:C with a positive C, such as 100:200:10")
    start = numbers[0]
    if len(numbers) == 1:
        return lambda step: start is None or step == start
    first, stop = start or 0, math.inf if numbers[1] is None else numbers[1]
    return lambda step: first <= step < stop and (step - first) % stride == 0


def step_rows(run: Run, wanted: Callable[[int], bool], *, tags: bool) -> list[dict[str, Any]]:
    """One row for each step with a ledger row, ascending. `time` is in seconds since 1970-01-01 UTC.

    With `tags` what the training logged with the step, None where that does not read.
    """
    from gradtap.flags import names_of

    ledger, complete = run.ledger, set(run.steps)
    # Whole columns, once: a row at a time would read every column for every step.
    absent = [None] * len(ledger.steps)
    columns = {name: ledger[name].tolist() if name in ledger else absent for name in COLUMNS}
    columns["norm"] = _norms(run, complete, ledger.steps, columns)
    return [
        {
            "step": step,
            "attempt": run.attempts(step)[-1] if step in complete else None,
            "complete": step in complete,
            **{name: column[at] for name, column in columns.items()},
            "flags": list(names_of(columns["flags"][at] or 0)),
            **({"tags": tags_of(run, step)} if tags else {}),
        }
        for at, step in enumerate(ledger.steps)
        if wanted(step)
    ]


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


def _picture(rows: list[dict[str, Any]]) -> Any:
    columns = {
        "step": "right",
        "attempt": "right",
        "complete": "left",
        "time": "left",
        "bytes": "right",
        "state": "left",
        "norm": "right",
        "flags": "left",
    }
    return Listing(
        columns=columns,
        rows=[
            (
                str(row["step"]),
                "-" if row["attempt"] is None else str(row["attempt"]),
                "yes" if row["complete"] else f"no ({row['record']})",
                moment(row["time"]),
                size(row["stored_bytes"] or 0),
                row["state"] or "-",
                number(row["norm"]),
                " ".join(row["flags"]),
            )
            for row in rows
        ],
        short={"time": [moment(row["time"], short=True) for row in rows]},
        drop=("attempt", "bytes"),
    )
