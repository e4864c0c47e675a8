"""What a caller may give as a step or as steps, and which recorded steps it means."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradtap.errors import StepNotFoundError, UsageError

Steps = Iterable[int] | slice
"""Step numbers, or a Python slice of step numbers."""


def one_step(step: Any) -> int:
    """`step` as an int. Raises `UsageError` for anything but a whole number."""
    return _whole(step, "step")


def one_attempt(attempt: Any) -> int:
    """`attempt` as an int. Raises `UsageError` for anything but a whole number."""
    return _whole(attempt, "attempt")


def _whole(value: Any, kind: str) -> int:
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    article = "an" if kind == "attempt" else "a"
    raise UsageError(f"{kind} is {value!r}; {article} {kind} is a whole number, the first is 1")


def chosen_steps(steps: Any, known: Sequence[int]) -> tuple[int, ...]:
    """The steps that are meant: those given, in their order, or the known ones within a slice.

    Whether a given one is recorded is not looked at. Raises `UsageError` for another type, `StepNotFoundError` where
    none is meant.
    """
    if isinstance(steps, slice):
        chosen = _between(steps, known)
    elif isinstance(steps, Iterable) and not isinstance(steps, str):
        chosen = tuple(one_step(each) for each in steps)
    else:
        raise UsageError(f"steps is {steps!r}; give step numbers such as [1, 5], or a slice such as slice(100, 200)")
    if not chosen:
        raise StepNotFoundError(f"steps={_said(steps)} names no recorded step; this run has {span(known)}")
    return chosen


def span(known: Sequence[int]) -> str:
    """How many steps there are, from which to which, for a message."""
    return f"{len(known)} steps, {known[0]} to {known[-1]}" if known else "no complete step yet"


def _said(steps: Any) -> str:
    """What was asked for, a slice as people write it."""
    if not isinstance(steps, slice):
        return repr(steps)
    bounds = ["" if bound is None else str(bound) for bound in (steps.start, steps.stop, steps.step)]
    return ":".join(bounds if bounds[2] else bounds[:2])


def _between(steps: slice, known: Sequence[int]) -> tuple[int, ...]:
    start, stop, stride = (
        None if bound is None else one_step(bound) for bound in (steps.start, steps.stop, steps.step)
    )
    if stride is not None and stride < 1:
        raise UsageError(f"the stride of steps is {stride}; use 1 or more")
    origin = start if start is not None else (known[0] if known else 0)
    return tuple(s for s in known if s >= origin and (stop is None or s < stop) and (s - origin) % (stride or 1) == 0)
