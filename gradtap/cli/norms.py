"""`gradtap norms`: a stored statistic of each parameter over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from gradtap.cli.arguments import Pattern, RunName, Store
from gradtap.cli.completion import words_of
from gradtap.cli.output import Csv, Json, Jsonl, emit, form_of
from gradtap.cli.places import asking
from gradtap.query.answer import Answer
from gradtap.query.words import range_of


def norms(
    store: Store,
    pattern: Pattern = "",
    *,
    run: RunName = None,
    steps: Annotated[
        str, typer.Option(metavar="A:B:C", help="Steps A up to, not including, B, every C-th; all if not given.")
    ] = "",
    stat: Annotated[
        str,
        typer.Option(
            help="l2, l1, absmax, mean, std, zeros, nan or inf.",
            autocompletion=words_of("l2", "l1", "absmax", "mean", "std", "zeros", "nan", "inf"),
        ),
    ] = "l2",
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """Show a statistic of each parameter over the steps.

    A heat map for eyes; --csv has a row for each parameter and a column for each step.
    """
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    range_of(steps)
    with asking(store, run) as place:
        answer = place.norms(pattern, steps=steps, stat=stat)
    if form == "jsonl":
        # A line must make sense alone.
        known = {"stat": answer.facts["stat"], "steps": answer.facts["steps"]}
        answer = replace(answer, rows=[{"name": row["name"], **known, "values": row["values"]} for row in answer.rows])
    emit(answer, form, pictures=_pictures(answer) if form == "table" else (), table=_table(answer, form))


def _table(answer: Answer, form: str) -> Sequence[Mapping[str, Any]] | None:
    """One row for each parameter with a column for each step."""
    if form != "csv":
        return None
    columns = [str(step) for step in answer.facts["steps"]]
    return [{"name": row["name"], **dict(zip(columns, row["values"], strict=True))} for row in answer.rows]


def _pictures(answer: Answer) -> list[Any]:
    from gradtap.cli.pictures import heatmap

    steps, stat = answer.facts["steps"], answer.facts["stat"]
    if not steps or not answer.rows:
        return ["no complete step" if answer.rows or not steps else "no parameter with gradients"]
    # A mean may be negative; the picture is of magnitudes.
    values = [[math.nan if value is None else abs(value) for value in row["values"]] for row in answer.rows]
    what = "size of the mean" if stat == "mean" else stat
    span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return [heatmap(values, [row["name"] for row in answer.rows], steps, f"log10 of {what}, {span}")]
