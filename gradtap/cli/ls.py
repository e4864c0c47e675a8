"""`gradtap ls`: the parameters of a run, in model order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtap.cli.arguments import Pattern, RunName, Store
from gradtap.cli.completion import steps_of
from gradtap.cli.output import Csv, Json, Jsonl, Listing, emit, form_of, number, shape_text
from gradtap.cli.places import asking
from gradtap.query.answer import Answer

if TYPE_CHECKING:
    from gradtap.query.place import Place


def ls(
    store: Store,
    pattern: Pattern = "",
    *,
    run: RunName = None,
    step: Annotated[
        str, typer.Option(help="Step of the norms: a number, `first` or `last`.", autocompletion=steps_of)
    ] = "last",
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """List the parameters: shape, dtype, layout, norm, status."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    with asking(store, run) as place:
        answer = place.params(pattern, step=step)
        emit(answer, form, pictures=[_picture(answer.rows, _title(place, answer))] if form == "table" else ())


def _title(place: Place, answer: Answer) -> str:
    if answer.facts["step"] is not None:
        return f"norms of step {answer.facts['step']}"
    yet = " yet" if place.info().facts["state"] in ("live", "empty") else ""
    return f"no complete step{yet}" if answer.rows else f"no session{yet}"


def _picture(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    columns = {
        "name": "left",
        "shape": "right",
        "dtype": "left",
        "arrays": "right",
        "chunk": "right",
        "norm": "right",
        "status": "left",
    }
    cells = [
        (
            row["name"],
            shape_text(row["shape"]),
            row["dtype"],
            str(row["arrays"]),
            "-" if row["chunk"] is None else shape_text(row["chunk"]),
            number(row["norm"]),
            row["status"],
        )
        for row in rows
    ]
    return Listing(columns=columns, rows=cells, title=title, drop=("arrays", "chunk", "dtype"))
