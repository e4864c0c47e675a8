"""The parameter x step matrix of a stored statistic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtap.query.answer import Answer
from gradtap.query.params import stored
from gradtap.query.words import range_of

if TYPE_CHECKING:
    from gradtap.read import Run


def norms(run: Run, match: str = "", *, steps: str = "", stat: str = "l2") -> Answer:
    """One row for each parameter that matches and has gradients; its `values` are those at `steps`.

    `steps` is a range of steps, all complete ones where empty; NaN where a parameter was not taken at a step. Raises
    as `Run.norms`.
    """
    chosen = range_of(steps) if steps else None
    found = run.norms(stored(run, match) if run.params else None, steps=chosen, stat=stat)
    values = found.values.tolist()
    rows = [{"name": name, "values": row} for name, row in zip(found.params, values, strict=True)]
    facts = {"run": run.id, "stat": found.stat, "steps": list(found.steps)}
    return Answer(query="norms", facts=facts, rows=rows, rows_name="parameters")
