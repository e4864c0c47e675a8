"""What to say of a step that has no complete capture: in flight, dropped, failed, not captured, or not there at all."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from gradtap import words
from gradtap.errors import IncompleteError, InFlightError, NotFoundError, StepNotFoundError
from gradtap.read.assemble import SessionReader
from gradtap.read.attempts import Place
from gradtap.read.captures import CaptureState


def in_flight(step: int, readers: Sequence[SessionReader]) -> Place | None:
    """The newest capture of a step that some rank has committed, though not every one; None where there is none."""
    for reader in reversed(readers):
        state = _state(step, reader)
        if state is not None and state.committed:
            return Place(step=step, attempt=1, reader=reader, capture=state.capture, complete=state.complete)
    return None


def explain_absent(
    step: int, readers: Sequence[SessionReader], known: Sequence[int]
) -> NotFoundError | IncompleteError:
    """The error for a step that no session holds complete. Raises `DamagedError` where the journals are damaged."""
    for reader in reversed(readers):
        state = _state(step, reader)
        if state is not None and (state.committed or state.dropped or state.failed or state.strayed):
            text = f"step {step} has no complete capture: {say_state(state, reader)}"
            if in_time(state, reader):
                return InFlightError(text).noting(last_complete=known[-1] if known else None)
            return IncompleteError(text)
    return StepNotFoundError(f"step {step} is not in this run: {_reason(step, readers, known)}").noting(
        nearest=nearest_steps(step, known)
    )


def in_time(state: CaptureState, reader: SessionReader) -> bool:
    """Whether a capture that is not complete may still become so."""
    return not (state.dropped or state.failed or state.strayed) and reader.session.state == "live"


def nearest_steps(step: int, known: Sequence[int]) -> list[int]:
    """Up to two recorded steps on either side."""
    at = bisect.bisect_left(known, step)
    return list(known[max(0, at - 2) : at + 2])


def say_state(state: CaptureState, reader: SessionReader) -> str:
    """Why a capture is not complete, which ranks, and what to do."""
    where = f"session {reader.session.name}, capture {state.capture}"
    if state.dropped:
        return f"{words.ranks(state.dropped)} dropped it, the buffer was full or the schedule had changed ({where})"
    if state.failed:
        return f"it failed on {words.ranks(state.failed)} ({where}); the training's log says why"
    if state.strayed:
        return f"{words.ranks(state.strayed)} recorded another step under its number ({where}); run `gradtap verify`"
    if in_time(state, reader):
        return (
            f"it is in flight, {words.ranks(state.missing)} of {reader.session.plan.world} have not committed it yet "
            f"({where}); try again in a moment, or read what is there with partial=True"
        )
    return (
        f"{words.ranks(state.missing)} of {reader.session.plan.world} never committed it, the job ended before that "
        f"({where}); read what is there with partial=True"
    )


def _state(step: int, reader: SessionReader) -> CaptureState | None:
    schedule = reader.session.schedule
    number = None if schedule is None else schedule.number(step)
    return None if number is None else reader.captures.state(number, step)


def _reason(step: int, readers: Sequence[SessionReader], known: Sequence[int]) -> str:
    if not known:
        if not readers:
            return "it has no session yet"
        yet = " yet" if readers[-1].session.state == "live" else ""
        return f"it has no complete step{yet}"
    near = ", ".join(map(str, nearest_steps(step, known)))
    text = f"the nearest are {near} (of {len(known)}, {known[0]} to {known[-1]})"
    schedule = readers[-1].session.schedule
    if known[0] < step < known[-1] and schedule is not None and not schedule.captures(step):
        return f"the schedule does not capture it; {text}"
    return text
