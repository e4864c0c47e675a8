"""Threads for reads: a limit, a time-out, and metadata that is answered while all of them are busy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from gradtap.errors import TimedOutError, UsageError
from gradtap.read.request import GradRequest
from gradtap_server.reads import in_thread
from tests.server.samples import grad_path
from tests.server.serving import serving
from tests.support.synthetic import Job, spec

RUN = "slow"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads of gradients that wait until this is set."""
    gate, read = threading.Event(), GradRequest.read

    def waiting(self: GradRequest, *args: Any) -> Any:
        assert gate.wait(20)
        return read(self, *args)

    monkeypatch.setattr(GradRequest, "read", waiting)
    return gate


@pytest.fixture
def run(tmp_path: Path) -> Path:
    job = Job(run=tmp_path / RUN, params=(spec("w", 30, 20),)).steps([1, 2])
    job.close()
    return job.run


def test_metadata_answers_while_reads_are_busy(run: Path, held: threading.Event) -> None:
    """While all threads for reads are taken, steps, norms, stored histograms, HEAD and 304 are still answered."""
    with serving(run, threads=2, timeout=15) as server, ThreadPoolExecutor(6) as pool:
        tag = server.head(grad_path(RUN, 1, "w")).headers["etag"]
        waiting = [pool.submit(server.get, grad_path(RUN, 1, "w")) for _ in range(6)]
        limiter = server.app.state.gradtap.limiter
        deadline = time.monotonic() + 10
        while limiter.borrowed_tokens < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for path in ("/healthz", f"/api/v1/runs/{RUN}", f"/api/v1/runs/{RUN}/norms", grad_path(RUN, 1, "w") + "/hist"):
            assert server.get(path).status_code == 200
        assert server.head(grad_path(RUN, 2, "w")).status_code == 200
        assert server.get(grad_path(RUN, 1, "w"), headers={"If-None-Match": tag}).status_code == 304
        assert limiter.borrowed_tokens == 2 and not any(each.done() for each in waiting)
        held.set()
        assert [each.result().status_code for each in waiting] == [200] * 6


def test_too_slow_is_a_503(run: Path, held: threading.Event) -> None:
    """Whoever waits longer than the time-out, for the read or for a thread, gets a 503 that says when to ask again."""
    with serving(run, threads=1, timeout=0.3) as server, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(server.get, [grad_path(RUN, 1, "w")] * 2))
        for answer in answers:
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/timed-out")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["cache-control"] == "no-store"
        assert sorted("busy" in answer.json()["detail"] for answer in answers) == [False, True]
        limiter = server.app.state.gradtap.limiter
        assert limiter.borrowed_tokens == 1
        held.set()
        deadline = time.monotonic() + 10
        while limiter.borrowed_tokens:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.get(grad_path(RUN, 1, "w")).status_code == 200


def test_a_stack_gives_up_between_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read whose client was turned away stops at the next step: its thread is not kept to the end."""
    reached = []
    read = GradRequest.read

    def slow(self: GradRequest, progress: Callable[[int, int], None]) -> Any:
        def slower(done: int, whole: int) -> None:
            time.sleep(0.3)
            reached.append(done)
            progress(done, whole)

        return read(self, slower)

    monkeypatch.setattr(GradRequest, "read", slow)
    with serving(run, timeout=0.2) as server:
        assert server.get(f"/api/v1/runs/{RUN}/grads/w?steps=1:3").status_code == 503
        deadline = time.monotonic() + 10
        while server.app.state.gradtap.limiter.borrowed_tokens:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert reached == [1]


def ran(work: Callable[[], Any], timeout: float = 5.0, threads: int = 1) -> Any:
    async def main() -> Any:
        return await in_thread(work, timeout=timeout, limiter=anyio.CapacityLimiter(threads))

    return asyncio.run(main())


def test_results_and_errors_come_back() -> None:
    """What the work returns is returned, what it raises is raised, and it runs in another thread."""

    def fail() -> None:
        raise UsageError("no")

    assert ran(threading.get_ident) != threading.get_ident()
    with pytest.raises(UsageError, match="no"):
        ran(fail)


def test_late_errors_are_dropped() -> None:
    """An error after the time-out reaches nobody and makes no noise."""
    failed = threading.Event()

    def fail() -> None:
        time.sleep(0.2)
        failed.set()
        raise UsageError("late")

    async def main() -> None:
        with pytest.raises(TimedOutError) as caught:
            await in_thread(fail, timeout=0.05, limiter=anyio.CapacityLimiter(1))
        assert caught.value.facts["timeout_seconds"] == 0.05
        while not failed.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    asyncio.run(main())


def test_who_was_turned_away_costs_nothing() -> None:
    """Work that still waits for a thread when its client is turned away is never done."""
    gate, ran_late = threading.Event(), threading.Event()

    async def main() -> None:
        limiter = anyio.CapacityLimiter(1)
        first = asyncio.create_task(in_thread(lambda: gate.wait(20), timeout=20, limiter=limiter))
        while not limiter.borrowed_tokens:
            await asyncio.sleep(0.01)
        with pytest.raises(TimedOutError, match="busy"):
            await in_thread(ran_late.set, timeout=0.05, limiter=limiter)
        gate.set()
        assert await first
        assert await in_thread(lambda: 3, timeout=5, limiter=limiter) == 3

    asyncio.run(main())
    assert not ran_late.is_set()
