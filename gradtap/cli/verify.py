"""`gradtap verify`: whether a store holds what was committed, and what to do where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtap.cli.arguments import Store
from gradtap.cli.exits import DAMAGED
from gradtap.cli.output import Answer, Csv, Json, Jsonl, console, emit, form_of, table

if TYPE_CHECKING:
    from gradtap.read.verify import VerifyReport


def verify(
    store: Store,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Also decode every chunk and check its checksum.")] = False,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """Check a run; exit code 5 and one finding for each damage, with its file and cure."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    report = _with_progress(store, deep)
    rows = [{"file": d.file, "param": d.param, "step": d.step, "what": d.what, "cure": d.cure} for d in report.findings]
    facts = {"store": store, "deep": deep, "sound": not rows, "checked": dict(report.checked)}
    emit(Answer(verb="verify", facts=facts, rows=rows, rows_name="findings", pictures=_pictures(facts, rows)), form)
    if rows:
        raise typer.Exit(DAMAGED)


def _with_progress(store: str, deep: bool) -> VerifyReport:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from gradtap.read.verify import verify as check

    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("checking", total=None)
        return check(store, deep=deep, progress=lambda done, total: bar.update(task, completed=done, total=total))


def _pictures(facts: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    from rich.text import Text

    counted = ", ".join(f"{count} {name}" for name, count in facts["checked"].items())
    if not rows:
        more = "" if facts["deep"] else "; --deep also checks the bytes of every chunk"
        return [Text(f"sound: {counted} checked{more}")]
    columns = {"file": "left", "parameter": "left", "step": "right", "what": "left", "cure": "left"}
    cells = ([_text(row[name]) for name in ("file", "param", "step", "what", "cure")] for row in rows)
    return [table(columns, cells), Text(f"{len(rows)} findings; {counted} checked")]


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
