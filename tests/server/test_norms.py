"""The matrix of norms over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradtap.read import Run
from tests.server.samples import reads
from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

RUN = "norms"
PARAMS = (spec("a.w", 30, 20), spec("a.b", 30), spec("frozen", 3, status="frozen"), spec("b.w", 7))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = Job(run=tmp_path_factory.mktemp("norms") / RUN, params=PARAMS).steps(range(1, 9))
    made.close()
    return made


@pytest.fixture(scope="module")
def server(job: Job) -> Iterator[Server]:
    with serving(job.run) as running:
        yield running


def norms(**query: object) -> str:
    return f"/api/v1/runs/{RUN}/norms?" + "&".join(f"{name}={value}" for name, value in query.items())


def test_matrix_is_that_of_the_values(server: Server, job: Job) -> None:
    """Every cell is the norm of the gradient itself; only summaries are read."""
    body = server.json(norms(match="*.w", steps="2:8:2"))
    assert body["schema"] == "gradtap.norms/1"
    assert (body["stat"], body["steps"]) == ("l2", [2, 4, 6])
    assert [row["name"] for row in body["parameters"]] == ["a.w", "b.w"]
    for row in body["parameters"]:
        wanted = [np.linalg.norm(job.expected(row["name"], step).astype(np.float64)) for step in (2, 4, 6)]
        np.testing.assert_allclose(row["values"], wanted, rtol=1e-12)
    assert reads(server, RUN) == 0


def test_all_of_it(server: Server) -> None:
    """Without words all parameters with gradients come, at all steps."""
    body = server.json(f"/api/v1/runs/{RUN}/norms")
    assert body["steps"] == list(range(1, 9))
    assert [row["name"] for row in body["parameters"]] == ["a.w", "a.b", "b.w"]
    assert server.json(norms(stat="zeros", steps="3"))["parameters"][0]["values"] == [0]


def test_tags(server: Server) -> None:
    """The same matrix has one tag however it was asked for; 304 and HEAD come without reading, nothing is immutable."""

    def tag(**query: object) -> str:
        return str(server.head(norms(**query)).headers["etag"])

    first = server.get(norms())
    assert first.headers["cache-control"] == "no-cache"
    assert server.get(norms(), headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    assert tag() == first.headers["etag"] == tag(steps=":", stat="l2") == tag(match="*")
    assert len({tag(), tag(stat="l1"), tag(steps="1:3"), tag(match="a")}) == 4


def test_too_many_cells(job: Job) -> None:
    """More cells than the limit are refused with steps that fit; they are given when asked for."""
    with serving(job.run, cells=10) as tight:
        body = tight.json(norms(), status=422)
        assert (body["limit"], body["found"], body["most"]) == ("cells", 24, 10)
        assert tight.head(norms()).status_code == 422
        assert body["suggested_steps"] == "1:4"
        assert tight.json(norms(steps=body["suggested_steps"]))["steps"] == [1, 2, 3]
        odd = tight.json(norms(steps="2::2"), status=422)
        assert tight.json(norms(steps=odd["suggested_steps"]))["steps"] == [2, 4, 6]
    with serving(job.run, cells=2) as tighter:
        assert "suggested_steps" not in tighter.json(norms(), status=422)
        assert len(tighter.json(norms(match="a", steps="1"))["parameters"]) == 2


@pytest.mark.parametrize(
    ("query", "status", "slug"),
    [
        ({"stat": "l3"}, 400, "usage"),
        ({"steps": "x"}, 400, "usage"),
        ({"steps": "50:60"}, 404, "step-not-found"),
        ({"match": "zzz"}, 404, "parameter-not-found"),
        ({"match": "frozen"}, 404, "parameter-not-found"),
        ({"step": "1"}, 400, "usage"),
    ],
)
def test_problems(server: Server, query: dict[str, object], status: int, slug: str) -> None:
    """Unknown statistics, ranges, parameters and words are problems."""
    assert server.json(norms(**query), status=status)["type"] == f"/problems/{slug}"


def test_no_summaries(tmp_path: Path) -> None:
    """A run that was recorded without summaries says so; it has no norms that are all zero."""
    job = Job(run=tmp_path / RUN, params=PARAMS, summary="none").steps([1])
    job.close()
    with serving(job.run) as server:
        assert server.json(norms(), status=404)["type"] == "/problems/incomplete"


def test_head_of_norms_that_were_not_stored(tmp_path: Path) -> None:
    """HEAD says what GET does where no summaries were stored, and reads nothing to know."""
    job = Job(run=tmp_path / RUN, params=PARAMS, summary="none").steps([1, 2])
    job.close()
    with serving(job.run) as server:
        assert server.get(norms()).json()["type"] == "/problems/incomplete"
        assert server.head(norms()).status_code == 404
        assert reads(server, RUN) == 0


def test_steps_are_looked_up_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up asks the run's index once for all steps, not whether anything changed at each of them."""
    asked = []
    real = Run._attempts
    monkeypatch.setattr(Run, "_attempts", lambda self: asked.append(1) or real(self))
    assert server.head(norms(steps="1:3")).status_code == 200
    few = len(asked)
    assert server.head(norms(steps="1:9")).status_code == 200
    assert len(asked) == 2 * few
