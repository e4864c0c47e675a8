"""What is new in a run since the last look: the complete steps, each once, and whether more may come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtap.query.answer import Answer
    from gradtap.query.place import Place

OPEN = ("live", "empty")
"""States of a run that may grow."""

UNTOLD = (None, "unknown")
"""States of a step that was just made; whether it was applied is known when the next one begins, or at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Rows of `gradtap.query.steps` that were not there at the last look, and the state of the run."""

    rows: Sequence[Mapping[str, Any]]
    state: str


def following(
    place: Place,
    interval: float,
    *,
    most: int | None = None,
    last: int = 0,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[News]:
    """News every `interval` seconds, the last `last` known steps first, until nobody writes the run.

    With `most`, until so many steps have come that were not there at first.
    """
    look = _Look(place)
    known = look.all_steps()
    yield News(rows=known[max(len(known) - last, 0) :], state=look.state)
    left = most
    while look.state in OPEN and left != 0:
        sleep(interval)
        rows = look.new_steps()
        if not rows:
            # The state before the steps: what was published at the end is then seen too.
            look.renew()
            rows = look.new_steps()
        if left is not None:
            rows = rows[:left]
            left -= len(rows)
        if rows or look.state not in OPEN:
            yield News(rows=rows, state=look.state)


class _Look:
    """Knows the newest session, and the last step of it that was seen: a resumed training may begin further back."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._session: str | None = None
        self._from: int | None = None
        self.state = ""
        self.renew()

    def renew(self) -> None:
        """Look at the state, and whether there is another session."""
        facts = self._place.info().facts
        self.state = facts["state"]
        newest = facts["sessions"][-1] if facts["sessions"] else None
        if newest is not None and newest["name"] != self._session and newest["state"] != "damaged":
            self._session, self._from = newest["name"], newest["first_step"]

    def all_steps(self) -> list[Mapping[str, Any]]:
        """All complete steps, those of earlier sessions too."""
        rows = self._told(self._place.steps())
        self._note(rows)
        return rows

    def new_steps(self) -> list[Mapping[str, Any]]:
        """Complete steps of the newest session after those that were seen."""
        start = "" if self._from is None else str(self._from)
        rows = [row for row in self._told(self._place.steps(f"{start}:")) if row["session"] == self._session]
        self._note(rows)
        return rows

    def _told(self, answer: Answer) -> list[Mapping[str, Any]]:
        """The complete steps of an answer, without one whose outcome the next step has yet to tell."""
        rows = [row for row in answer.rows if row["complete"]]
        if self.state not in OPEN:
            return rows
        return [row for row in rows if row["state"] not in UNTOLD or row["step"] < answer.facts["last"]]

    def _note(self, rows: Sequence[Mapping[str, Any]]) -> None:
        own = [row["step"] for row in rows if row["session"] == self._session]
        if own:
            self._from = max(own) + 1
