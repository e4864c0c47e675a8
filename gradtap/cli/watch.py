"""`gradtap watch`: the steps of a run as they come."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer

from gradtap.cli.arguments import RunName, Store
from gradtap.cli.live import KEPT, Screen
from gradtap.cli.news import OPEN, News, following
from gradtap.cli.output import Json, Jsonl, console, form_of, moment, number, say, size, to_json, write
from gradtap.cli.places import asking
from gradtap.errors import NotFoundError, StoreError, UsageError

LINES = 10
"""Known steps that are printed first, as `tail -f` does."""

LEAST = 0.1
"""Seconds: who looks more often keeps a disk busy, and sees nothing sooner."""


def watch(
    store: Store,
    *,
    run: RunName = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after so many new steps.")] = None,
    last: Annotated[
        int | None,
        typer.Option(min=0, help="Steps that are there already to begin with; 10 if not given, many in a live table."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a run that is not there yet.")] = False,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
) -> None:
    """Follow a run: its new steps as they come.

    A live table on a terminal, else a line for each complete step. Ends when nobody writes
    the run any more. --json and --jsonl print one object a step.
    """
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=False)
    if not interval >= LEAST:
        raise UsageError(f"interval is {interval:g}; give {LEAST:g} seconds or more")
    if wait:
        _wait(store, run, interval)
    with asking(store, run) as place, _shown(form, place.label) as show:
        state = ""
        for news in following(place, interval, most=count, last=_before(form) if last is None else last):
            show(news)
            state = news.state
    if state not in OPEN:
        say(f"the run is {state}: nobody writes it now")


def _before(form: str) -> int:
    # The table shows those that fit, and the norms of all of them as a line.
    return KEPT if form == "table" and console().is_terminal else LINES


def _wait(store: str, run: str | None, interval: float) -> None:
    said = False
    while True:
        try:
            with asking(store, run):
                return
        except (StoreError, NotFoundError):
            if not said:
                say(f"waiting for a run at {store}{f' called {run}' if run else ''}")
                said = True
        time.sleep(interval)


@contextlib.contextmanager
def _shown(form: str, label: str) -> Iterator[Any]:
    """What to do with each piece of news."""
    if form != "table":
        named = {"schema": "gradtap.watch/1"} if form == "json" else {}
        yield lambda news: _lines(to_json(named | dict(row)) + "\n" for row in news.rows)
        return
    screen = console()
    if not screen.is_terminal:
        yield lambda news: _lines(_text(row) for row in news.rows)
        return
    from rich.live import Live

    picture = Screen(label)
    # Drawn when there is something new: nothing moves and nothing flickers meanwhile.
    with Live(picture, console=screen, auto_refresh=False, transient=False) as live:

        def show(news: News) -> None:
            picture.add(news)
            live.refresh()

        yield show


def _lines(lines: Iterable[str]) -> None:
    for line in lines:
        write(line)
    # Whoever reads a pipe wants the step now.
    sys.stdout.flush()


def _text(row: Mapping[str, Any]) -> str:
    flags = f"  {' '.join(row['flags'])}" if row["flags"] else ""
    norm, stored = number(row["norm"]), size(row["stored_bytes"] or 0)
    return f"{moment(row['time'])}  step {row['step']}  norm {norm}  {stored}  {row['state'] or '-'}{flags}\n"
