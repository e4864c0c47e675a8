"""Whether a store holds what was committed. Reads only, changes nothing, and may run as often as one likes.

Here: the run as a whole. One session is checked by `verify_session`, its chunks by `verify_chunks`.
"""

from __future__ import annotations

import os
from pathlib import Path

from gradtap.config import Settings
from gradtap.errors import DamagedError, FormatVersionError, GradtapError
from gradtap.read.chunks import FileCache
from gradtap.read.report import Damage, Findings, Progress, VerifyReport
from gradtap.read.session import Session
from gradtap.read.verify_files import check_run_folder
from gradtap.read.verify_session import check_session
from gradtap.store.lock import LOCK_NAME, is_alive, read_lock
from gradtap.store.paths import session_folders
from gradtap.store.runfile import RUN_NAME, read_run

__all__ = ["Damage", "VerifyReport", "verify"]

COPY = "restore it from a copy of the run"
HARMLESS = "nothing to do"


def verify(path: str | os.PathLike[str], deep: bool = False, progress: Progress | None = None) -> VerifyReport:
    """Check a run, live ones too, and say for each damage the file, the parameter, the step and the cure.

    A run that a job is writing meanwhile is looked at as of the beginning. Without `deep`: metadata against the plan,
    every record of every journal, and of every committed chunk that its entry exists, lies in the file, and ends with
    the checksum that the journal has. `deep` also computes the checksum of every chunk and decodes it.
    `progress(done, total)` counts journal records.

    Raises `NotARunError` for a folder that holds no run, `FormatVersionError` for a newer format, `StoreError` for
    what cannot be read at all.
    """
    run = Path(path)
    found = Findings(run, deep=deep, progress=progress)
    files = FileCache()
    try:
        sessions = _sessions(run, found)
        states = [session.state for session in sessions]
        for session, state in zip(sessions, states, strict=True):
            found.checked["sessions"] += 1
            check_session(session, files, found, state=state)
        _check_lock(run, found)
        check_run_folder(run, found, live="live" in states)
    finally:
        files.close()
    return found.report()


def _sessions(run: Path, found: Findings) -> list[Session]:
    there = session_folders(run)
    try:
        listed = list(read_run(run).sessions)
    except DamagedError as error:
        found.damage(run / RUN_NAME, str(error), f"{COPY}; sessions {', '.join(there) or 'none'} are in the folder")
        listed = there
    for name in there:
        if name not in listed:
            found.note(
                run / "sessions" / name,
                "the session is not listed in run.json: its start never came to an end",
                "readers ignore it; it may be deleted while no job writes this run",
            )
    sessions = []
    for name in listed:
        try:
            sessions.append(Session(run, name))
        except GradtapError as error:
            cure = "read it with the newer gradtap" if isinstance(error, FormatVersionError) else COPY
            found.damage(run / "sessions" / name / "session.json", str(error), cure)
    return sessions


def _check_lock(run: Path, found: Findings) -> None:
    try:
        holder = read_lock(run)
    except GradtapError as error:
        found.damage(run / LOCK_NAME, str(error), "delete it, once it is certain that no job writes this run")
        return
    if holder is not None and not is_alive(holder, Settings().lock_stale, may_write=False):
        found.note(
            holder.path,
            f"left behind by a job that is gone: {holder.describe()}",
            f"{HARMLESS}: the next start takes it over",
        )
