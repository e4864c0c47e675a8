"""`gradtap hist`: how the values of one gradient are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gradtap.cli.arguments import Attempt, Param, RunName, Slice, Step, Store
from gradtap.cli.completion import words_of
from gradtap.cli.output import Csv, Json, Jsonl, emit, facts_grid, form_of
from gradtap.cli.places import asking
from gradtap.query.answer import Answer


def hist(
    store: Store,
    step: Step,
    param: Param,
    *,
    run: RunName = None,
    slice: Slice = "",
    bins: Annotated[int | None, typer.Option(help="Equal bins, for scale linear; 64 if not given.")] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="log2: a bin for each sign and power of two. linear: equal bins.",
            autocompletion=words_of("log2", "linear"),
        ),
    ] = "log2",
    attempt: Attempt = None,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """Show how the values of one gradient are spread.

    The stored histogram, or one counted anew for --slice and --scale linear.
    """
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    with asking(store, run) as place:
        answer = place.hist(param, step, slice=slice, bins=bins, scale=scale, attempt=attempt)
    emit(answer, form, pictures=_pictures(answer) if form == "table" else ())


def _pictures(answer: Answer) -> list[Any]:
    from rich.text import Text

    from gradtap.cli.pictures import histogram, histogram_title

    facts, zero = answer.facts, answer.facts["zero_bin"]
    counts = [row["count"] for row in answer.rows]
    title = histogram_title(counts, zero) if zero is not None else f"values in {len(counts)} equal bins"
    lows = [-math.inf if row["low"] is None else row["low"] for row in answer.rows]
    high = answer.rows[-1]["high"] if answer.rows else 0.0
    edges = [*lows, math.inf if high is None else high]
    header = {
        "parameter": facts["name"] + (f"  slice {facts['slice']}" if facts["slice"] else ""),
        "step": f"{facts['step']} (attempt {facts['attempt']})",
        "dtype": f"captured as {facts['dtype_captured']}",
        "flags": " ".join(facts["flags"]) or "none",
        "from": "the stored summary" if facts["source"] == "summary" else "the values, counted now",
        "not finite": _odd(facts),
    }
    return [facts_grid(header), "", Text(title, style="bold"), histogram(counts, edges, zero)]


def _odd(facts: Mapping[str, Any]) -> str:
    if facts["posinf"] is None:
        return f"{facts['nan']} NaN, {facts['inf']} infinite"
    return f"{facts['nan']} NaN, {facts['posinf']} +inf, {facts['neginf']} -inf"
