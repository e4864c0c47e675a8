"""Gradients of runs in all states: growing, resumed, killed, with steps in flight or left out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.server.samples import OddJob, array_of, grad_path, reads, same_bits, stack_path
from tests.server.serving import serving
from tests.support.synthetic import NEVER, Job, spec

RUN = "r"
SMALL = (spec("w", 30, 20), spec("b", 30))


def test_a_growing_run(tmp_path: Path) -> None:
    """What is recorded while the service runs is there at the next request: `last` moves on, stacks grow."""
    job = Job(run=tmp_path / RUN, params=SMALL)
    with serving(tmp_path) as server:
        assert server.get(grad_path(RUN, "last", "w")).status_code == 404
        tags, lengths = set(), []
        for step in (1, 2, 3):
            job.step(step)
            job.wait_published(step)
            answer = server.get(grad_path(RUN, "last", "w"))
            assert answer.headers["x-gradtap-step"] == str(step)
            assert same_bits(array_of(answer), job.expected("w", step))
            stack = server.get(stack_path(RUN, "b", "1:"))
            lengths.append(array_of(stack).shape[0])
            tags |= {answer.headers["etag"], stack.headers["etag"]}
        assert lengths == [1, 2, 3]
        assert len(tags) == 6
        job.close()
        assert same_bits(array_of(server.get(grad_path(RUN, "first", "w"))), job.expected("w", 1))


def test_lasting_only_once_settled(tmp_path: Path) -> None:
    """The address of an attempt may be kept for good only when nothing of it can change any more."""
    job = Job(run=tmp_path / RUN, params=SMALL, settings=NEVER)
    job.step(1)
    job.flush()
    with serving(job.run) as server:
        location = server.get(grad_path(RUN, 1, "w")).headers["content-location"]
        assert server.head(location).headers["cache-control"] == "no-cache"
        job.close()
        assert server.head(location).headers["cache-control"].endswith("immutable")


def test_step_in_flight(tmp_path: Path) -> None:
    """A step that ranks are still committing is a 409 that says to ask again; `partial` gives what is there."""
    job = Job(run=tmp_path / RUN, params=SMALL).steps([1])
    job.step(2, absent=[2])
    job.flush()
    with serving(job.run) as server:
        answer = server.get(grad_path(RUN, 2, "w"))
        assert answer.status_code == 409
        assert answer.json()["type"] == "/problems/step-in-flight"
        assert int(answer.headers["retry-after"]) >= 1
        assert server.head(grad_path(RUN, 2, "w")).status_code == 409
        part = server.get(grad_path(RUN, 2, "w", partial=1))
        values, wanted = array_of(part), job.expected("w", 2)
        there = ~np.isnan(values)
        assert 0 < there.sum() < there.size
        assert same_bits(values[there], wanted[there])
        assert part.headers["x-gradtap-complete"] == "false"
        assert part.headers["cache-control"] == "no-store"
        assert "etag" not in part.headers and "content-location" not in part.headers
        head = server.head(grad_path(RUN, 2, "w", partial=1))
        assert head.headers["content-length"] == str(len(part.content)) and "x-gradtap-complete" not in head.headers
        assert server.get(grad_path(RUN, 2, "w", partial=1), headers={"If-None-Match": "*"}).status_code == 200
    job.kill()


def test_attempts_of_a_resumed_run(tmp_path: Path) -> None:
    """After a resume the newest attempt is the answer; the older one stays under its number, each with its own tag."""
    old = OddJob(run=tmp_path / RUN, params=SMALL, seed=1).steps([1, 2, 3])
    old.kill()
    new = OddJob(run=tmp_path / RUN, params=SMALL, seed=2).steps([2, 3, 4])
    new.close()
    with serving(tmp_path) as server:
        newest = server.get(grad_path(RUN, 2, "w"))
        assert newest.headers["x-gradtap-attempt"] == "2"
        assert same_bits(array_of(newest), new.expected("w", 2))
        assert same_bits(array_of(server.get(newest.headers["content-location"])), new.expected("w", 2))
        first = server.get(grad_path(RUN, 2, "w", attempt=1))
        assert same_bits(array_of(first), old.expected("w", 2))
        assert first.headers["etag"] != newest.headers["etag"]
        stack = server.get(stack_path(RUN, "w", "1:5"))
        assert stack.headers["x-gradtap-attempt"] == "1,2,2,1"
        wanted = [old.expected("w", 1), *(new.expected("w", step) for step in (2, 3, 4))]
        assert same_bits(array_of(stack), np.stack(wanted))


def test_resume_moves_the_address_without_attempt(tmp_path: Path) -> None:
    """A client that asks again after a resume gets the new attempt, not a 304 for the old."""
    Job(run=tmp_path / RUN, params=SMALL, seed=1).steps([1]).close()
    with serving(tmp_path) as server:
        before = server.get(grad_path(RUN, 1, "w"))
        again = Job(run=tmp_path / RUN, params=SMALL, seed=2).steps([1])
        again.close()
        after = server.get(grad_path(RUN, 1, "w"), headers={"If-None-Match": before.headers["etag"]})
        assert same_bits(array_of(after), again.expected("w", 1))
        assert server.get(before.headers["content-location"]).content == before.content


def test_another_run_under_the_same_name(tmp_path: Path) -> None:
    """Where a new run takes the place of another, old tags and lasting addresses give nothing of the new one."""
    import shutil

    Job(run=tmp_path / RUN, params=SMALL, seed=1).steps([1]).close()
    with serving(tmp_path) as server:
        before = server.get(grad_path(RUN, 1, "w", attempt=1))
        shutil.rmtree(tmp_path / RUN)
        other = Job(run=tmp_path / RUN, params=SMALL, seed=2).steps([1])
        other.close()
        after = server.get(grad_path(RUN, 1, "w", attempt=1), headers={"If-None-Match": before.headers["etag"]})
        assert same_bits(array_of(after), other.expected("w", 1))
        assert server.get(before.headers["content-location"]).status_code == 404


def test_what_a_selection_left_out(tmp_path: Path) -> None:
    """A parameter that was not selected for a step is a 404 that says so, by HEAD too; with `partial` it is NaN."""
    job = Job(run=tmp_path / RUN, params=SMALL)
    job.step(1, select=["b"])
    job.close()
    with serving(job.run) as server:
        for method in (server.get, server.head):
            assert method(grad_path(RUN, 1, "w")).status_code == 404
        assert server.json(grad_path(RUN, 1, "w"), status=404)["type"] == "/problems/incomplete"
        assert reads(server, RUN) == 0
        part = server.get(grad_path(RUN, 1, "w", partial=1))
        assert np.isnan(array_of(part)).all() and part.headers["x-gradtap-complete"] == "false"


def test_flags_and_factor(tmp_path: Path) -> None:
    """Flags and the factor of a step are in the headers, and part of the tag's identity."""
    job = Job(run=tmp_path / RUN, params=SMALL)
    job.step(1, untouched=["w"], factor=0.5)
    job.step(2)
    job.close()
    with serving(job.run) as server:
        answer = server.get(grad_path(RUN, 1, "w"))
        assert answer.headers["x-gradtap-flags"] == "untouched"
        assert answer.headers["x-gradtap-factor"] == "0.5"
        assert server.get(grad_path(RUN, 2, "w")).headers["x-gradtap-flags"] == ""


