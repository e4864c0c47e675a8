"""`gradtap audit`: faults of the training loop that the ledger shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from gradtap.cli.arguments import RunName, Store
from gradtap.cli.output import Csv, Json, Jsonl, Listing, dumped, emit, form_of, say
from gradtap.cli.places import asking
from gradtap.query.answer import Answer, plain

FOUND = 1
"""Exit code where there is a finding."""


def audit(
    store: Store,
    *,
    run: RunName = None,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """Look for faults of the training loop; ends with 1 where there is one."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    with asking(store, run) as place:
        answer = place.audit()
        emit(answer, form, pictures=_pictures(answer) if form == "table" else ())
    facts = answer.facts
    if not answer.rows:
        say(f"no finding in {facts['steps']} steps; not judged in full: {', '.join(facts['not_judged'])}")
    else:
        raise typer.Exit(FOUND)


def _pictures(answer: Answer) -> list[Any]:
    from rich.text import Text

    if not answer.rows:
        return [Text(f"no finding in {answer.facts['steps']} steps")]
    pictures: list[Any] = [_listing(answer.rows)]
    for row in answer.rows:
        shown = ", ".join(f"{name} {_short(value)}" for name, value in plain(row["evidence"]).items())
        lines = ["", str(row["code"]), f"  evidence: {shown}", f"  cause: {row['cause']}", f"  cure: {row['cure']}"]
        pictures.append(Text("\n".join(lines)))
    return pictures


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else dumped(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _listing(rows: Sequence[Mapping[str, Any]]) -> Listing:
    return Listing(
        columns={"finding": "left", "severity": "left", "steps": "right", "first": "right", "last": "right"},
        rows=[
            (str(row["code"]), str(row["severity"]), str(row["count"]), str(row["first"]), str(row["last"]))
            for row in rows
        ],
    )
