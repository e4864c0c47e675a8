"""What is known of one attempt at a step beside its gradients: ledger row, tags, where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtap.errors import DamagedError, StepNotFoundError
from gradtap.read.attempts import Place
from gradtap.read.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One complete capture. `ledger` is its own session's row, whatever a later attempt says; None before it is seen.

    `tags` are None where they do not read, and `tags_error` says why. `settled`: none of it can change any more.
    """

    step: int
    attempt: int
    session: str
    capture: int
    ledger: Mapping[str, Any] | None
    tags: Mapping[str, Any] | None
    tags_error: str | None
    settled: bool


def read_record(place: Place) -> StepRecord:
    """The record of a capture. Raises `DamagedError` for ledger rows that are not what was written."""
    reader = place.reader
    tags, error = None, None
    try:
        tags = reader.tags.of(place.step)
    except DamagedError as damage:
        error = str(damage)
    return StepRecord(
        step=place.step,
        attempt=place.attempt,
        session=reader.session.name,
        capture=place.capture,
        ledger=_row(place),
        tags=tags,
        tags_error=error,
        settled=reader.ledger.settled([place.step]),
    )


def _row(place: Place) -> Mapping[str, Any] | None:
    none = np.empty(0, np.int64)
    try:
        return Ledger([place.reader.ledger], (none, none)).row(place.step)
    except StepNotFoundError:
        # Complete by the journals a moment before its ledger row can be seen.
        return None
