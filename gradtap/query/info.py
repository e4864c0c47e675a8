"""What a run holds, on one screen."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from gradtap.query.answer import Answer
from gradtap.version import FORMAT

if TYPE_CHECKING:
    from gradtap.read import Run, SessionView

SESSION_FACTS = (
    *("name", "state", "engine", "world", "captures", "incomplete"),
    *("first_step", "codec", "created", "closed"),
)


def info(run: Run) -> Answer:
    """Facts of a run. `raw_bytes` and `stored_bytes` are those of the chunks; `ratio` is raw / stored.

    `ratio` is None where nothing is stored. Raises `StoreError` where the folders cannot be listed.
    """
    about = run.info()
    sound = [session for session in about.sessions if session.state != "damaged"]
    newest = sound[-1] if sound else None
    facts = {
        "run": about.id,
        "name": about.name,
        "tags": dict(about.tags),
        "format": FORMAT,
        "gradtap": about.gradtap,
        "state": about.state,
        "engine": newest.engine if newest else None,
        "world": newest.world if newest else None,
        "sessions": [_session_facts(session) for session in about.sessions],
        "damaged": {session.name: session.error for session in about.sessions if session.state == "damaged"},
        "steps": _step_facts(run),
        "parameters": _parameter_facts(run),
        "raw_bytes": about.raw_bytes,
        "stored_bytes": about.stored_bytes,
        "index_bytes": about.index_bytes,
        "other_bytes": about.other_bytes,
        "ratio": about.ratio if about.stored_bytes else None,
    }
    return Answer(query="info", facts=facts)


def _session_facts(session: SessionView) -> dict[str, Any]:
    if session.state == "damaged":
        return {"name": session.name, "state": "damaged", "error": session.error}
    return {name: getattr(session, name) for name in SESSION_FACTS}


def _step_facts(run: Run) -> dict[str, Any]:
    """`gaps` are steps before the last complete one that the schedule wanted and that are not complete."""
    ledger, steps = run.ledger, run.steps
    complete = set(steps)
    captures = ledger["capture"].tolist() if "capture" in ledger else []
    due = [step for step, capture in zip(ledger.steps, captures, strict=bool(captures)) if capture >= 0]
    return {
        "first": steps[0] if steps else None,
        "last": steps[-1] if steps else None,
        "count": len(steps),
        "gaps": [step for step in due if steps and step not in complete and step < steps[-1]],
    }


def _parameter_facts(run: Run) -> dict[str, Any]:
    out = run.left_out()
    able = [p for p in run.params if p.stored]
    stored = [p for p in able if p.name not in out]
    by_status = Counter(p.status for p in run.params)
    return {
        "total": len(run.params),
        "stored": len(stored),
        "frozen": by_status["frozen"],
        "unoptimized": by_status["unoptimized"],
        "not_selected": len(out),
        "empty": by_status["captured"] - len(able),
        "elements": sum(p.numel for p in stored),
        "dtypes": dict(Counter(p.dtype for p in stored)),
    }
