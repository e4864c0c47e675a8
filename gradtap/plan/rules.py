"""Rules: which steps are captured. Each knows membership, counts and the n-th step without listing steps.

A rule says nothing of capture numbers; the schedule does.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from gradtap.errors import DamagedError, UsageError

_ALLOWED = 'a number n, a list of steps, "every 50", "first 100", "first 100, then every 50" or "log-spaced"'
_LOG_DECADES = 18
_LOG_PER_DECADE = 20


class Rule(Protocol):
    """Which steps are captured. Steps are integers; the first step of a training is 1."""

    def at(self, origin: int) -> Rule:
        """The same rule, taking effect at step `origin`."""

    def contains(self, step: int) -> bool:
        """Whether `step` is captured."""

    def count(self, start: int, stop: int) -> int:
        """Number of captured steps in [start, stop)."""

    def nth(self, start: int, index: int) -> int | None:
        """Captured step number `index` (from 0) among those at or after `start`; None where there are too few."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `rule_from_json` reads; the origin is left out, for the entry has it."""


@dataclass(frozen=True, slots=True)
class EveryRule:
    """Each step that `n` divides."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"every is {self.n}; it must be 1 or more")

    def at(self, origin: int) -> EveryRule:
        """The rule itself: its steps do not depend on where it takes effect."""
        return self

    def contains(self, step: int) -> bool:
        """Whether `step` is captured."""
        return step % self.n == 0

    def count(self, start: int, stop: int) -> int:
        """Number of captured steps in [start, stop)."""
        return max(0, (stop - 1) // self.n - (start - 1) // self.n)

    def nth(self, start: int, index: int) -> int | None:
        """Captured step `index` (from 0) at or after `start`; None where there are too few."""
        return (-(-start // self.n) + index) * self.n

    def to_json(self) -> dict[str, Any]:
        """A JSON object for `rule_from_json`."""
        return {"kind": "every", "n": self.n}


@dataclass(frozen=True, slots=True)
class StepsRule:
    """Exactly the steps listed, sorted, each once."""

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))
        if self.steps and self.steps[0] < 0:
            raise UsageError(f"step {self.steps[0]} cannot be captured; steps count from 1")

    def at(self, origin: int) -> StepsRule:
        """The rule itself: its steps do not depend on where it takes effect."""
        return self

    def contains(self, step: int) -> bool:
        """Whether `step` is captured."""
        found = bisect_left(self.steps, step)
        return found < len(self.steps) and self.steps[found] == step

    def count(self, start: int, stop: int) -> int:
        """Number of captured steps in [start, stop)."""
        return max(0, bisect_left(self.steps, stop) - bisect_left(self.steps, start))

    def nth(self, start: int, index: int) -> int | None:
        """Captured step `index` (from 0) at or after `start`; None where there are too few."""
        found = bisect_left(self.steps, start) + index
        return self.steps[found] if found < len(self.steps) else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object for `rule_from_json`."""
        return {"kind": "steps", "steps": list(self.steps)}


@dataclass(frozen=True, slots=True)
class FirstRule:
    """All of the first `first` steps from `origin` on, then those of `then`; nothing after where that is None.

    `origin` is the step at which the rule takes effect. Later steps follow the step number itself, so
    "first 100, then every 50" captures origin to origin + 99 and then each step that 50 divides.
    """

    first: int
    then: EveryRule | None
    origin: int = field(default=1)

    def __post_init__(self) -> None:
        if self.first < 1:
            raise UsageError(f"first is {self.first}; it must be 1 or more")

    def at(self, origin: int) -> FirstRule:
        """The same rule with `origin` as the first of its steps."""
        return replace(self, origin=origin)

    def contains(self, step: int) -> bool:
        """Whether `step` is captured."""
        if step < self.origin + self.first:
            return step >= self.origin
        return self.then is not None and self.then.contains(step)

    def count(self, start: int, stop: int) -> int:
        """Number of captured steps in [start, stop)."""
        turn = self.origin + self.first
        dense = max(0, min(stop, turn) - max(start, self.origin))
        return dense + (self.then.count(max(start, turn), stop) if self.then is not None else 0)

    def nth(self, start: int, index: int) -> int | None:
        """Captured step `index` (from 0) at or after `start`; None where there are too few."""
        begin, turn = max(start, self.origin), self.origin + self.first
        dense = max(0, turn - begin)
        if index < dense:
            return begin + index
        return None if self.then is None else self.then.nth(max(begin, turn), index - dense)

    def to_json(self) -> dict[str, Any]:
        """A JSON object for `rule_from_json`."""
        return {"kind": "first", "first": self.first, "then": None if self.then is None else self.then.to_json()}


