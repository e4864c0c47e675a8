"""Capture numbers: a pure function of the log, on which ranks that read it late never disagree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtap.errors import DamagedError, StepNotFoundError, UsageError
from gradtap.plan.rules import EveryRule, FirstRule, LogRule, Rule, StepsRule
from gradtap.plan.schedule import ChangeEntry, Entry, PromoteEntry, Schedule, entry_from_json, entry_to_json

HORIZON = 160
EVERY = st.integers(1, 60).map(EveryRule)
RULES: st.SearchStrategy[Rule] = st.one_of(
    EVERY,
    st.lists(st.integers(1, HORIZON), min_size=1, max_size=20).map(lambda steps: StepsRule(tuple(steps))),
    st.builds(FirstRule, st.integers(1, 30), st.none() | EVERY),
    st.just(LogRule()),
)


@st.composite
def entries(draw: st.DrawFn, first: int, lowest: int) -> Entry:
    """Any entry, at step `lowest` or later, that a log beginning at step `first` may have."""
    step = draw(st.integers(lowest, HORIZON))
    if step == first or draw(st.booleans()):
        return ChangeEntry(from_step=step, rule=draw(RULES))
    steps = draw(st.lists(st.integers(first, step - 1), max_size=8))
    return PromoteEntry(at_step=step, steps=tuple(steps))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule."""
    first = draw(st.integers(1, 40))
    begin = ChangeEntry(from_step=first, rule=draw(RULES))
    return Schedule([begin, *sorted(draw(st.lists(entries(first, first), max_size=6)), key=effect)])


def effect(entry: Entry) -> int:
    """The step at which an entry takes effect."""
    return entry.from_step if isinstance(entry, ChangeEntry) else entry.at_step


def naive(schedule: Schedule, stop: int) -> list[int]:
    """Steps in the order of their numbers, told step by step as a training would go."""
    order: list[int] = []
    rule = schedule.entries[0].rule  # type: ignore[union-attr]
    for step in range(schedule.first_step, stop):
        for entry in schedule.entries[1:]:
            if effect(entry) != step:
                continue
            if isinstance(entry, ChangeEntry):
                rule = entry.rule
            else:
                order.extend(each for each in entry.steps if each not in order)
        if rule.contains(step):
            order.append(step)
    return order


@given(RULES, st.integers(1, 50), st.integers(0, HORIZON), st.integers(0, HORIZON))
def test_rule_counts(rule: Rule, origin: int, start: int, stop: int) -> None:
    """Counts and n-th steps of a rule are those of listing its steps."""
    rule = rule.at(origin)
    listed = [step for step in range(start, stop) if rule.contains(step)]
    assert rule.count(start, stop) == len(listed)
    for index, step in enumerate(listed):
        assert rule.nth(start, index) == step
    after = rule.nth(start, len(listed)) if start <= stop else None
    assert after is None or (after >= stop and rule.contains(after) and rule.count(start, after) == len(listed))


@given(schedules())
def test_numbers_are_those_of_the_story(schedule: Schedule) -> None:
    """Numbers are contiguous from 0, in the order in which a training meets captures and promotions."""
    order = naive(schedule, HORIZON + 20)
    numbers = {step: number for number, step in enumerate(order)}
    for step in range(-2, HORIZON + 20):
        assert schedule.number(step) == numbers.get(step)
        assert schedule.captures(step) == (step in numbers)
    assert [schedule.step(number) for number in range(len(order))] == order
    assert schedule.count(HORIZON + 20) == len(order)
    with pytest.raises(StepNotFoundError, match="names no step"):
        schedule.step(-1)


@given(schedules())
def test_step_past_the_end(schedule: Schedule) -> None:
    """A number past the last capture of a finite rule names no step; any other goes on."""
    number = schedule.count(HORIZON + 20)
    try:
        step = schedule.step(number)
    except StepNotFoundError:
        assert isinstance(schedule.change_at(HORIZON + 20).rule, StepsRule | FirstRule)
    else:
        assert step >= HORIZON + 20 and schedule.number(step) == number


@given(schedules(), st.data())
def test_an_entry_leaves_earlier_numbers(schedule: Schedule, data: st.DataObject) -> None:
    """An entry that takes effect at S leaves every number given to a step below S, promoted ones included."""
    entry = data.draw(entries(schedule.first_step, effect(schedule.entries[-1])))
    grown = schedule.extended(entry)
    for step in range(schedule.first_step, effect(entry)):
        number = schedule.number(step)
        if number is not None:
            assert grown.number(step) == number and grown.step(number) == step


