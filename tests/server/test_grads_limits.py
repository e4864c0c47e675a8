"""What is too much, over a real server: refused before a chunk is read, with a part that is given when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.samples import array_of, grad_path, reads, same_bits, stack_path
from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

RUN = "large"
PARAMS = (spec("w", 60, 50), spec("deep", 6, 7, 8, 9), spec("flat", 3000))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A closed run of nine steps whose chunks hold 512 bytes."""
    made = Job(run=tmp_path_factory.mktemp("limits") / RUN, params=PARAMS).steps(range(1, 10))
    made.close()
    return made


SETTINGS: list[dict[str, Any]] = [
    {"response_bytes": 1500},
    {"response_bytes": 900},
    {"chunks": 3},
    {"read_bytes": 2000},
    {"response_bytes": 5000, "chunks": 20, "read_bytes": 6000},
]


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def server(job: Job, request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(job.run, json_elements=100, **request.param) as running:
        yield running


@pytest.mark.parametrize("form", ["raw", "npy", "safetensors", "json"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w", ""),
        ("w", ":, 7"),
        ("w", "::-2"),
        ("deep", ""),
        ("deep", "..., 3"),
        ("flat", ""),
        ("flat", "::7"),
        ("w", "3"),
    ],
)
def test_suggestion_is_given_when_asked_for(server: Server, job: Job, form: str, name: str, text: str) -> None:
    """What is refused has read nothing; its `suggested_slice` is the beginning of what was wanted, and is given."""
    before = reads(server, RUN)
    path = grad_path(RUN, 4, name, slice=text, format=form)
    answer = server.get(path)
    if answer.status_code == 200:
        return
    body = answer.json()
    assert (answer.status_code, body["type"]) == (422, "/problems/too-large")
    assert server.head(path).status_code == 422
    assert reads(server, RUN) == before
    assert body["found"] > body["most"]
    assert {"limit", "response_bytes", "read_bytes", "chunks", "suggested_slice"} <= set(body)
    again = server.get(grad_path(RUN, 4, name, slice=body["suggested_slice"], format=form))
    assert again.status_code == 200, again.text
    raw = server.get(grad_path(RUN, 4, name, slice=body["suggested_slice"]))
    if raw.status_code == 200:
        part = array_of(raw)
        wanted = job.expected(name, 4)[_key(text)]
        assert part.size > 0
        assert same_bits(part, wanted[tuple(slice(length) for length in part.shape)])


def _key(text: str) -> Any:
    return {"": ..., ":, 7": (slice(None), 7), "::-2": slice(None, None, -2), "..., 3": (..., 3)}.get(
        text, slice(None, None, 7) if text == "::7" else 3
    )


@pytest.mark.parametrize("form", ["raw", "safetensors", "json"])
@pytest.mark.parametrize(("name", "text", "steps"), [("w", "", ":"), ("w", "0", "2:10:3"), ("flat", "0:40", ":")])
def test_suggested_steps_are_given(server: Server, form: str, name: str, text: str, steps: str) -> None:
    """A stack that is too large is refused unread, with steps and a slice that are given when asked for."""
    before = reads(server, RUN)
    answer = server.get(stack_path(RUN, name, steps, slice=text, format=form))
    if answer.status_code == 200:
        return
    body = answer.json()
    assert (answer.status_code, reads(server, RUN)) == (422, before)
    again = server.get(stack_path(RUN, name, body["suggested_steps"], slice=body["suggested_slice"], format=form))
    assert again.status_code == 200, again.text


def test_some_are_refused(server: Server) -> None:
    """The tests above do see refusals, one of them from JSON's own limit."""
    assert server.get(grad_path(RUN, 4, "w")).status_code == 422
    assert server.json(grad_path(RUN, 4, "w", format="json"), status=422)["limit"] == "json_elements"


def test_head_tells_when_it_fits(job: Job) -> None:
    """At exactly the limit an answer is given, one byte below it is not."""
    with serving(job.run, response_bytes=12000) as roomy, serving(job.run, response_bytes=11999) as tight:
        assert roomy.head(grad_path(RUN, 1, "w")).headers["content-length"] == "12000"
        assert tight.head(grad_path(RUN, 1, "w")).status_code == 422
        assert tight.json(grad_path(RUN, 1, "w"), status=422)["suggested_slice"] == "0:59,:"


def test_unchanged_although_too_large(job: Job) -> None:
    """A client that has an answer from before the limit was lowered is told that it still holds."""
    with serving(job.run) as roomy, serving(job.run, response_bytes=10) as tight:
        tag = roomy.get(grad_path(RUN, 1, "w")).headers["etag"]
        assert tight.get(grad_path(RUN, 1, "w"), headers={"If-None-Match": tag}).status_code == 304


def test_nothing_of_it_fits(job: Job) -> None:
    """Limits below the least answer refuse all, and suggest nothing."""
    with serving(job.run, response_bytes=3) as server:
        body = server.json(grad_path(RUN, 1, "w"), status=422)
        assert "suggested_slice" not in body and "no part of it fits" in body["detail"]


def test_amplified_reads_are_refused(tmp_path: Path) -> None:
    """A slice that would decode far more than it returns is refused, and its leading part is not."""
    job = Job(run=tmp_path / RUN, params=PARAMS).steps([1])
    job.close()
    with serving(job.run, amplification_from=4096) as server:
        assert server.json("/api/v1")["limits"]["amplification_from"] == 4096
        body = server.json(grad_path(RUN, 1, "w", slice=":, 0"), status=422)
        assert body["limit"] == "amplification" and body["read_bytes"] > 8 * body["response_bytes"]
        assert reads(server, RUN) == 0
        part = server.get(grad_path(RUN, 1, "w", slice=body["suggested_slice"]))
        assert same_bits(array_of(part), job.expected("w", 1)[: array_of(part).size, 0])
        assert server.get(grad_path(RUN, 1, "w")).status_code == 200
