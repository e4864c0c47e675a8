"""One answer, four forms: a table for eyes, `--json`, `--jsonl` and `--csv` for programs.

Data goes to stdout, everything said about it to stderr. Nothing here knows a verb.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradtap.errors import UsageError
from gradtap.query.answer import Answer, plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

Form = Literal["table", "json", "jsonl", "csv"]

Json = Annotated[bool, typer.Option("--json", help="One JSON object, with a schema name.")]
Jsonl = Annotated[bool, typer.Option("--jsonl", help="One JSON object a line.")]
Csv = Annotated[bool, typer.Option("--csv", help="Comma-separated values with a header line.")]


GAP = "  "
"""Between two columns of a listing."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

PIPE_WIDTH = 200
"""Columns where there is no terminal: a row of a table stays one line for grep."""


def form_of(*, as_json: bool, as_jsonl: bool, as_csv: bool) -> Form:
    """The one form that was asked for.

    Raises `UsageError` when there is more than one.
    """
    forms: tuple[Form, ...] = ("json", "jsonl", "csv")
    asked = [form for form, on in zip(forms, (as_json, as_jsonl, as_csv), strict=True) if on]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(f'--{form}' for form in asked)} exclude each other; give one of them")
    return asked[0] if asked else "table"


def emit(
    answer: Answer,
    form: Form,
    *,
    pictures: Sequence[RenderableType] = (),
    table: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write an answer to stdout in one form: `pictures` for eyes, and as CSV the rows of `table` where they differ."""
    if form == "table":
        draw(pictures)
    elif form == "json":
        write(dumped(answer.body()) + "\n")
    elif form == "jsonl":
        for row in answer.rows if answer.rows_name else [answer.facts]:
            write(to_json(row) + "\n")
    else:
        facts = [{"field": name, "value": value} for name, value in answer.facts.items()]
        write(_csv(table if table is not None else answer.rows if answer.rows_name else facts))


def draw(pictures: Sequence[RenderableType]) -> None:
    """Write pictures to stdout, one below the other; without blanks at the ends of lines where it is no terminal."""
    screen = console()
    # Captured and written here: rich's own writing ends the process with 1 when the reader has left.
    with screen.capture() as captured:
        for picture in pictures:
            # A listing does not cut a name that is wider than the screen, so neither may the screen.
            screen.print(picture, crop=False)
    text = captured.get()
    write(text if screen.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def say(text: str) -> None:
    """One line on stderr, beside the data."""
    sys.stderr.write(f"gradtap: {visible(text)}\n")


def visible(text: str) -> str:
    """The text with control characters escaped: a name, or what a server says, must not steer a terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def write(text: str) -> None:
    """Write text to stdout."""
    # Line by line: of one large write into a pipe some kernels report success though the reader left halfway.
    sys.stdout.writelines(text.splitlines(keepends=True))


def console(*, stderr: bool = False) -> Console:
    """A console of rich, which knows the terminal's width and honours NO_COLOR."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, width=fixed)


def to_json(value: Mapping[str, Any]) -> str:
    """JSON of one object on a line. NaN and infinities, which JSON lacks, become null and are counted."""
    return dumped(plain(value))


def dumped(body: Any) -> str:
    """JSON of what is plain already."""
    # What a stream escapes for want of a character is no escape of JSON.
    encoding = getattr(sys.stdout, "encoding", None) or ""
    return json.dumps(body, allow_nan=False, ensure_ascii=encoding.lower().replace("-", "") != "utf8")


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, (list, tuple, Mapping)) for item in value):
            return json.dumps(plain({"": value})[""])
        return "x".join(map(str, value)) if all(isinstance(item, int) for item in value) else " ".join(map(str, value))
    if isinstance(value, Mapping):
        return to_json(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A table of texts, one line a row. No cell is folded or cut: a narrow screen gets shorter cells and fewer columns.

    `columns` maps a heading to "left" or "right". Where the screen is too narrow, the columns of `short` get the texts
    there, then those of `drop` are left out, one after the other, until the rest fits.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    short: Mapping[str, Sequence[str]] = field(default_factory=dict)
    drop: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        cells = self._fitting(options.max_width)
        widths = {name: _width([name, *texts]) for name, texts in cells.items()}
        if self.title:
            yield Text(self.title, style="bold", no_wrap=True, overflow="ignore")
        yield self._line({name: name for name in cells}, widths, "bold")
        yield Text("─" * (sum(widths.values()) + len(GAP) * (len(widths) - 1)), no_wrap=True, overflow="ignore")
        for at in range(len(self.rows)):
            yield self._line({name: texts[at] for name, texts in cells.items()}, widths, "")

    def _fitting(self, room: int) -> dict[str, list[str]]:
        cells = {name: [row[at] for row in self.rows] for at, name in enumerate(self.columns)}
        changes = [(name, list(texts)) for name, texts in self.short.items()] + [(name, None) for name in self.drop]
        for name, texts in changes:
            if sum(_width([n, *t]) + len(GAP) for n, t in cells.items()) - len(GAP) <= room:
                break
            if texts is None:
                del cells[name]
            else:
                cells[name] = texts
        return cells

    def _line(self, texts: Mapping[str, str], widths: Mapping[str, int], style: str) -> Text:
        from rich.cells import cell_len
        from rich.text import Text

        parts = []
        for name, text in texts.items():
            blank = " " * (widths[name] - cell_len(text))
            parts.append(blank + text if self.columns[name] == "right" else text + blank)
        return Text(GAP.join(parts).rstrip(), style=style, no_wrap=True, overflow="ignore")


def _width(texts: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts))


def facts_grid(facts: Mapping[str, str]) -> RenderableType:
    """Two columns: the names of facts, and their values as text."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(Text(name, style="bold"), Text(value))
    return grid


def size(count: float) -> str:
    """Bytes for eyes, in powers of 1024: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def shape_text(shape: Sequence[int]) -> str:
    """`512x128`, or `scalar` for no axes."""
    return "x".join(map(str, shape)) or "scalar"


def number(value: float | None) -> str:
    """A number with four digits for eyes; `-` for none, `nan` and `inf` as they are."""
    return "-" if value is None else f"{value:.4g}"


def moment(seconds: float | None, *, short: bool = False) -> str:
    """Seconds since 1970 as local time, without the day where `short`; `-` for none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    from datetime import datetime

    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S" if short else "%Y-%m-%d %H:%M:%S")
