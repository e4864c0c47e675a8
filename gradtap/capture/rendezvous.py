"""How the ranks of a job agree at attach: point to point, through the key-value store that torch.distributed has.

Nothing here is a collective: a rank that never attaches costs the others a time-out with a reason, not a hang.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradtap.errors import RendezvousError

_COUNTER = itertools.count()

_MARGIN = 10.0
"""Most seconds that a rank waits for rank 0's verdict beyond rank 0's own wait for all ranks."""


class Rendezvous:
    """One meeting of all ranks; every rank makes its meetings in the same order.

    Rank 0: `announce`, `wait_ready`, `conclude`. Others: `receive`, `ready`, `verdict`. All do nothing (and `receive`
    must not be called) in a world of one, or without a process group. `timeout` in seconds holds for each call;
    `verdict` waits half as long again (at most 10 s more), so that rank 0's reason arrives first.
    """

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self._rank, self._world, self.timeout = rank, world, timeout
        self._prefix = f"gradtap/{next(_COUNTER)}"
        self._store: Any = None
        if world > 1 and dist.is_available() and dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()

    @classmethod
    def of_process_group(cls, timeout: float) -> Rendezvous:
        """The meeting of this process's default process group; of this process alone where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), timeout)
        return cls(0, 1, timeout)

    @contextlib.contextmanager
    def telling_failures(self) -> Iterator[None]:
        """What is raised within is told to the ranks that wait for this one, so that they raise too, at once."""
        try:
            yield
        except BaseException as error:
            # A rank that cannot tell any more has lost the store's host: its own error is the one to see.
            with contextlib.suppress(RuntimeError):
                self._tell_failure(f"{type(error).__name__}: {error}")
            raise

    def _tell_failure(self, reason: str) -> None:
        if self._rank == 0:
            self._set("announce", {"error": reason})
            self._set("verdict", {"error": reason})
        else:
            self.ready(reason)

    def announce(self, message: Mapping[str, Any]) -> None:
        """Rank 0 tells the others where and what to record."""
        self._set("announce", dict(message))

    def receive(self) -> dict[str, Any]:
        """What rank 0 announced. Raises `RendezvousError` when it does not in time, or has failed."""
        message = dict(self._get("announce", "rank 0 has not announced a run"))
        if "error" in message:
            raise RendezvousError(f"rank 0: {message['error']}")
        return message

    def ready(self, error: str | None) -> None:
        """Tell rank 0 that this rank is prepared, or why it cannot be."""
        self._set(f"ready/{self._rank}", {"error": error})

    def wait_ready(self) -> None:
        """Rank 0 waits for all others. Raises `RendezvousError` with their reasons, or naming those who are missing."""
        if self._store is None:
            return
        until = time.monotonic() + self.timeout
        missing, failed = [], []
        for rank in range(1, self._world):
            key = f"{self._prefix}/ready/{rank}"
            if not self._arrived(key, until - time.monotonic()):
                missing.append(rank)
                continue
            error = json.loads(self._store.get(key))["error"]
            if error is not None:
                failed.append(f"rank {rank}: {error}")
        if missing:
            raise _missing(f"{_ranks(missing)} of {self._world} did not attach", self.timeout)
        if failed:
            raise RendezvousError("; ".join(failed))

    def conclude(self, error: str | None) -> None:
        """Rank 0 tells the others whether recording starts."""
        self._set("verdict", {"error": error})

    def verdict(self) -> None:
        """Returns where recording starts. Raises `RendezvousError` with rank 0's reason where it does not."""
        if self._store is None:
            return
        # Rank 0 waits as long as the others, and says only then who is missing: leave its reason time to arrive.
        seconds = self.timeout + min(_MARGIN, self.timeout / 2)
        error = self._get("verdict", "rank 0 has not said whether recording starts", seconds)["error"]
        if error is not None:
            raise RendezvousError(f"rank 0: {error}")

    def _set(self, name: str, message: Any) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{name}", json.dumps(message))

    def _get(self, name: str, what: str, seconds: float | None = None) -> Any:
        if self._store is None:
            raise RendezvousError(f"{what}: this process is alone, or has no process group")
        key = f"{self._prefix}/{name}"
        seconds = self.timeout if seconds is None else seconds
        if not self._arrived(key, seconds):
            raise _missing(what, seconds)
        return json.loads(self._store.get(key))

    def _arrived(self, key: str, seconds: float) -> bool:
        if self._store.check([key]):
            return True
        # The store counts whole milliseconds, and takes 0 of them for "for ever".
        if seconds < 0.001:
            return False
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            # torch's DistStoreError: time is up, or the store's host is gone; either way nothing came.
            return False
        return True


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _missing(what: str, seconds: float) -> RendezvousError:
    return RendezvousError(
        f"{what} within {seconds:g} s. Usual causes: attach is called on the main rank only (call it on every rank, "
        "outside `if is_main_process`), a rank failed before it came to attach (see its own output), or ranks attach "
        "at very different times (raise GRADTAP_ATTACH_TIMEOUT)"
    )
