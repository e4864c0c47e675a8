"""Checks one session, in an order that a job which writes it meanwhile cannot turn into damage.

What was published is read before the journals that it was made from, and one look says whether the session is closed.
The parts: `verify_journals`, `verify_arrays` (metadata), `verify_chunks`, `verify_rows`, `verify_merged`,
`verify_files`.
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
from gradtap.read.verify_merged import MergedCheck
from gradtap.read.verify_rows import Published, check_rows

COPY = "restore it from a copy of the run"


def check_session(session: Session, files: FileCache, found: Findings, *, state: SessionState) -> None:
    """All checks of one session; `state` is what it was when the check of the run began."""
    reader = SessionReader(session, files)
    published = Published(session)
    journals = Journals(reader, found, state=state)
    journals.check()
    _check_schedule(session, journals, found)
    arrays = ArrayCheck(session, found)
    arrays.check(
        captures=journals.extent if journals.closed else published.reach(journals.extent), live=state == "live"
    )
    check_chunks(reader, journals, published.steps, found)
    check_rows(session, journals, published, arrays.rows, found)
    MergedCheck(reader, journals, published.steps, arrays.rows, found).check()
    check_session_files(session, arrays.folders, found, live=state == "live")
    reader.captures.close()


def _check_schedule(session: Session, journals: Journals, found: Findings) -> None:
    path = session.paths.schedule_log
    try:
        if session.schedule is not None:
            return
    except GradtapError as error:
        found.damage(path, str(error), COPY)
        return
    if not (journals.extent or journals.rows):
        if any(session.paths.journal(0).parent.glob("r*")):
            found.note(path, "no step has been recorded yet", "nothing to do")
        return
    steps = journals.steps[journals.steps >= 0]
    span = f", steps {steps.min()} to {steps.max()}" if steps.size else ""
    found.damage(
        path,
        f"it is lost or empty, though the journals hold {journals.extent} captures{span}",
        f"the steps are in the journals, so gradients are read as before; factor and flags are not: {COPY}",
    )
