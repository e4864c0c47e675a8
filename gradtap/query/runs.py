"""The runs of a catalog, one row each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gradtap.errors import GradtapError, problem_of

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.read.catalog import Catalog
    from gradtap.read.discover import RunEntry

UNREADABLE = "unreadable"
"""State of a run that does not open, and of a folder that may hold runs and does not read."""

STATES = ("live", "closed", "unclosed", "damaged", "empty", UNREADABLE)


def named(entries: tuple[RunEntry, ...], q: str = "") -> list[RunEntry]:
    """The entries whose name holds a text, or fits it whole where it has wildcards, or whose id begins with it.

    Ascending by name; all for an empty text.
    """
    glob = q if any(wild in q for wild in "*?[") else f"*{q}*"
    found = [e for e in entries if fnmatchcase(e.slug, glob) or (q and e.id.startswith(q))]
    return sorted(found, key=lambda entry: entry.slug)


def run_row(catalog: Catalog, entry: RunEntry) -> dict[str, Any]:
    """What a list says of a run: `name` it is asked for by, id, state, engine, steps, bytes.

    One that does not open has the state "unreadable" and `error`: slug, status and text of its problem.
    """
    try:
        return _row(entry.slug, catalog.open(entry.slug))
    except GradtapError as error:
        problem = problem_of(error)
        return {
            "name": entry.slug,
            "run": entry.id or None,
            "state": UNREADABLE,
            "error": {"slug": problem.slug, "status": problem.status, "detail": str(error)},
        }


def _row(name: str, run: Run) -> dict[str, Any]:
    # Not `Run.info`, which looks at every file: a list may be of hundreds of runs.
    sessions, steps, (raw, stored) = run.sessions, run.steps, run.volume()
    sound = [session for session in sessions if session.state != "damaged"]
    return {
        "name": name,
        "run": run.id,
        "state": sessions[-1].state if sessions else "empty",
        "damaged": run.damaged,
        "engine": sound[-1].engine if sound else None,
        "world": sound[-1].world if sound else None,
        "steps": {"first": steps[0] if steps else None, "last": steps[-1] if steps else None, "count": len(steps)},
        "raw_bytes": raw,
        "stored_bytes": stored,
        "ratio": raw / stored if stored else None,
    }
