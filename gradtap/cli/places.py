"""Where a verb asks: STORE and --run become a run in a folder, or on a server."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradtap.cli.output import say
from gradtap.errors import GradtapError, UsageError
from gradtap.remote.address import is_address

if TYPE_CHECKING:
    from gradtap.query.place import Place
    from gradtap.read.catalog import Catalog


@contextlib.contextmanager
def asking(store: str, run: str | None = None) -> Iterator[Place]:
    """As `place_of`, let go of at the end. What a user must know before any answer goes to stderr."""
    place = place_of(store, run)
    try:
        for notice in place.notices():
            say(notice)
        yield place
    finally:
        place.close()


def place_of(store: str, run: str | None = None) -> Place:
    """The run that a command line names: `store` is a folder or an address, `run` chooses where it has several.

    Raises `UsageError` with the names where one must be chosen, `RunNotFoundError` with near names, and as
    `gradtap.open` and `remote_place`.
    """
    if is_address(store):
        from gradtap.remote.address import address_of
        from gradtap.remote.place import remote_place

        return remote_place(address_of(store), run)
    if re.fullmatch(r"[A-Za-z0-9.-]+:[0-9]{1,5}(/.*)?", store) and not os.path.exists(store):
        raise UsageError(f"there is no folder {store}; the address of a server begins with http://: http://{store}")
    from gradtap.query.local import LocalPlace
    from gradtap.read import open

    catalog = _catalog(store, run)
    if catalog is None:
        return LocalPlace(run=open(store), label=store)
    entry = catalog.only(run)
    if entry.error is not None and entry.folder:
        raise entry.error
    return LocalPlace(run=open(entry.path), label=store if entry.within == "." else str(entry.path))


def folder_of_run(store: str, run: str | None = None) -> str:
    """The folder of the run that a command line names, for what only files can tell; it need not open as a run.

    Raises `UsageError` for an address, and as `place_of` where one of several must be chosen.
    """
    if is_address(store):
        raise UsageError(
            f"{store} is a server, and a check looks at the files themselves; run `gradtap verify` on the machine that "
            "has the folder"
        )
    catalog = _catalog(store, run)
    return store if catalog is None else str(catalog.only(run).path)


def _catalog(store: str, run: str | None) -> Catalog | None:
    """The runs to choose from; None where `store` must be the run itself, or an error that opening it tells best."""
    from gradtap.read.catalog import Catalog
    from gradtap.read.discover import is_run
    from gradtap.read.place import folder_of

    folder = folder_of(store)
    if run is not None:
        return Catalog([store])
    try:
        if not folder.is_dir() or is_run(folder):
            return None
        catalog = Catalog([store])
        return catalog if catalog.entries() else None
    except (OSError, GradtapError):
        return None
