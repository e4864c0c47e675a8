"""`gradtap info`: a run on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradtap.cli.arguments import Store
from gradtap.cli.output import Answer, Csv, Json, Jsonl, Listing, emit, facts_grid, form_of, moment, opened, size
from gradtap.version import FORMAT

if TYPE_CHECKING:
    from gradtap.read import Run, SessionView

GAPS_SHOWN = 5
"""Gaps that fit on a line; JSON has them all."""


def info(store: Store, *, as_json: Json = False, as_jsonl: Jsonl = False, as_csv: Csv = False) -> None:
    """Say what a run holds: state, engine, steps, parameters, bytes."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    facts = run_facts(opened(store))
    emit(Answer(verb="info", facts=facts, pictures=[_picture(facts), *_sessions_table(facts["sessions"])]), form)


def run_facts(run: Run) -> dict[str, Any]:
    """Facts of a run, ready for JSON. `raw_bytes` and `stored_bytes` are those of the chunks; `ratio` is raw / stored.

    `ratio` is None where nothing is stored.
    """
    about = run.info()
    sound = [session for session in about.sessions if session.state != "damaged"]
    newest = sound[-1] if sound else None
    return {
        "path": str(about.path),
        "name": about.name,
        "run": about.id,
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


def _session_facts(session: SessionView) -> dict[str, Any]:
    names = ("name", "state", "engine", "world", "captures", "incomplete", "first_step", "codec", "created", "closed")
    facts = {name: getattr(session, name) for name in names}
    return facts if session.state != "damaged" else {"name": session.name, "state": "damaged", "error": session.error}


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


def _picture(facts: dict[str, Any]) -> Any:
    steps, params = facts["steps"], facts["parameters"]
    yet = " yet" if facts["state"] in ("live", "empty") else ""
    apart = f", {params['not_selected']} not selected" if params["not_selected"] else ""
    span = (
        f"{steps['first']} to {steps['last']}, {steps['count']} complete" if steps["count"] else f"none complete{yet}"
    )
    ratio = f", ratio {facts['ratio']:.2f}" if facts["ratio"] else ""
    lost = {f"DAMAGED session {name}": f"{why}; its steps are not listed" for name, why in facts["damaged"].items()}
    return facts_grid(
        lost
        | {
            "run": f"{facts['name']}  ({facts['path']})",
            "id": facts["run"],
            "state": f"{facts['state']}, {_count(len(facts['sessions']), 'session')}",
            "engine": f"{facts['engine']}, {_count(facts['world'], 'process', 'processes')}"
            if facts["engine"]
            else "-",
            "steps": span,
            "gaps": _gaps(steps["gaps"]),
            "parameters": f"{params['total']}: {params['stored']} stored{apart}, {params['frozen']} frozen, "
            f"{params['unoptimized']} unoptimized, {params['empty']} of size zero",
            "elements": f"{params['elements']:,} a step",
            "dtypes": ", ".join(f"{count} {dtype}" for dtype, count in params["dtypes"].items()) or "-",
            "gradients": f"{size(facts['raw_bytes'])} raw, {size(facts['stored_bytes'])} stored{ratio}",
            "beside them": f"{size(facts['index_bytes'])} of index and metadata, "
            f"{size(facts['other_bytes'])} of summaries, ledger and journals",
            "format": str(facts["format"]),
        }
    )


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _sessions_table(sessions: Sequence[dict[str, Any]]) -> list[Any]:
    if len(sessions) < 2:
        return []
    names = ("session", "state", "engine", "processes", "first step", "captures", "started")
    keys = ("name", "state", "engine", "world", "first_step", "captures")
    rows = [
        (*("-" if (fact := session.get(key)) is None else str(fact) for key in keys), moment(session.get("created")))
        for session in sessions
    ]
    sides = {name: "right" if name in ("processes", "first step", "captures") else "left" for name in names}
    return ["", Listing(columns=sides, rows=rows, drop=("started",))]


def _gaps(missing: Sequence[int]) -> str:
    if not missing:
        return "none"
    shown = ", ".join(map(str, missing[:GAPS_SHOWN]))
    return f"{len(missing)} due but not complete: {shown}{' ...' if len(missing) > GAPS_SHOWN else ''}"
