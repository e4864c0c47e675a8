"""Which runs lie in a folder, and the name that each goes by. Looks at names and `run.json` alone.

Not here: opening runs and keeping them (`catalog`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradtap.errors import GradtapError, StoreError
from gradtap.read.place import read_run_there
from gradtap.store.files import store_error
from gradtap.store.paths import session_folders
from gradtap.store.runfile import RUN_NAME

DEPTH = 3
"""Folders below a store that are looked into for runs: project/experiment/run.gradtap, and no whole disk."""

MOST_NAME = 96
"""Characters of a folder's name that its slug keeps, so that there is room to tell two apart."""

RUN_SLUG = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""What a run may be called in an address."""

_ODD = re.compile(r"[^A-Za-z0-9._-]+")

_OF_THE_DISK = frozenset({"lost+found"})
"""Folders that a file system makes for itself, closed to all but its owner: there is no run in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run of a catalog, or one folder that may hold runs and does not read.

    `slug` is the name that it is asked for by; `id` the run's own, 32 hexadecimal digits, empty where run.json does not
    read; `within` its path as seen from the store, "." for the store itself. `error` says why it cannot be opened.
    """

    slug: str
    path: Path
    id: str = ""
    within: str = "."
    error: GradtapError | None = None
    folder: bool = False
    """No run itself: what it holds is unknown, because it cannot be listed."""


def discover(store: Path) -> Iterator[RunEntry]:
    """The run that a folder is, or the runs below it, in the order of their names; not yet told apart.

    Links are followed, out of the store too: who can make a link in a store decides what is served of it. `Catalog`
    lists a run once that is reached in several ways, by the way without links if there is one.
    Hidden folders and what lies within runs are passed over. Raises nothing: what does not read is an entry with its
    error, the store itself too.
    """
    yield from _look(store, store, DEPTH)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, one that lost its run.json too. Raises `OSError` where it cannot be looked at."""
    # `Path.is_file` says no for a folder that is closed; that would be a run that is silently absent.
    try:
        os.stat(folder / RUN_NAME)
    except FileNotFoundError:
        return bool(session_folders(folder))
    except NotADirectoryError:
        return False
    return True


def told_apart(entries: Iterable[RunEntry]) -> tuple[RunEntry, ...]:
    """The entries with names that no two share: those of one name get 8 digits of the run's id, or of the path."""
    found = list(entries)
    count = Counter(entry.slug for entry in found)
    ids = Counter((entry.slug, entry.id[:8]) for entry in found)
    taken = {slug for slug, times in count.items() if times == 1}
    made = []
    for entry in found:
        if count[entry.slug] > 1:
            own = bool(entry.id) and ids[entry.slug, entry.id[:8]] == 1
            marks = [entry.id[:8]] if own else []
            marks += [_digest(entry.within)[:8], _digest(os.fspath(entry.path))[:8], _digest(os.fspath(entry.path))]
            slug = next(s for s in (f"{entry.slug}-{mark}"[:128] for mark in marks) if s not in taken)
            taken.add(slug)
            entry = replace(entry, slug=slug)
        made.append(entry)
    return tuple(made)


def slug_of(folder: Path) -> str:
    """A folder's name without `.gradtap`, as an address takes it."""
    name = os.path.basename(os.path.abspath(folder)).removesuffix(".gradtap")
    return _ODD.sub("-", name)[:MOST_NAME].lstrip("._-") or "run"


def _look(folder: Path, store: Path, depth: int) -> Iterator[RunEntry]:
    try:
        if is_run(folder):
            yield _entry(folder, store)
            return
        below = _folders(folder)
    except OSError as error:
        if folder == store or not isinstance(error, FileNotFoundError):
            why = error if isinstance(error, StoreError) else _unlisted(folder, error)
            yield RunEntry(slug=slug_of(folder), path=folder, within=_within(folder, store), error=why, folder=True)
        return
    if depth:
        for child in below:
            yield from _look(child, store, depth - 1)


def _folders(folder: Path) -> Sequence[Path]:
    with os.scandir(folder) as entries:
        seen = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in _OF_THE_DISK]
        names = [entry.name for entry in seen if _may_be_folder(entry)]
    return [folder / name for name in sorted(names)]


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    """Whether there may be runs in it. A link that leads nowhere, or round in a ring, holds nothing."""
    try:
        return entry.is_dir()
    except OSError as error:
        # What cannot be looked at is for the look into it to say: its neighbours have nothing to do with it.
        return error.errno != errno.ELOOP


def _unlisted(folder: Path, error: OSError) -> StoreError:
    if isinstance(error, FileNotFoundError):
        made = StoreError(f"the store {folder} is not there; check that it is mounted, or give another folder")
        made.errno = error.errno
        return made
    return store_error("list", folder, error)


def _entry(folder: Path, store: Path) -> RunEntry:
    found = RunEntry(slug=slug_of(folder), path=folder, within=_within(folder, store))
    try:
        return replace(found, id=read_run_there(folder).run)
    except (GradtapError, OSError, RecursionError) as error:
        why = error if isinstance(error, GradtapError) else StoreError(f"{folder / RUN_NAME} does not read ({error})")
        return replace(found, error=why)


def _within(folder: Path, store: Path) -> str:
    return folder.relative_to(store).as_posix()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
