"""`gradtap steps`: what is known of each step, one line a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from gradtap.cli.arguments import RunName, Store
from gradtap.cli.output import Csv, Json, Jsonl, Listing, emit, form_of, moment, number, say, size
from gradtap.cli.places import asking
from gradtap.query.answer import Answer
from gradtap.query.words import range_of


def steps(
    store: Store,
    *,
    run: RunName = None,
    within: Annotated[
        str, typer.Option("--steps", metavar="A:B:C", help="Steps A up to, not including, B, every C-th.")
    ] = "",
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """List the steps: attempt, time, bytes, state, norm, flags."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    range_of(within)
    with asking(store, run) as place:
        answer = place.steps(within, tags=form in ("json", "jsonl"))
        _warn(answer, within)
        emit(answer, form, pictures=[steps_listing(answer.rows)])


def _warn(answer: Answer, within: str) -> None:
    """What the rows themselves do not make plain to a person."""
    if within and not answer.rows:
        first, last = answer.facts["first"], answer.facts["last"]
        there = "has no steps" if first is None else f"has steps {first} to {last}"
        say(f"--steps {within} selects no step; the run {there}")
    for row in answer.rows:
        if "tags_error" in row:
            say(f"tags of step {row['step']}: {row['tags_error']}")


def steps_listing(rows: Sequence[Mapping[str, Any]]) -> Listing:
    """A table of steps, as `gradtap.query.steps` has them."""
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
