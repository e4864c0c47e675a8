"""One step: its ledger row, its tags, and the stored statistics of each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradtap.errors import StepNotFoundError
from gradtap.query.answer import Answer
from gradtap.query.params import stored
from gradtap.query.steps import tags_of
from gradtap.query.words import step_of

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.read.norms import StepSummary


def step(run: Run, step: str, *, attempt: int | None = None, match: str = "") -> Answer:
    """One complete step. `ledger` has all columns of its row; None for an attempt that a later one took over.

    `attempts` counts the captures of the step. Rows: one for each parameter that matches and has gradients, with its
    stored statistics, None where one was not taken. Raises as `Run.summary`.
    """
    number = step_of(run, step)
    summary = run.summary(number, stored(run, match) if run.params else None, attempt=attempt)
    places = run.locate(number)
    here = places[summary.attempt - 1]
    newest = summary.attempt == len(places)
    facts = {
        "run": run.id,
        "step": number,
        "attempt": summary.attempt,
        "attempts": len(places),
        "session": here.session,
        "capture": here.capture,
        "complete": True,
        "ledger": _ledger(run, number) if newest else None,
        **(tags_of(run, number) if newest else {"tags": None}),
    }
    return Answer(query="step", facts=facts, rows=_rows(run, summary), rows_name="parameters")


def _ledger(run: Run, number: int) -> dict[str, Any] | None:
    try:
        return run.ledger.row(number)
    except StepNotFoundError:
        # Complete by the journals a moment before its ledger row can be seen.
        return None


def _rows(run: Run, summary: StepSummary) -> list[dict[str, Any]]:
    shapes = {p.name: list(p.shape) for p in run.params}
    columns = {stat: values.tolist() for stat, values in summary.stats.items()}
    return [
        {"name": name, "shape": shapes[name], **{stat: column[at] for stat, column in columns.items()}}
        for at, name in enumerate(summary.params)
    ]
