"""`gradtap info`: a run on one screen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradtap.cli.arguments import Store
from gradtap.cli.output import Answer, Csv, Json, Jsonl, emit, facts_grid, form_of, size

if TYPE_CHECKING:
    from gradtap.read import Run

FORMAT = 1
"""The store format that this package writes and reads."""

GAPS_SHOWN = 5
"""Gaps that fit on a line; JSON has them all."""


def info(store: Store, *, as_json: Json = False, as_jsonl: Jsonl = False, as_csv: Csv = False) -> None:
    """Say what a run holds: state, engine, steps, parameters, bytes."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    from gradtap.read import open

    run = open(store)
    facts = run_facts(run)
    emit(Answer(verb="info", facts=facts, pictures=[_picture(facts)]), form)


def run_facts(run: Run) -> dict[str, Any]:
    """Facts of a run, ready for JSON. Bytes are those of complete captures; `ratio` is raw / stored, or None."""
    steps = [int(step) for step in run.steps]
    newest = run.sessions[-1] if run.sessions else None
    raw, stored = _bytes(run, steps)
    return {
        "path": str(run.path),
        "name": run.name,
        "run": run.id,
        "format": FORMAT,
        "state": newest.state if newest else "empty",
        "engine": newest.engine if newest else None,
        "world": newest.world if newest else None,
        "sessions": [{"session": s.name, "state": s.state, "engine": s.engine, "world": s.world} for s in run.sessions],
        "steps": _step_facts(run, steps),
        "parameters": _parameter_facts(run),
        "raw_bytes": raw,
        "stored_bytes": stored,
        "ratio": raw / stored if stored else None,
    }


def _bytes(run: Run, steps: Sequence[int]) -> tuple[int, int]:
    ledger, complete = run.ledger, set(steps)
    rows = [i for i, step in enumerate(ledger.steps) if int(step) in complete]
    if not rows:
        return 0, 0
    return int(ledger["raw_bytes"][rows].sum()), int(ledger["stored_bytes"][rows].sum())


def _step_facts(run: Run, steps: Sequence[int]) -> dict[str, Any]:
    complete = set(steps)
    ledger = run.ledger
    due = [int(step) for step, capture in zip(ledger.steps, ledger["capture"], strict=True) if capture >= 0]
    last = steps[-1] if steps else -math.inf
    missing = [step for step in due if step not in complete and step < last]
    return {
        "first": steps[0] if steps else None,
        "last": steps[-1] if steps else None,
        "count": len(steps),
        "gaps": missing,
    }


def _parameter_facts(run: Run) -> dict[str, Any]:
    stored = [p for p in run.params if p.stored]
    by_status = Counter(p.status for p in run.params)
    return {
        "total": len(run.params),
        "stored": len(stored),
        "frozen": by_status["frozen"],
        "unoptimized": by_status["unoptimized"],
        "elements": sum(p.numel for p in stored),
        "dtypes": dict(Counter(p.dtype for p in stored)),
    }


def _picture(facts: dict[str, Any]) -> Any:
    steps, params = facts["steps"], facts["parameters"]
    span = f"{steps['first']} to {steps['last']}, {steps['count']} complete" if steps["count"] else "none complete yet"
    ratio = f", ratio {facts['ratio']:.2f}" if facts["ratio"] else ""
    return facts_grid(
        {
            "run": f"{facts['name']}  ({facts['path']})",
            "id": facts["run"],
            "state": f"{facts['state']}, {len(facts['sessions'])} session(s)",
            "engine": f"{facts['engine'] or '-'}, {facts['world'] or '-'} process(es)",
            "steps": span,
            "gaps": _gaps(steps["gaps"]),
            "parameters": f"{params['total']}: {params['stored']} stored, {params['frozen']} frozen, "
            f"{params['unoptimized']} unoptimized",
            "elements": f"{params['elements']:,} a step",
            "dtypes": ", ".join(f"{count} {dtype}" for dtype, count in params["dtypes"].items()) or "-",
            "bytes": f"{size(facts['raw_bytes'])} raw, {size(facts['stored_bytes'])} stored{ratio}",
            "format": str(facts["format"]),
        }
    )


def _gaps(missing: Sequence[int]) -> str:
    if not missing:
        return "none"
    shown = ", ".join(map(str, missing[:GAPS_SHOWN]))
    return f"{len(missing)} due but not complete: {shown}{' ...' if len(missing) > GAPS_SHOWN else ''}"