@dataclass(frozen=True, slots=True)
class LogRule:
    """Step numbers floor(10 ** (j / 20)) for j = 0, 1, 2, ...: 1, 2, ... 10, 11, 12, 14, 15, 17, 19, 22, 25, ...

    20 a decade from step 10 on (fewer below, where they fall together), up to step 10 ** 18. It follows the step
    number itself, wherever the rule takes effect, so a resumed training goes on with the same steps.
    """

    def at(self, origin: int) -> LogRule:
        """The rule itself: its steps do not depend on where it takes effect."""
        return self

    def contains(self, step: int) -> bool:
        """Whether `step` is captured."""
        return _log_steps().contains(step)

    def count(self, start: int, stop: int) -> int:
        """Number of captured steps in [start, stop)."""
        return _log_steps().count(start, stop)

    def nth(self, start: int, index: int) -> int | None:
        """Captured step `index` (from 0) at or after `start`; None where there are too few."""
        return _log_steps().nth(start, index)

    def to_json(self) -> dict[str, Any]:
        """A JSON object for `rule_from_json`."""
        return {"kind": "log"}


def parse_rule(every: int | str | Sequence[int]) -> Rule:
    """The rule that a user asks for: a number n, a list of steps, or one of the texts below.

    "50" and "every 50": each step that 50 divides. "first 100": the first 100 steps from where the rule takes
    effect. "first 100, then every 50". "log-spaced": see `LogRule`. Raises `UsageError` for anything else.
    """
    if isinstance(every, bool):
        raise UsageError(f"every is {every!r}; allowed are {_ALLOWED}")
    if isinstance(every, str):
        return _parse_text(every)
    if not isinstance(every, Iterable):
        return EveryRule(_whole(every, every))
    steps = tuple(_whole(step, every) for step in every)
    if not steps or min(steps) < 1:
        raise UsageError(f"every is {every!r}; steps count from 1; allowed are {_ALLOWED}")
    return StepsRule(steps)


def _whole(number: Any, every: Any) -> int:
    """A whole number, NumPy's too; a bool is none."""
    try:
        if not isinstance(number, bool):
            return int(operator.index(number))
    except TypeError:
        pass
    raise UsageError(f"every is {every!r}; allowed are {_ALLOWED}")


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """The rule as a JSON object, without its origin."""
    return rule.to_json()


def rule_from_json(found: Mapping[str, Any]) -> Rule:
    """The rule that `rule_to_json` wrote, at origin 1. Raises `DamagedError` for one that does not read."""
    try:
        kind = found["kind"]
        if kind == "every":
            return EveryRule(int(found["n"]))
        if kind == "steps":
            return StepsRule(tuple(int(step) for step in found["steps"]))
        if kind == "first":
            then = found["then"]
            return FirstRule(int(found["first"]), None if then is None else EveryRule(int(then["n"])))
        if kind == "log":
            return LogRule()
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"schedule rule {found!r} does not read ({error!r}); run gradtap verify") from error
    raise DamagedError(f"schedule rule kind {kind!r} is unknown; a newer gradtap may have written it: upgrade gradtap")


def _parse_text(text: str) -> Rule:
    plain = " ".join(text.lower().replace(",", " ").split())
    if plain == "log-spaced":
        return LogRule()
    found = re.fullmatch(r"(?:first (?P<first>\d+)(?: then every (?P<then>\d+))?|(?:every )?(?P<n>\d+))", plain)
    if found is None:
        raise UsageError(f"every is {text!r}; allowed are {_ALLOWED}")
    if found["n"] is not None:
        return EveryRule(int(found["n"]))
    return FirstRule(int(found["first"]), None if found["then"] is None else EveryRule(int(found["then"])))


@lru_cache(maxsize=1)
def _log_steps() -> StepsRule:
    # Exact integers: a power in floating point may differ in its last bit from one machine to the next,
    # and two ranks must never disagree.
    found = []
    for j in range(_LOG_PER_DECADE * _LOG_DECADES + 1):
        step = int(10 ** (j / _LOG_PER_DECADE))
        while step**_LOG_PER_DECADE > 10**j:
            step -= 1
        while (step + 1) ** _LOG_PER_DECADE <= 10**j:
            step += 1
        found.append(step)
    return StepsRule(tuple(found))
