"""`gradtap info`: a run on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtap.cli.arguments import RunName, Store
from gradtap.cli.output import Csv, Json, Jsonl, Listing, emit, facts_grid, form_of, moment, size
from gradtap.cli.places import asking

GAPS_SHOWN = 5
"""Gaps that fit on a line; JSON has them all."""


def info(
    store: Store, *, run: RunName = None, as_json: Json = False, as_jsonl: Jsonl = False, as_csv: Csv = False
) -> None:
    """Say what a run holds: state, engine, steps, parameters, bytes."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    with asking(store, run) as place:
        answer = place.info()
        facts = dict(answer.facts)
        emit(answer, form, pictures=[_picture(facts, place.label), *_sessions_table(facts["sessions"])])


def _picture(facts: dict[str, Any], label: str) -> Any:
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
            "run": f"{facts['name']}  ({label})",
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
