"""The runs of a catalog, one row each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gradtap.errors import GradtapError, problem_of

if TYPE_CHECKING:
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
        about = catalog.open(entry.slug).info()
    except GradtapError as error:
        problem = problem_of(error)
        return {
            "name": entry.slug,
            "run": entry.id or None,
            "state": UNREADABLE,
            "error": {"slug": problem.slug, "status": problem.status, "detail": str(error)},
        }
    sound = [session for session in about.sessions if session.state != "damaged"]
    return {
        "name": entry.slug,
        "run": about.id,
        "state": about.state,
        "engine": sound[-1].engine if sound else None,
        "world": sound[-1].world if sound else None,
        "steps": {"first": about.first_step, "last": about.last_step, "count": about.steps},
        "raw_bytes": about.raw_bytes,
        "stored_bytes": about.stored_bytes,
        "ratio": about.ratio if about.stored_bytes else None,
    }
