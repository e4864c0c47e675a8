"""Which step gets which capture number: a pure function of the entries of the schedule log.

An entry leaves every number that was given before its own step; so a rank that has read fewer entries is right about
every capture before the first entry that it lacks. Nothing here reads or writes the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradtap.errors import DamagedError, StepNotFoundError, UsageError
from gradtap.plan.rules import Rule, parse_rule, rule_from_json, rule_to_json

__all__ = [
    "ChangeEntry",
    "Entry",
    "PromoteEntry",
    "Rule",
    "Schedule",
    "entry_from_json",
    "entry_to_json",
    "parse_rule",
    "rule_from_json",
    "rule_to_json",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeEntry:
    """From step `from_step` on, capture the steps of `rule`, and of each the selection `select` (JSON; None for all).

    `rule` is taken at `from_step` as its origin.
    """

    from_step: int
    rule: Rule
    select: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", self.rule.at(self.from_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteEntry:
    """At step `at_step`, keep the earlier `steps` too: those not captured by then get the next numbers.

    Raises `UsageError` for a step that is not below `at_step`.
    """

    at_step: int
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))
        if self.steps and self.steps[-1] >= self.at_step:
            raise UsageError(f"step {self.steps[-1]} cannot be promoted at step {self.at_step}; only earlier steps can")


Entry = ChangeEntry | PromoteEntry


@dataclass(frozen=True, slots=True)
class _Segment:
    """Steps from `start` up to the next segment's start: numbers count on from `base`."""

    start: int
    base: int
    change: ChangeEntry

    def number(self, step: int) -> int:
        return self.base + self.change.rule.count(self.start, step)


class Schedule:
    """Capture numbers of one session. Immutable; cost does not grow with the number of captures.

    The step at which an entry takes effect is never below that of an entry logged before it; those of one step act in
    the order of the log. So more entries never change a number once given, promoted ones included, from the last
    entry's step down. Raises `UsageError` for a log out of order, one that does not begin with a `ChangeEntry`, or
    one that promotes a step before its first.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        first = self.entries[0] if self.entries else None
        if not isinstance(first, ChangeEntry):
            raise UsageError("a schedule begins with a change entry, which says the session's first step")
        self.first_step = self._effect = first.from_step
        self._segments = [_Segment(first.from_step, 0, first)]
        self._promoted: dict[int, int] = {}
        self._promotions: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for entry in self.entries[1:]:
            self._take(entry)
        self._starts = [segment.start for segment in self._segments]
        self._bases = [segment.base for segment in self._segments]
        self._promotion_bases = [base for base, _ in self._promotions]

    def number(self, step: int) -> int | None:
        """Capture number of `step`; None where it is not captured."""
        if step in self._promoted:
            return self._promoted[step]
        if step < self.first_step:
            return None
        segment = self._segment(step)
        return segment.number(step) if segment.change.rule.contains(step) else None

    def captures(self, step: int) -> bool:
        """Whether `step` has a capture number."""
        return self.number(step) is not None

    def step(self, number: int) -> int:
        """The step that capture `number` names. Raises `StepNotFoundError` where it names none."""
        if number >= 0:
            base, steps = self._promotions[bisect_right(self._promotion_bases, number) - 1]
            if base <= number < base + len(steps):
                return steps[number - base]
            segment = self._segments[bisect_right(self._bases, number) - 1]
            found = segment.change.rule.nth(segment.start, number - segment.base)
            if found is not None:
                return found
        raise StepNotFoundError(
            f"capture number {number} names no step; this schedule begins at step {self.first_step}"
        )

    def count(self, stop: int) -> int:
        """Numbers given before step `stop` is numbered: captured steps below it, and promotions up to it."""
        return 0 if stop < self.first_step else self._segment(stop).number(stop)

    def change_at(self, step: int) -> ChangeEntry:
        """The change entry in force at `step`: its rule and its selection. The first one before the first step."""
        return self._segment(max(step, self.first_step)).change

    def extended(self, *entries: Entry) -> Schedule:
        """The schedule with more entries at the end of its log."""
        return Schedule((*self.entries, *entries))

    def _segment(self, step: int) -> _Segment:
        return self._segments[bisect_right(self._starts, step) - 1]

    def _take(self, entry: Entry) -> None:
        last, step = self._segments[-1], _effect(entry)
        if step < self._effect:
            raise UsageError(
                f"an entry at step {step} is logged after one at step {self._effect}; "
                "entries must take effect in the order of the log"
            )
        self._effect = step
        if isinstance(entry, PromoteEntry) and entry.steps and entry.steps[0] < self.first_step:
            raise UsageError(f"step {entry.steps[0]} cannot be promoted; this session begins at step {self.first_step}")
        base = last.number(step)
        if isinstance(entry, ChangeEntry):
            self._segments.append(_Segment(step, base, entry))
            return
        fresh = tuple(each for each in entry.steps if not self._captured(each))
        if fresh:
            self._promoted.update((each, base + i) for i, each in enumerate(fresh))
            self._promotions.append((base, fresh))
            self._segments.append(_Segment(step, base + len(fresh), last.change))

    def _captured(self, step: int) -> bool:
        if step in self._promoted:
            return True
        at = bisect_right(self._segments, step, key=lambda segment: segment.start) - 1
        return self._segments[at].change.rule.contains(step)


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """The entry as a JSON object."""
    if isinstance(entry, ChangeEntry):
        rule = rule_to_json(entry.rule)
        return {"kind": "change", "from_step": entry.from_step, "rule": rule, "select": entry.select}
    return {"kind": "promote", "at_step": entry.at_step, "steps": list(entry.steps)}


def entry_from_json(found: Mapping[str, Any]) -> Entry:
    """The entry that `entry_to_json` wrote. Raises `DamagedError` for one that does not read."""
    try:
        if found["kind"] == "change":
            rule = rule_from_json(found["rule"])
            return ChangeEntry(from_step=int(found["from_step"]), rule=rule, select=found["select"])
        if found["kind"] == "promote":
            return PromoteEntry(at_step=int(found["at_step"]), steps=tuple(int(step) for step in found["steps"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"schedule entry {found!r} does not read ({error!r}); run gradtap verify") from error
    raise DamagedError(f"schedule entry kind {found['kind']!r} is unknown; a newer gradtap may have written it")


def _effect(entry: Entry) -> int:
    return entry.from_step if isinstance(entry, ChangeEntry) else entry.at_step
