"""Whether a gradient that came is the one that was asked for: a wrong one must never get into a file.

What stands between may answer with what another client asked for, and a server may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from gradtap.errors import StoreError
from gradtap.query.words import ENDS, holds, is_range, range_of
from gradtap.remote.arrays import ArrayFacts

NamesOf = Callable[[str], bool]
"""Whether the parameter of this name is the one that was asked for by an alias or an index."""


def check_identity(
    url: str, facts: ArrayFacts, *, param: str, step: str, attempt: int | None, means: NamesOf | None = None
) -> None:
    """Raise `StoreError`, naming both, where the facts of an answer are of another parameter, step or attempt.

    `means` is asked only where the name is not the one that was asked for; without it no other one is taken.
    """
    if facts.name != param and not (means is not None and means(facts.name)):
        raise _other(url, "the parameter", facts.name, param)
    if facts.stacked != is_range(step):
        raise _other(url, "one step" if is_range(step) else "several steps", facts.span, step)
    if facts.stacked:
        _check_range(url, facts, step)
    elif step not in ENDS and facts.span[0] != int(step):
        raise _other(url, "step", facts.span[0], step)
    if attempt is not None and any(found != attempt for found in facts.attempts or ()):
        raise _other(url, "attempt", facts.attempts, attempt)


def check_step(url: str, facts: Mapping[str, Any], *, step: str, attempt: int | None) -> None:
    """The same for the facts of an answer about one step: `step` and `attempt`."""
    if step not in ENDS and facts["step"] != int(step):
        raise _other(url, "step", facts["step"], step)
    if attempt is not None and facts["attempt"] != attempt:
        raise _other(url, "attempt", facts["attempt"], attempt)


def _check_range(url: str, facts: ArrayFacts, step: str) -> None:
    wanted = range_of(step)
    steps = facts.span if facts.steps is None else facts.steps
    if not all(holds(wanted, number) for number in steps):
        odd = next(number for number in steps if not holds(wanted, number))
        raise _other(url, "step", odd, step)
    if any(one >= other for one, other in pairwise(steps)):
        raise _other(url, "steps that do not ascend,", steps[:8], step)


def _other(url: str, what: str, found: object, asked: object) -> StoreError:
    return StoreError(
        f"{url} answered with {what} {found!r:.200} where {asked!r:.200} was asked for; the answer was not used: ask "
        "again, and look at what stands between, such as a cache"
    )