def test_under_a_proxys_path(tmp_path: Path) -> None:
    """Behind a proxy that shows the service under a path, `Content-Location` has that path in front."""
    job = Job(run=tmp_path / RUN, params=SMALL).steps([1])
    job.close()
    with serving(job.run, root_path="/deep/down") as server:
        location = server.get(grad_path(RUN, "last", "w")).headers["content-location"]
        assert location.startswith("/deep/down/api/v1/runs/")
        answer = server.get(location)
        if answer.status_code == 404:
            # Proxies take the path away before they pass a request on.
            answer = server.get(location.removeprefix("/deep/down"))
        assert same_bits(array_of(answer), job.expected("w", 1))


@pytest.mark.parametrize("clients", [16])
def test_many_clients_of_one_chunk(tmp_path: Path, clients: int) -> None:
    """Many clients that want the same and different gradients at once all get their own, whole."""
    job = Job(run=tmp_path / RUN, params=SMALL).steps(range(1, 6))
    job.close()
    with serving(job.run, threads=2) as server:

        def ask(number: int) -> bool:
            step = number % 5 + 1
            answer = server.get(grad_path(RUN, step, "w", slice="3:17"))
            return same_bits(array_of(answer), job.expected("w", step)[3:17])

        with ThreadPoolExecutor(clients) as pool:
            assert all(pool.map(ask, [0] * 40 + list(range(60))))
