"""`gradtap verify`: whether a store holds what was committed, and what to do where it does not."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtap.cli.arguments import Folder, RunName
from gradtap.cli.exits import DAMAGED
from gradtap.cli.output import Csv, Json, Jsonl, console, emit, form_of, size
from gradtap.cli.places import folder_of_run
from gradtap.query.answer import Answer

if TYPE_CHECKING:
    from gradtap.read.verify import Damage, VerifyReport


def verify(
    store: Folder,
    *,
    run: RunName = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also decode every chunk and check its checksum.")] = False,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """Check that a store holds what was committed.

    Exit code 5 where something is damaged, with file, parameter, step and cure.
    """
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    report = _with_progress(folder_of_run(store, run), deep)
    rows = [asdict(finding) for finding in report.findings]
    facts = {
        "store": store,
        "deep": deep,
        "sound": report.sound,
        "checked": dict(report.checked),
        "notes": [asdict(note) for note in report.notes],
    }
    emit(Answer(query="verify", facts=facts, rows=rows, rows_name="findings"), form, pictures=_pictures(report))
    if not report.sound:
        raise typer.Exit(DAMAGED)


def _with_progress(store: str, deep: bool) -> VerifyReport:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from gradtap.read.verify import verify as check

    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("checking", total=None)
        return check(store, deep=deep, progress=lambda done, total: bar.update(task, completed=done, total=total))


def _pictures(report: VerifyReport) -> list[Any]:
    from rich.text import Text

    texts = [_block("damage", one) for one in report.findings] + [_block("note", one) for one in report.notes]
    counted = _counted(report)
    if not report.sound:
        texts.append(f"{_plural(len(report.findings), 'findings')}; looked at {counted}")
    elif report.deep:
        texts.append(
            f"sound: {counted} decoded; the checksums computed from their bytes are as committed, and stored l2 norms "
            "are those of the gradients"
        )
    else:
        texts.append(
            f"sound as far as looked at: {counted} in place, each with the checksum that was committed beside it; what "
            "the checksums are of was not read (--deep reads and decodes it)"
        )
    return [Text(text) for text in texts]


def _counted(report: VerifyReport) -> str:
    parts = [_plural(count, name) for name, count in report.checked.items() if name != "bytes"]
    size_of = f" ({size(report.checked['bytes'])})" if "bytes" in report.checked else ""
    return ", ".join(parts) + size_of


def _plural(count: int, name: str) -> str:
    return f"{count:,} {name.removesuffix('s') if count == 1 else name}"


def _block(kind: str, found: Damage) -> str:
    where = [found.file]
    where += [f"parameter {found.param}"] if found.param is not None else []
    where += [f"step {found.step}"] if found.step is not None else []
    return f"{kind}: {', '.join(where)}\n  {found.what}\n  cure: {found.cure}\n"
