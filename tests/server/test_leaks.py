"""A server that runs for long: what it opens it closes, however runs come and go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx2
import psutil

from tests.server.test_launch import launched
from tests.support.synthetic import Job, spec

REQUESTS = int(os.environ.get("GRADTAP_TEST_REQUESTS", "300"))
RUNS = int(os.environ.get("GRADTAP_TEST_RUNS", "12"))


def numbers(process: psutil.Process) -> tuple[int, int, int]:
    """Open descriptors, threads, bytes of memory."""
    return process.num_fds(), process.num_threads(), process.memory_info().rss


def asking(client: httpx2.Client) -> list[Callable[[str], int]]:
    """Requests of every kind, each of which gives its status."""

    def again(run: str) -> int:
        path = f"/api/v1/runs/{run}/steps/1/grads/w"
        tag = client.get(path).headers.get("etag", "")
        return client.get(path, headers={"If-None-Match": tag}).status_code

    return [
        lambda run: client.get(f"/api/v1/runs/{run}/steps/last/grads/w").status_code,
        lambda run: client.get(f"/api/v1/runs/{run}/steps/1/grads/w/hist").status_code,
        lambda run: client.get(f"/api/v1/runs/{run}/norms").status_code,
        lambda run: client.get(f"/api/v1/runs/{run}/nothing").status_code,
        lambda run: client.head(f"/api/v1/runs/{run}/steps/1/grads/w").status_code,
        again,
        lambda run: client.get("/api/v1/runs").status_code,
        lambda run: client.get(f"/api/v1/runs/{run}").status_code,
    ]


def test_descriptors_and_threads_do_not_grow(tmp_path: Path) -> None:
    """After many requests of all kinds, of runs that come and go, as many files and threads are open as at first."""
    made = tmp_path / "made"
    Job(run=made, params=(spec("w", 40, 30), spec("b", 7)), world=1).steps([1, 2, 3]).close()
    store = tmp_path / "store"
    shutil.copytree(made, store / "stays.gradtap")
    with (
        launched(store, GRADTAP_SERVER_RESCAN="0", GRADTAP_SERVER_THREADS="2") as (process, url),
        httpx2.Client(base_url=url, trust_env=False, timeout=20) as client,
    ):
        watched, kinds = psutil.Process(process.pid), asking(client)
        for _ in range(5):
            assert {kind("stays") for kind in kinds} == {200, 304, 404}
        before = numbers(watched)
        for at in range(RUNS):
            shutil.copytree(made, store / f"run{at}.gradtap")
            for number in range(REQUESTS // RUNS):
                assert kinds[number % len(kinds)](f"run{at}") < 500
            shutil.rmtree(store / f"run{at}.gradtap")
        assert client.get("/api/v1/runs").json()["total"] == 1
        after = numbers(watched)
    said = f"descriptors, threads, bytes: {before} before, {after} after {REQUESTS} requests of {RUNS} runs"
    assert after[0] <= before[0] + 2, said
    assert after[1] <= before[1] + 4, said
    assert after[2] - before[2] < 64 * 2**20, said
