"""Where a run is: the path that a caller gave, and what to say where its run.json is lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradtap.errors import DamagedError, NotARunError, UsageError
from gradtap.store.paths import session_folders
from gradtap.store.runfile import RUN_NAME, RunFile, read_run

LOST_RUN = (
    "restore run.json from a copy of the run, or call gradtap.attach with this path again: the start makes a new "
    "run.json that lists every whole session"
)


def folder_of(path: object) -> Path:
    """The path of a run's folder. Raises `UsageError` for what is no path, or an address."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(
            f"the path of a run is {path!r}; give the folder of a run as text, such as 'runs/mine.gradtap'"
        )
    if "://" in text:
        raise UsageError(f"{text!r} is an address; this version opens folders only: give the path of a run's folder")
    return Path(text)


def read_run_there(run: Path) -> RunFile:
    """As `read_run`; a run whose run.json alone is missing is damaged, and named as that."""
    try:
        return read_run(run)
    except NotARunError as error:
        there = session_folders(run)
        if not there:
            raise
        raise DamagedError(f"{run / RUN_NAME} is lost; {words_of(there)} in the folder: {LOST_RUN}") from error


def words_of(sessions: Sequence[str]) -> str:
    """How many sessions there are, and which, for a message."""
    names = ", ".join(sessions[:8]) + (", ..." if len(sessions) > 8 else "")
    return f"{len(sessions)} session{'s are' if len(sessions) > 1 else ' is'} ({names})"
