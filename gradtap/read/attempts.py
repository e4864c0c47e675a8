"""From a step to the captures that hold it, over all sessions of a run: the newest session wins.

Where the newest session alone has more, its new captures are put in; else the index is built anew. A look-up is a
binary search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradtap.read.assemble import SessionReader

Versions = tuple[tuple[str, int], ...]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One complete capture of a step: `number` counts from 1, `capture` is the index along axis 0 of the arrays."""

    number: int
    session: str
    capture: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one attempt at a step lies. `complete` is False for one that not every rank committed."""

    step: int
    attempt: int
    reader: SessionReader
    capture: int
    complete: bool = True


class AttemptIndex:
    """The complete captures of all sessions, by step. Immutable; `versions` says of what state."""

    def __init__(self, versions: Versions = (), readers: Sequence[SessionReader] = ()) -> None:
        self.versions = versions
        self._readers = tuple(readers)
        self._seen = 0
        parts: list[tuple[Numbers, Numbers, Numbers]] = []
        for at, reader in enumerate(readers):
            steps, captures, self._seen = _complete(reader, 0)
            parts.append((steps, np.full(len(steps), at, np.int64), captures))
        joined = [np.concatenate(columns) for columns in zip(*parts, strict=True)] or [np.empty(0, np.int64)] * 3
        order = np.lexsort((joined[1], joined[0]))
        self._steps, self._sessions, self._captures = (column[order] for column in joined)
        self.steps: tuple[int, ...] = tuple(np.unique(self._steps).tolist())

    def grown(self, versions: Versions, readers: Sequence[SessionReader]) -> AttemptIndex:
        """The index of now, `versions` and `readers` being those of now."""
        if not readers or self._readers != tuple(readers) or self.versions[:-1] != versions[:-1]:
            return AttemptIndex(versions, readers)
        made = AttemptIndex()
        made.versions, made._readers = versions, self._readers
        steps, captures, made._seen = _complete(readers[-1], self._seen)
        order = np.argsort(steps, kind="stable")
        steps, captures = steps[order], captures[order]
        # After the attempts of older sessions at the same step.
        at = np.searchsorted(self._steps, steps, "right")
        made._steps = np.insert(self._steps, at, steps)
        made._sessions = np.insert(self._sessions, at, len(readers) - 1)
        made._captures = np.insert(self._captures, at, captures)
        if not len(steps):
            made.steps = self.steps
        elif not self.steps or steps[0] > self.steps[-1]:
            made.steps = self.steps + tuple(np.unique(steps).tolist())
        else:
            made.steps = tuple(np.unique(made._steps).tolist())
        return made

    def places(self, step: int) -> list[Place]:
        """The attempts at a step, oldest session first; empty where there is no complete one."""
        low, high = (int(np.searchsorted(self._steps, step, side)) for side in ("left", "right"))
        return [
            Place(
                step=step,
                attempt=number,
                reader=self._readers[int(self._sessions[at])],
                capture=int(self._captures[at]),
            )
            for number, at in enumerate(range(low, high), 1)
        ]

    def counts(self, steps: Sequence[int]) -> list[int]:
        """How many complete captures each of these steps has."""
        low, high = (np.searchsorted(self._steps, np.array(steps, np.int64), side) for side in ("left", "right"))
        return np.subtract(high, low).tolist() if len(steps) else []

    def newest(self) -> tuple[Numbers, Numbers]:
        """Each complete step, ascending, and the index of the session whose attempt at it is in force."""
        last = last_of_each(self._steps)
        return self._steps[last], self._sessions[last]


def last_of_each(ascending: Numbers) -> NDArray[np.bool_]:
    """Which entries are the last of their value, in an ascending array."""
    return np.append(ascending[1:] != ascending[:-1], True)[: len(ascending)]


def _complete(reader: SessionReader, since: int) -> tuple[Numbers, Numbers, int]:
    """Steps and numbers of the complete captures from `since` on, and how many captures were looked at."""
    known = reader.captures.steps
    there = np.flatnonzero(known[since:] >= 0) + since
    return known[there], there.astype(np.int64), len(known)
