"""From a step to the captures that hold it, over all sessions of a run: the newest session wins.

Built anew when some session has more; a look-up is a binary search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradtap.read.assemble import SessionReader

Versions = tuple[tuple[str, int], ...]


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
        steps, sessions, captures = [], [], []
        for at, reader in enumerate(readers):
            known = reader.captures.steps
            there = np.flatnonzero(known >= 0)
            steps.append(known[there])
            sessions.append(np.full(len(there), at, np.int64))
            captures.append(there.astype(np.int64))
        self._steps, self._sessions, self._captures = map(_joined, (steps, sessions, captures))
        order = np.lexsort((self._sessions, self._steps))
        self._steps, self._sessions, self._captures = (
            values[order] for values in (self._steps, self._sessions, self._captures)
        )
        self.steps: tuple[int, ...] = tuple(np.unique(self._steps).tolist())

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


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
