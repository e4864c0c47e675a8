"""The journals of all ranks, for whoever follows them: opened when asked for, a bounded number at a time."""

from __future__ import annotations

from collections import OrderedDict

from gradtap.store.journal import ClosedMark, JournalReader, RecordHead
from gradtap.store.paths import SessionPaths


class JournalSet:
    """Reads what the ranks of a session have journaled. Not for several threads at once.

    With a thousand ranks, more open files than a process may have would be needed: `most_open` bounds them.
    """

    def __init__(self, paths: SessionPaths, world: int, *, most_open: int) -> None:
        self._most_open = most_open
        self._paths = paths
        self._world = world
        self._open: OrderedDict[int, JournalReader] = OrderedDict()

    def last(self) -> dict[int, int]:
        """Highest capture journaled (-1: none yet) by rank; ranks without a journal are left out."""
        return {rank: reader.last() for rank in range(self._world) if (reader := self._reader(rank)) is not None}

    def heads(self, capture: int) -> list[RecordHead | None]:
        """What each rank says of a capture; None where it says nothing."""
        readers = (self._reader(rank) for rank in range(self._world))
        return [None if reader is None else reader.head(capture) for reader in readers]

    def closed(self) -> dict[int, ClosedMark]:
        """The closed marks, by rank, of those that have closed."""
        found = {}
        for rank in range(self._world):
            reader = self._reader(rank)
            mark = None if reader is None else reader.closed
            if mark is not None:
                found[rank] = mark
        return found

    def close(self) -> None:
        """Give all files back."""
        while self._open:
            self._open.popitem()[1].close()

    def _reader(self, rank: int) -> JournalReader | None:
        reader = self._open.get(rank)
        if reader is None:
            path = self._paths.journal(rank)
            if not path.exists():
                return None
            reader = self._open[rank] = JournalReader(path)
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(rank)
        return reader
