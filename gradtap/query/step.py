"""One step: its ledger row, its tags, and the stored statistics of each parameter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gradtap.query.answer import Answer
from gradtap.query.params import stored
from gradtap.query.words import step_of

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.read.norms import StepSummary


COUNTS = ("zeros", "nan", "inf")


def step(run: Run, step: str, *, attempt: int | None = None, match: str = "") -> Answer:
    """One complete step. `ledger` has all columns of the attempt's own row; None for a moment before it is seen.

    Without `attempt` it is that of the newest, and `attempts` counts the captures of the step. `settled`: for this
    attempt nothing can change any more. Rows: one for each parameter that matches and has gradients, with its stored
    statistics, NaN (a count: None) where one was not taken. Raises as `Run.summary`.
    """
    number = step_of(run, step)
    record = run.record(number, attempt=attempt)
    summary = run.summary(number, stored(run, match), attempt=record.attempt)
    facts = {
        "run": run.id,
        "step": number,
        "attempt": record.attempt,
        **({"attempts": len(run.attempts(number))} if attempt is None else {}),
        "session": record.session,
        "capture": record.capture,
        "complete": True,
        "settled": record.settled and not run.damaged,
        "ledger": record.ledger,
        "tags": record.tags,
        **({"tags_error": record.tags_error} if record.tags_error else {}),
    }
    return Answer(query="step", facts=facts, rows=_rows(run, summary), rows_name="parameters")


def _rows(run: Run, summary: StepSummary) -> list[dict[str, Any]]:
    shapes = {p.name: list(p.shape) for p in run.params}
    columns = {stat: _plain(stat, values.tolist()) for stat, values in summary.stats.items()}
    return [
        {"name": name, "shape": shapes[name], **{stat: column[at] for stat, column in columns.items()}}
        for at, name in enumerate(summary.params)
    ]


def _plain(stat: str, values: list[float]) -> list[float] | list[int | None]:
    """Counts as whole numbers, None where there is none; other statistics as they are."""
    if stat not in COUNTS:
        return values
    return [None if math.isnan(value) else int(value) for value in values]
