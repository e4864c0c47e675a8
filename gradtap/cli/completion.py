"""What a shell is told when it asks how a word may go on: names of runs and parameters, numbers of steps.

Silent about everything that goes wrong: a completion must never spoil the line that is being typed.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from gradtap.query.place import Place

MOST = 200
"""Words that a shell shows without asking."""


def runs_of(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs in STORE."""
    return _fitting(ctx, incomplete, _run_names)


def steps_of(ctx: typer.Context, incomplete: str) -> list[str]:
    """`first`, `last`, and the complete steps of the run."""
    return _fitting(ctx, incomplete, lambda store, run: _of_place(store, run, _steps))


def params_of(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of parameters."""
    return _fitting(ctx, incomplete, lambda store, run: _of_place(store, run, _params))


def _fitting(ctx: typer.Context, incomplete: str, names: Callable[[str, str | None], Iterable[str]]) -> list[str]:
    found = []
    try:
        # A line that ends in an option without its value does not parse, and no argument of it is known.
        store = ctx.params.get("store") or _store_in(os.environ)
        if isinstance(store, str):
            with _silence():
                for name in names(store, ctx.params.get("run")):
                    if name.startswith(incomplete):
                        found.append(name)
                    if len(found) == MOST:
                        break
    except Exception:
        # No store, no server, damage: there is nothing to offer, and the verb itself will say why.
        return []
    return found


def words_of(*words: str) -> Callable[[str], list[str]]:
    """The fixed words of an option."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def _store_in(environment: Mapping[str, str]) -> str | None:
    """The STORE of the line that is being typed, as the shell hands it on."""
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or ""
    words = [word for word in shlex.split(line)[2:] if not word.startswith("-")]
    return words[0] if words else None


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
    sys.stderr.flush()


def _run_names(store: str, run: str | None) -> Iterable[str]:
    from gradtap.remote.address import is_address

    if is_address(store):
        from gradtap.remote.address import address_of
        from gradtap.remote.client import Client
        from gradtap.remote.place import runs_of as remote_runs

        with Client.from_environment(address_of(store).base) as client:
            return [str(row["name"]) for row in remote_runs(client).rows]
    from gradtap.read.catalog import Catalog

    return [entry.slug for entry in Catalog([store]).entries() if not entry.folder]


def _of_place(store: str, run: str | None, names: Callable[[Place], Iterable[str]]) -> Iterable[str]:
    from gradtap.cli.places import place_of

    place = place_of(store, run)
    try:
        return list(names(place))
    finally:
        place.close()


def _steps(place: Place) -> Iterable[str]:
    rows: Iterable[Any] = place.steps().rows
    return ["first", "last", *(str(row["step"]) for row in rows if row["complete"])]


def _params(place: Place) -> Iterable[str]:
    return [row["name"] for row in place.params().rows]
