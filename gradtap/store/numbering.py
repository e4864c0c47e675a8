"""From a step to its capture number and its ledger row, through the session's schedule log."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from gradtap.errors import RendezvousError, StoreError
from gradtap.plan.rules import Rule
from gradtap.plan.schedule import ChangeEntry, Schedule
from gradtap.store.paths import SessionPaths
from gradtap.store.schedule_log import append_entry, read_schedule


class Numbering:
    """One rank's view of the schedule log. Rank 0 writes the first entry; the others wait for it."""

    def __init__(
        self, paths: SessionPaths, *, rank: int, rule: Rule, select: Sequence[str] | None, timeout: float
    ) -> None:
        self._path = paths.schedule_log
        self._rank = rank
        self._rule = rule
        self._select = None if select is None else list(select)
        self._timeout = timeout
        self._stamp: tuple[int, int] | None = None
        self.schedule: Schedule | None = None

    def start(self, step: int) -> Schedule:
        """The schedule, begun at `step` by rank 0 where the log is still empty.

        Raises `RendezvousError` where rank 0's entry does not appear in time.
        """
        self.refresh()
        if self.schedule is None and self._rank == 0:
            append_entry(self._path, ChangeEntry(from_step=step, rule=self._rule, select=self._select))
            self.refresh()
        deadline = time.monotonic() + self._timeout
        while self.schedule is None:
            if time.monotonic() > deadline:
                waited, self._timeout = self._timeout, 0.0  # the steps that follow must not wait again
                raise RendezvousError(
                    f"rank {self._rank} found no schedule in {self._path} after {waited:g} s: rank 0 has not reached "
                    "its first step, or the store is not shared between nodes"
                )
            time.sleep(0.02)
            self.refresh()
        return self.schedule

    def refresh(self) -> None:
        """Read the log again where it has changed."""
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(error.errno, f"cannot read {self._path}: {error.strerror}") from error
        stamp = (stat.st_size, stat.st_mtime_ns)
        if stamp != self._stamp:
            self.schedule = read_schedule(self._path)
            self._stamp = stamp

    def number(self, step: int) -> int | None:
        """The capture number of a step; None where the schedule does not capture it."""
        return self.start(step).number(step)

    def row(self, step: int) -> int:
        """The ledger row of a step."""
        return step - self.start(step).first_step
