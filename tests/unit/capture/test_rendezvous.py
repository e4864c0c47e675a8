"""The meeting of ranks, with threads for ranks and an in-process store. Real processes: tests/integration."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gradtap.capture import rendezvous
from gradtap.capture.rendezvous import Rendezvous
from gradtap.errors import AttachError, RendezvousError


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rendezvous]:
    """A maker of meetings over one HashStore; every rank's n-th meeting has the same keys."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    made: dict[int, int] = {}

    def make(rank: int, world: int = 3, timeout: float = 5.0) -> Rendezvous:
        number = made[rank] = made.get(rank, -1) + 1
        monkeypatch.setattr(rendezvous, "_COUNTER", iter([number]))
        return Rendezvous(rank, world, timeout)

    return make


def _run(*jobs: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except AttachError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _lead(meeting: Rendezvous) -> str:
    with meeting.telling_failures():
        meeting.announce({"run": "r", "number": 3})
        meeting.wait_ready()
        meeting.conclude(None)
    return "recording"


def _follow(meeting: Rendezvous, trouble: str | None = None) -> Any:
    with meeting.telling_failures():
        told = meeting.receive()
        if trouble:
            raise AttachError(trouble)
        meeting.ready(None)
        meeting.verdict()
    return told


def test_all_ranks_hear_rank_0(meet: Callable[..., Rendezvous]) -> None:
    """Every rank gets what rank 0 announced, and all start."""
    zero, one, two = meet(0), meet(1), meet(2)
    told = _run(lambda: _lead(zero), lambda: _follow(one), lambda: _follow(two))
    assert told == ["recording", {"run": "r", "number": 3}, {"run": "r", "number": 3}]


def test_a_failing_rank_stops_all_with_its_reason(meet: Callable[..., Rendezvous]) -> None:
    """When rank 2 cannot, rank 0 and rank 1 raise its reason, naming rank 2."""
    zero, one, two = meet(0), meet(1), meet(2)
    told = _run(lambda: _lead(zero), lambda: _follow(one), lambda: _follow(two, "no gradient here"))
    assert "rank 2: AttachError: no gradient here" in str(told[0])
    assert isinstance(told[1], RendezvousError) and "no gradient here" in str(told[1])
    assert str(told[2]) == "no gradient here"


def test_a_failing_rank_0_stops_all_with_its_reason(meet: Callable[..., Rendezvous]) -> None:
    """When rank 0 fails before it announces, the others raise its reason at once instead of waiting."""
    zero, one = meet(0), meet(1)

    def fail() -> None:
        with zero.telling_failures():
            raise AttachError("the store is locked")

    told = _run(fail, lambda: _follow(one))
    assert isinstance(told[1], RendezvousError) and "rank 0: AttachError: the store is locked" in str(told[1])


def test_missing_ranks_are_named_with_the_usual_causes(meet: Callable[..., Rendezvous]) -> None:
    """Rank 0 alone times out, names who did not come, and how that happens."""
    zero = meet(0, timeout=0.2)
    with pytest.raises(RendezvousError, match="ranks 1, 2 of 3 did not attach within 0.2 s.*main rank only"):
        _lead(zero)


def test_a_silent_rank_0_is_named(meet: Callable[..., Rendezvous]) -> None:
    """Without a word from rank 0 the others time out and say so."""
    with pytest.raises(RendezvousError, match="rank 0 has not announced a run within 0.2 s"):
        _follow(meet(1, timeout=0.2))


def test_a_late_rank_hears_that_rank_0_gave_up(meet: Callable[..., Rendezvous]) -> None:
    """A rank that comes after rank 0's time-out raises with rank 0's reason; the next meeting is a new one."""
    zero, one = meet(0, 2, 0.2), meet(1, 2, 0.2)
    with pytest.raises(RendezvousError):
        _lead(zero)
    with pytest.raises(RendezvousError, match="rank 0: RendezvousError: rank 1 of 2 did not attach"):
        _follow(one)
    again, follower = meet(0, 2), meet(1, 2)
    assert _run(lambda: _lead(again), lambda: _follow(follower))[0] == "recording"


def test_a_rank_hears_why_rank_0_gave_up_at_the_last_moment(meet: Callable[..., Rendezvous]) -> None:
    """Rank 1 waits from before rank 0 does, and just as long; it still hears who was missing, not only silence."""
    zero, one = meet(0, 3, 0.4), meet(1, 3, 0.4)

    def lead_late() -> None:
        with zero.telling_failures():
            zero.announce({})
            time.sleep(0.1)
            zero.wait_ready()

    told = _run(lead_late, lambda: _follow(one))
    assert "rank 2 of 3 did not attach" in str(told[0])
    assert "rank 0: RendezvousError: rank 2 of 3 did not attach" in str(told[1])


def test_alone_everything_is_said_to_nobody() -> None:
    """In a world of one, or without a process group, rank 0's calls return at once."""
    assert _lead(Rendezvous(0, 1, 1.0)) == "recording"
    assert _lead(Rendezvous.of_process_group(1.0)) == "recording"


@pytest.mark.parametrize("seconds", [0.0, 1e-5, 9e-4, -1.0])
def test_less_than_a_millisecond_is_no_wait(meet: Callable[..., Rendezvous], seconds: float) -> None:
    """What is left of a time-out after other ranks used it up ends the wait, and does not turn into a wait for ever."""
    with pytest.raises(RendezvousError, match="rank 0 has not announced"):
        meet(1, timeout=seconds).receive()
