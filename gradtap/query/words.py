"""Steps as people write them: a number, `first`, `last`, or a range `A:B:C` of step numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtap.errors import StepNotFoundError, UsageError

if TYPE_CHECKING:
    from gradtap.read import Run

ENDS = ("first", "last")


def is_range(text: str) -> bool:
    """Whether a text names steps rather than one step."""
    return ":" in text


def step_of(run: Run, text: str) -> int:
    """The step that a word names.

    Raises `UsageError` for a word that is no step, `StepNotFoundError` for `first` or `last` of a run without steps.
    """
    if text not in ENDS:
        return _number(text)
    steps = run.steps
    if not steps:
        sessions = run.sessions
        yet = " yet" if not sessions or sessions[-1].state == "live" else ""
        raise StepNotFoundError(f"the run has no complete step{yet}, so no {text} one").noting(nearest=[])
    return steps[0 if text == "first" else -1]


def range_of(text: str) -> slice:
    """The steps that `A:B:C` names: from A up to, not including, B, every C-th; a number alone is that step.

    Raises `UsageError` for anything else.
    """
    parts = text.split(":")
    try:
        numbers = [_number(part) if part.strip() else None for part in parts]
    except UsageError:
        numbers = []
    stride = numbers[2] if len(numbers) == 3 else None
    if not 1 <= len(numbers) <= 3 or (stride is not None and stride < 1):
        raise UsageError(f"range is {text!r}; give A:B or A:B:C with a positive C, such as 100:200:10")
    if len(numbers) == 1:
        return slice(numbers[0], None if numbers[0] is None else numbers[0] + 1)
    return slice(numbers[0], numbers[1], stride)


def holds(steps: slice, step: int) -> bool:
    """Whether a range has a step."""
    start = steps.start or 0
    inside = step >= start and (steps.stop is None or step < steps.stop)
    return inside and (step - start) % (steps.step or 1) == 0


def _number(text: str) -> int:
    word = text.strip()
    # Nineteen digits are enough for any step, and `int` takes more than digits.
    if not (word.removeprefix("-").isdigit() and word.isascii() and len(word) <= 19):
        raise UsageError(f"step is {text[:80]!r}; give a number, `first` or `last`")
    return int(word)
