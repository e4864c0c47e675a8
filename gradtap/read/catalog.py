"""The runs of one or more folders, by name: what a server serves, and what `--run` chooses from.

A name is looked up among the runs that were found; it never becomes a part of a path. Not here: finding them
(`discover`), HTTP.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gradtap.errors import GradtapError, RunNotFoundError, StoreError, UsageError, near_names
from gradtap.read.discover import RunEntry, discover, slug_of, told_apart
from gradtap.read.place import folder_of, read_run_there
from gradtap.read.run import Run

Key = tuple[Path, str]
"""A folder and the id of the run in it: another run may take its place."""

MOST_WITH_FILES = 8
"""Runs that hold files open at a time; each may hold some dozens, and a process often may have 1024."""


class Catalog:
    """The runs in `stores`: each a run's folder, or a folder of runs. Looked over again every `every` seconds at most.

    For any thread. Raises `UsageError` for a store that is no path. A store that is not there is no error here: `check`
    says so, and every look-up that finds nothing.
    """

    def __init__(
        self,
        stores: Sequence[str | os.PathLike[str]],
        *,
        every: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(stores, str | os.PathLike):
            raise UsageError(f"stores are {stores!r}; give a list of folders, such as [{os.fspath(stores)!r}]")
        # The process may go to another folder later.
        self.stores = tuple(Path(os.path.abspath(folder_of(store))) for store in stores)
        self.names = tuple({os.fspath(store), os.path.realpath(store)} for store in self.stores)
        """The paths that each store goes by: as it was given, and where its links lead."""
        self._every = every
        self._clock = clock
        self._lock = threading.RLock()
        self._looking = threading.Lock()
        self._scanned = -float("inf")
        self._entries: tuple[RunEntry, ...] = ()
        self._open: dict[Key, Run] = {}
        self._failed: dict[Key, GradtapError] = {}

    def entries(self) -> tuple[RunEntry, ...]:
        """Every run, by store and name; those that do not open, and folders that do not read, have their `error`."""
        if self._clock() - self._scanned >= self._every:
            self._look_again()
        return self.known()

    def known(self) -> tuple[RunEntry, ...]:
        """The entries as of the last look, without another one: touches no disk."""
        with self._lock:
            return tuple(replace(e, error=e.error or self._failed.get((e.path, e.id))) for e in self._entries)

    def check(self) -> None:
        """Raise the `StoreError` of the first store that is lost: not there any more, or closed to this process."""
        for entry in self.entries():
            if entry.folder and entry.within == "." and entry.error is not None:
                raise entry.error

    def count(self, run: str) -> int:
        """How many runs had this id at the last look: copies of a folder share it. Touches no disk."""
        with self._lock:
            return sum(entry.id == run for entry in self._entries)

    def find(self, name: str) -> RunEntry:
        """The run of that slug or id.

        Raises `RunNotFoundError` with near names, or with all of them where several share the name; `StoreError` where
        it may lie in a folder that cannot be looked into.
        """
        entries = self.entries()
        found = [entry for entry in entries if name in (entry.slug, entry.id) and name]
        if len(found) == 1:
            return found[0]
        if not found:
            closed = [entry.error for entry in entries if entry.folder and entry.error is not None]
            if closed:
                raise StoreError(f"there may be a run {name!r}, but not all folders read: {closed[0]}") from closed[0]
            found = [entry for entry in entries if _shares(entry, name)]
        names = [entry.slug for entry in found]
        if names:
            raise RunNotFoundError(f"{len(names)} runs go by {name!r}: {', '.join(names)}; ask for one of them").noting(
                did_you_mean=names
            )
        raise _not_found(name, [entry.slug for entry in entries])

    def open(self, name: str) -> Run:
        """The run itself, kept open. Raises as `find`, and the error of a run that does not open; it is tried anew."""
        entry = self.find(name)
        key = entry.path, entry.id
        with self._lock:
            kept = self._open.pop(key, None)
            if kept is not None:
                self._open[key] = kept
        if kept is None:
            if entry.folder and entry.error is not None:
                raise entry.error
            kept = self._opened(key)
        self._trim()
        return kept

    def only(self, name: str | None = None) -> RunEntry:
        """The run of that name; without one, the only run there is.

        Raises as `find`; `UsageError` with the names where there are several; `NotARunError` where there is none.
        """
        if name is not None:
            return self.find(name)
        self.check()
        entries = self.entries()
        if len(entries) == 1:
            return entries[0]
        if not entries:
            for store in self.stores:
                read_run_there(store)
            raise RunNotFoundError("no store was given, so there is no run; give the folder of a run")
        names = [entry.slug for entry in entries]
        raise UsageError(
            f"{len(names)} runs are there: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}; choose one with "
            f"--run, such as --run {names[0]}"
        ).noting(runs=names)

    def close(self) -> None:
        """Let go of all runs and their files. What is asked for later is opened anew."""
        with self._lock:
            runs, self._open = list(self._open.values()), {}
        for run in runs:
            run.close()

    def _opened(self, key: Key) -> Run:
        # Not under the lock: one slow folder must not keep the others waiting.
        try:
            run = Run(key[0])
        except GradtapError as error:
            with self._lock:
                self._failed[key] = error
            raise
        with self._lock:
            self._failed.pop(key, None)
            return self._open.setdefault((key[0], run.id), run)

    def _trim(self) -> None:
        with self._lock:
            idle = list(self._open.values())[:-MOST_WITH_FILES]
        for run in idle:
            # They stay, with all that is known of them; only their files are let go.
            run.close()

    def _look_again(self) -> None:
        # Only who has nothing yet waits for another one's look: a slow disk holds up one request, not all.
        if not self._looking.acquire(blocking=self._scanned == -float("inf")):
            return
        try:
            if self._clock() - self._scanned >= self._every:
                self._take(self._found())
        finally:
            self._looking.release()

    def _found(self) -> tuple[RunEntry, ...]:
        found = []
        chosen: dict[str, tuple[bool, RunEntry]] = {}
        for store in self.stores:
            root = os.path.realpath(store)
            for entry in discover(store):
                # One folder may be reached by two stores, or by a link; a way without links below the store is its own.
                where = os.path.realpath(entry.path)
                own = where == os.path.normpath(os.path.join(root, entry.within))
                if where not in chosen or (own and not chosen[where][0]):
                    chosen[where] = own, entry
                found.append((where, entry))
        return told_apart(entry for where, entry in found if chosen[where][1] is entry)

    def _take(self, entries: tuple[RunEntry, ...]) -> None:
        self.names = tuple({os.fspath(store), os.path.realpath(store)} for store in self.stores)
        keys = {(entry.path, entry.id) for entry in entries}
        with self._lock:
            self._entries, self._scanned = entries, self._clock()
            gone = [self._open.pop(key) for key in list(self._open) if key not in keys]
            self._failed = {key: error for key, error in self._failed.items() if key in keys}
        for run in gone:
            run.close()


def _shares(entry: RunEntry, name: str) -> bool:
    """Whether the entry would go by that name if it were the only one."""
    return entry.slug != name and slug_of(entry.path) == name


def _not_found(name: str, known: list[str]) -> RunNotFoundError:
    near = near_names(name, known)
    there = f"there are {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}" if known else "there is none yet"
    words = f"did you mean {', '.join(near)}?" if near else there
    return RunNotFoundError(f"no run {name!r}; {words}").noting(did_you_mean=near)