@given(schedules(), st.data())
def test_late_ranks_never_disagree(schedule: Schedule, data: st.DataObject) -> None:
    """Ranks that read prefixes of the log late, drop or die, never journal two steps under one number.

    As a rank does: it numbers a step by the log it has read last; before it journals it reads the log as it is by
    then, and drops the capture if the number no longer names the step. Entries are appended before any rank reaches
    the step at which they take effect.
    """
    begin, *later = schedule.entries
    appended: list[int] = []
    for entry in later:
        drawn = data.draw(st.integers(schedule.first_step, effect(entry)))
        appended.append(max([drawn, *appended[-1:]]))
    logs = [Schedule([begin, *later[:count]]) for count in range(len(later) + 1)]
    meaning: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        reads = data.draw(st.sets(st.integers(schedule.first_step, HORIZON), max_size=6))
        died = data.draw(st.integers(schedule.first_step, HORIZON))
        mine = logs[0]
        for step in range(schedule.first_step, died):
            there = logs[sum(when <= step for when in appended)]
            mine = there if step in reads else mine
            number = mine.number(step)
            if number is not None and there.number(step) == number:
                assert meaning.setdefault(number, step) == step
                assert schedule.number(step) == number and schedule.step(number) == step


@given(schedules())
def test_json(schedule: Schedule) -> None:
    """Entries come back from their JSON, the rule's origin included, and give the same numbers."""
    again = [entry_from_json(entry_to_json(entry)) for entry in schedule.entries]
    assert tuple(again) == schedule.entries


def test_promoted_steps() -> None:
    """Promoted steps come after the captures before the promotion, and each step keeps its first number."""
    schedule = Schedule([ChangeEntry(from_step=1, rule=EveryRule(10)), PromoteEntry(at_step=25, steps=(23, 20, 22))])
    assert [schedule.step(n) for n in range(6)] == [10, 20, 22, 23, 30, 40]
    assert schedule.number(20) == 1 and schedule.number(21) is None


def test_selection_in_force() -> None:
    """The change entry at a step says the selection of its capture."""
    one = ChangeEntry(from_step=5, rule=EveryRule(1), select=["a.*"])
    two = ChangeEntry(from_step=9, rule=EveryRule(1))
    schedule = Schedule([one, two])
    assert [schedule.change_at(step) for step in (1, 8, 9, 100)] == [one, one, two, two]


def test_a_million_captures() -> None:
    """Numbers a million captures on come without listing them."""
    entry = ChangeEntry(from_step=1, rule=FirstRule(100, EveryRule(50)))
    schedule = Schedule([entry, PromoteEntry(at_step=10**7, steps=(10**7 - 1,))])
    step = 50 * 10**6
    number = schedule.number(step)
    # 100 steps, then the multiples 3 to 10**6 - 1 of 50, and one promoted step.
    assert number == 100 + 10**6 - 3 + 1 and schedule.step(number) == step


@pytest.mark.parametrize(
    "log",
    [
        [],
        [PromoteEntry(at_step=4, steps=(2,))],
        [ChangeEntry(from_step=4, rule=EveryRule(1)), ChangeEntry(from_step=3, rule=EveryRule(1))],
        [ChangeEntry(from_step=4, rule=EveryRule(1)), PromoteEntry(at_step=9, steps=(2,))],
        [
            ChangeEntry(from_step=1, rule=EveryRule(1)),
            PromoteEntry(at_step=9, steps=()),
            ChangeEntry(from_step=8, rule=EveryRule(2)),
        ],
    ],
)
def test_refused_logs(log: list[Entry]) -> None:
    """A log without a first change entry, with an entry that reaches before it, or out of order, is refused."""
    with pytest.raises(UsageError):
        Schedule(log)


def test_refused_promotion() -> None:
    """A step that is not over cannot be promoted."""
    with pytest.raises(UsageError, match="step 9 cannot be promoted at step 9"):
        PromoteEntry(at_step=9, steps=(3, 9))


@pytest.mark.parametrize(
    "found", [{}, {"kind": "moon"}, {"kind": "change"}, {"kind": "promote", "at_step": 1, "steps": 2}]
)
def test_damaged_entry(found: dict[str, object]) -> None:
    """An entry that does not read is damage."""
    with pytest.raises(DamagedError):
        entry_from_json(found)
