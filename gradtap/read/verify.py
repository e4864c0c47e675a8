"""Whether a store holds what was committed. Reads only, changes nothing, and may run as often as one likes.

Here: the run as a whole. One session is checked by `verify_session`, its chunks by `verify_chunks`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gradtap.config import Settings
from gradtap.errors import DamagedError, FormatVersionError, GradtapError, NotARunError
from gradtap.read.chunks import FileCache
from gradtap.read.place import LOST_RUN, folder_of, words_of
from gradtap.read.report import Damage, Findings, Progress, VerifyReport
from gradtap.read.session import Session
from gradtap.read.verify_files import check_run_folder
from gradtap.read.verify_session import check_session
from gradtap.store.journal import JournalReader
from gradtap.store.lock import LOCK_NAME, is_alive, read_lock
from gradtap.store.paths import SessionPaths, session_folders
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
    run = folder_of(path)
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
    except NotARunError:
        if not there:
            raise
        found.damage(run / RUN_NAME, f"it is lost; {words_of(there)} in the folder", LOST_RUN)
        listed = there
    except DamagedError as error:
        found.damage(run / RUN_NAME, str(error), f"{COPY}; sessions {', '.join(there) or 'none'} are in the folder")
        listed = there
    for name in there:
        if name not in listed:
            _check_unlisted(run, name, found)
    sessions = []
    for name in listed:
        try:
            sessions.append(Session(run, name))
        except GradtapError as error:
            cure = "read it with the newer gradtap" if isinstance(error, FormatVersionError) else COPY
            found.damage(run / "sessions" / name / "session.json", str(error), cure)
    return sessions


def _check_unlisted(run: Path, name: str, found: Findings) -> None:
    captures = _captures_of(run, name)
    # A start that was under way may have come to its end, and captured, since run.json was read.
    with contextlib.suppress(GradtapError):
        if name in read_run(run).sessions:
            return
    if captures == 0:
        what = "the session is not listed in run.json: its start never came to an end"
        found.note(run / "sessions" / name, what, "readers ignore it; it may be deleted while no job writes this run")
        return
    held = "journals that do not read" if captures is None else f"{captures} committed captures"
    found.damage(
        run / "sessions" / name,
        f"the session is not listed in run.json, so it is not read, yet it holds {held}",
        f"keep it; {COPY}: a run.json that is older than the session lacks it. With no run.json at all, attaching "
        "again lists every whole session",
    )


def _captures_of(run: Path, name: str) -> int | None:
    """Captures that any rank committed in a session; None where its journals hold something that does not read."""
    paths = SessionPaths(run, name)
    seen: set[int] = set()
    for file in sorted(f for f in paths.journal(0).parent.glob("r*") if f.name[1:].isdigit()):
        try:
            with JournalReader(file) as journal:
                heads = (journal.head(capture) for capture in range(journal.last() + 1))
                seen |= {head.capture for head in heads if head is not None and head.state == "committed"}
        except GradtapError:
            return None
    return len(seen)


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
