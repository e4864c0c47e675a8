"""Checks one session, in an order that a job which writes it meanwhile cannot turn into damage.

What was published is read before the journals that it was made from, and one look says whether the session is closed.
The parts: `verify_journals`, `verify_arrays` (metadata), `verify_chunks`, `verify_rows`, `verify_files`.
"""

from __future__ import annotations

from gradtap.errors import GradtapError
from gradtap.read.assemble import SessionReader
from gradtap.read.chunks import FileCache
from gradtap.read.report import Findings
from gradtap.read.session import Session, SessionState
from gradtap.read.verify_arrays import ArrayCheck
from gradtap.read.verify_chunks import check_chunks
from gradtap.read.verify_files import check_session_files
from gradtap.read.verify_journals import Journals
from gradtap.read.verify_rows import Published, check_rows

COPY = "restore it from a copy of the run"


def check_session(session: Session, files: FileCache, found: Findings, *, state: SessionState) -> None:
    """All checks of one session; `state` is what it was when the check of the run began."""
    reader = SessionReader(session, files)
    published = Published(session)
    journals = Journals(reader, found, state=state)
    _check_schedule(session, found)
    journals.check()
    arrays = ArrayCheck(session, found)
    arrays.check(
        captures=journals.extent if journals.closed else published.reach(journals.extent), live=state == "live"
    )
    check_chunks(reader, journals, found)
    check_rows(session, journals, published, arrays.rows, found)
    check_session_files(session, arrays.folders, found, live=state == "live")
    reader.captures.close()


def _check_schedule(session: Session, found: Findings) -> None:
    path = session.paths.schedule_log
    try:
        if session.schedule is None and any(session.paths.journal(0).parent.glob("r*")):
            found.note(path, "no step has been recorded yet", "nothing to do")
    except GradtapError as error:
        found.damage(path, str(error), COPY)
