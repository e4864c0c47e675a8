"""Rules as users write them."""

from __future__ import annotations

import pytest

from gradtap.errors import DamagedError, UsageError
from gradtap.plan.rules import EveryRule, FirstRule, LogRule, Rule, StepsRule, parse_rule, rule_from_json, rule_to_json


def steps(rule: Rule, stop: int) -> list[int]:
    """Captured steps below `stop`."""
    return [step for step in range(stop) if rule.contains(step)]


@pytest.mark.parametrize(
    ("every", "rule"),
    [
        (1, EveryRule(1)),
        (50, EveryRule(50)),
        ("50", EveryRule(50)),
        ("every 50", EveryRule(50)),
        ([9, 3, 3], StepsRule((3, 9))),
        (range(1, 4), StepsRule((1, 2, 3))),
        ("first 100", FirstRule(100, None)),
        ("first 100, then every 50", FirstRule(100, EveryRule(50))),
        ("First 100 then  every 50", FirstRule(100, EveryRule(50))),
        ("log-spaced", LogRule()),
    ],
)
def test_parse(every: int | str | list[int], rule: Rule) -> None:
    """A number, a list and each text give their rule."""
    assert parse_rule(every) == rule
    assert rule_from_json(rule_to_json(rule)) == rule


@pytest.mark.parametrize("every", [0, -1, True, "", "often", "every 0", "first 0", "first", 1.5, [], [1.5], [-2], None])
def test_parse_refuses(every: object) -> None:
    """What is no rule is refused."""
    with pytest.raises(UsageError):
        parse_rule(every)  # type: ignore[arg-type]


def test_parse_names_what_is_allowed() -> None:
    """The refusal shows the text and what is allowed."""
    with pytest.raises(UsageError, match=r"'often'; allowed are .*log-spaced"):
        parse_rule("often")


@pytest.mark.parametrize(
    "found", [{"kind": "moon"}, {"kind": "every"}, {"kind": "every", "n": 0}, {"kind": "steps", "steps": 3}, {}]
)
def test_damaged_json(found: dict[str, object]) -> None:
    """A rule that does not read is damage."""
    with pytest.raises(DamagedError):
        rule_from_json(found)


def test_every() -> None:
    """Every n means the steps that n divides."""
    assert steps(EveryRule(4), 13) == [0, 4, 8, 12]


def test_first_counts_from_its_origin() -> None:
    """The first steps count from where the rule takes effect; the later ones by step number."""
    assert steps(FirstRule(3, EveryRule(5)).at(6), 21) == [6, 7, 8, 10, 15, 20]
    assert steps(FirstRule(3, None).at(6), 21) == [6, 7, 8]


def test_log_spaced() -> None:
    """Log-spaced steps are floor(10 ** (j / 20)): 20 a decade from 10 on."""
    rule = LogRule()
    assert steps(rule, 101)[-21:] == [
        10,
        11,
        12,
        14,
        15,
        17,
        19,
        22,
        25,
        28,
        31,
        35,
        39,
        44,
        50,
        56,
        63,
        70,
        79,
        89,
        100,
    ]
    assert steps(rule, 10) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [rule.count(10**d, 10 ** (d + 1)) for d in range(1, 18)] == [20] * 17
