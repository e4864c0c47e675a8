"""What one answer may cost, and what to ask for instead where it would cost more. Arithmetic: nothing is read here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from gradtap.errors import LimitError
from gradtap.selection import Selection
from gradtap_server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one answer may be and read, as in the settings. Bytes read are those of the chunks, decoded."""

    response_bytes: int
    read_bytes: int
    amplification: int
    amplification_from: int
    chunks: int
    json_elements: int

    @classmethod
    def of(cls, settings: ServerSettings) -> Limits:
        """Those that the operator has set."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an answer would cost. `elements` counts where each of them is written out as text; 0 for bytes."""

    response_bytes: int
    read_bytes: int
    chunks: int
    elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One limit that a cost goes beyond. `name` is the limit's, in the settings too."""

    name: str
    found: int
    most: int

    def __str__(self) -> str:
        return _BREACHES[self.name].format(found=self.found, most=self.most)


_BREACHES = {
    "response_bytes": "the answer has {found} bytes, the most is {most}",
    "read_bytes": "it would read {found} bytes (decoded), the most is {most}",
    "amplification": "it would read {found} bytes (decoded), the most for an answer as small as this is {most}",
    "chunks": "it would read {found} chunks, the most is {most}",
    "json_elements": "{found} elements would be written as JSON, the most is {most}",
}


def breach(cost: Cost, limits: Limits) -> Breach | None:
    """The first limit that the cost goes beyond; None where it fits.

    However little of it is asked for, one chunk never counts as too much for so small an answer: no slice could ask
    for less of it. The other limits hold for it too.
    """
    amplified = max(limits.amplification_from, limits.amplification * cost.response_bytes)
    checks = (
        ("json_elements", cost.elements, limits.json_elements),
        ("response_bytes", cost.response_bytes, limits.response_bytes),
        ("chunks", cost.chunks, limits.chunks),
        ("read_bytes", cost.read_bytes, limits.read_bytes),
        ("amplification", cost.read_bytes if cost.chunks > 1 else 0, amplified),
    )
    return next((Breach(name=name, found=found, most=most) for name, found, most in checks if found > most), None)


Measure = Callable[[Selection, int], Cost]
"""What a selection of the parameter at the first so many steps would cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What was asked for: a selection of a parameter, at `steps`; `stride` is that of their range if it had one."""

    where: Selection
    steps: Sequence[int]
    stacked: bool
    stride: int | None = None


def check_cost(ask: Ask, measure: Measure, limits: Limits) -> Cost:
    """What the answer costs. Raises `LimitError` where that is too much, with a part of it that is not."""
    cost = measure(ask.where, len(ask.steps))
    found = breach(cost, limits)
    if found is None:
        return cost
    fitting = suggest(ask, lambda where, steps: breach(measure(where, steps), limits) is None)
    if fitting:
        changed = {name: text for name, text in fitting.items() if text != _text(ask.where)}
        cure = "ask for " + " and ".join(f"{name.removeprefix('suggested_')}={text}" for name, text in changed.items())
    else:
        cure = "no part of it fits: the server's limits are smaller than the least answer"
    raise LimitError(f"{found}; {cure}").noting(**_facts(found, cost), **fitting)


def _facts(found: Breach, cost: Cost) -> dict[str, Any]:
    facts: dict[str, Any] = {"limit": found.name, "found": found.found, "most": found.most}
    if found.name not in ("chunks", "json_elements"):
        facts["limit_bytes"] = found.most
    facts |= {"response_bytes": cost.response_bytes, "read_bytes": cost.read_bytes, "chunks": cost.chunks}
    return facts | ({"elements": cost.elements} if cost.elements else {})


def suggest(ask: Ask, fits: Callable[[Selection, int], bool]) -> dict[str, str]:
    """The leading part of what was asked for that fits, as the facts of the error; empty where not one element does.

    Steps are left out first, then rows from the end, so that what is left is contiguous where the whole was.
    """
    if not ask.stacked:
        part = _leading(ask.where, lambda where: fits(where, 1))
        return {} if part is None else {"suggested_slice": _text(part)}
    most = _largest(len(ask.steps), lambda steps: fits(ask.where, steps))
    part = ask.where if most else _leading(ask.where, lambda where: fits(where, 1))
    if part is None:
        return {}
    return {"suggested_slice": _text(part), "suggested_steps": first_steps(ask.steps, most or 1, ask.stride)}


def _text(where: Selection) -> str:
    """A slice without blanks: it can be put into an address as it is."""
    return str(where).replace(" ", "")


def first_steps(steps: Sequence[int], count: int, stride: int | None) -> str:
    """The range that names the first `count` of the steps that a range with this stride has named."""
    text = f"{steps[0]}:{steps[count - 1] + 1}"
    return text if stride in (None, 1) else f"{text}:{stride}"


def _leading(where: Selection, fits: Callable[[Selection], bool]) -> Selection | None:
    """The first elements in row-major order that fit: whole rows, else whole rows of one row, and so on."""
    part = where
    for at, axis in enumerate(where.axes):
        if isinstance(axis, range):
            most = _largest(len(axis), partial(_fits_cut, fits, part, at))
            part = _cut(part, at, most or 1)
            if most:
                return part
    return part if fits(part) else None


def _fits_cut(fits: Callable[[Selection], bool], where: Selection, at: int, count: int) -> bool:
    return fits(_cut(where, at, count))


def _cut(where: Selection, at: int, count: int) -> Selection:
    axes = tuple(axis[:count] if i == at and isinstance(axis, range) else axis for i, axis in enumerate(where.axes))
    return Selection(source=where.source, axes=axes)


def _largest(length: int, fits: Callable[[int], bool]) -> int:
    """The largest count below `length` that fits, 0 where none does. Small counts are the cheap ones to try."""
    above, found = length, length // 2
    while found and not fits(found):
        above, found = found, found // 2
    while found and above - found > 1:
        middle = (found + above) // 2
        above, found = (above, middle) if fits(middle) else (middle, found)
    return found
