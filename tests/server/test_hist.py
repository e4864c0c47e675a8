"""Histograms over HTTP: stored and counted ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradtap.read.catalog import Catalog
from gradtap.read.summaries import SummaryReader
from tests.server.samples import PARAMS, OddJob, grad_path, reads
from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

RUN = "hist"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> OddJob:
    made = OddJob(run=tmp_path_factory.mktemp("hist") / RUN, params=PARAMS).steps([1, 2])
    made.close()
    return made


@pytest.fixture(scope="module")
def server(job: OddJob) -> Iterator[Server]:
    with serving(job.run) as running:
        yield running


def hist(name: str = "w", step: object = 1, run: str = RUN, **query: object) -> str:
    path, _, text = grad_path(run, step, name, **query).partition("?")
    return f"{path}/hist" + (f"?{text}" if text else "")


def test_stored_histogram_reads_no_chunk(server: Server, job: OddJob) -> None:
    """The stored histogram has a bin for each sign and power of two, counts every finite value, and reads no chunk."""
    before = reads(server, RUN)
    body = server.json(hist())
    values = job.expected("w", 1)
    assert reads(server, RUN) == before
    assert (body["schema"], body["source"], body["scale"]) == ("gradtap.hist/1", "summary", "log2")
    assert len(body["bins"]) == 193
    assert sum(bin["count"] for bin in body["bins"]) == np.isfinite(values).sum()
    assert (body["nan"], body["inf"]) == (1, 2)
    middle = body["bins"][body["zero_bin"]]
    assert middle["count"] == np.count_nonzero(values == 0)


def test_counted_histogram_is_numpys(server: Server, job: OddJob) -> None:
    """Linear bins of a slice are those that NumPy counts, and tell the infinities apart."""
    before = reads(server, RUN)
    body = server.json(hist(slice="0:20", bins=10, scale="linear"))
    values = job.expected("w", 1)[0:20]
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins=10)
    assert [bin["count"] for bin in body["bins"]] == counts.tolist()
    np.testing.assert_allclose([bin["low"] for bin in body["bins"]], edges[:-1], rtol=1e-6)
    assert (body["source"], body["nan"], body["posinf"], body["neginf"]) == ("values", 1, 1, 1)
    assert reads(server, RUN) > before


def test_freshness(server: Server) -> None:
    """A histogram is asked for anew unless its address names one capture for good; 304 and HEAD read no chunk."""
    for query in ({}, {"slice": "0:5"}):
        first = server.get(hist(**query))
        before = reads(server, RUN)
        assert first.headers["cache-control"] == "no-cache"
        tag = {"If-None-Match": first.headers["etag"]}
        assert server.get(hist(**query), headers=tag).status_code == 304
        head = server.head(hist(**query))
        assert (head.status_code, head.headers["etag"]) == (200, first.headers["etag"])
        assert reads(server, RUN) == before
        lasting = server.get(first.headers["content-location"])
        assert lasting.headers["cache-control"].endswith("immutable")
        assert lasting.json() == first.json()
    tags = {
        server.head(hist(**query)).headers["etag"] for query in ({}, {"slice": ":"}, {"scale": "linear"}, {"step": 2})
    }
    assert len(tags) == 4


@pytest.mark.parametrize("query", [{"slice": "..."}, {"scale": "linear"}])
def test_counting_is_limited(job: OddJob, query: dict[str, str]) -> None:
    """A histogram that needs more values than the limits allow is refused unread; the stored one is not."""
    with serving(job.run, response_bytes=400) as tight:
        body = tight.json(hist(**query), status=422)
        assert body["type"] == "/problems/too-large"
        assert tight.head(hist(**query)).status_code == 422
        assert tight.json(hist())["source"] == "summary"
        assert reads(tight, RUN) == 0
        assert (
            tight.json(hist(slice=body["suggested_slice"], **({} if "slice" in query else query)))["source"] == "values"
        )


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"scale": "log"}, 400),
        ({"bins": 3}, 400),
        ({"bins": 0, "scale": "linear"}, 400),
        ({"bins": 10**6, "scale": "linear"}, 400),
        ({"bins": "x"}, 400),
        ({"slice": "99"}, 400),
        ({"format": "npy"}, 400),
        ({"attempt": 7}, 404),
        ({"step": 9}, 404),
        ({"name": "nope"}, 404),
        ({"step": "0:1"}, 400),
    ],
)
def test_problems(server: Server, query: dict[str, object], status: int) -> None:
    """Wrong scales, bins, slices and names are problems, by HEAD too, and nothing is read for them."""
    before = reads(server, RUN)
    assert server.json(hist(**query), status=status)["status"] == status
    assert server.head(hist(**query)).status_code == status
    assert reads(server, RUN) == before


@pytest.mark.parametrize("summary", ["none", "basic"])
def test_head_of_a_histogram_that_was_not_stored(tmp_path: Path, summary: str) -> None:
    """HEAD says what GET does where no histogram was stored, and reads no chunk to know; a counted one is there."""
    job = Job(run=tmp_path / RUN, params=(spec("w", 30, 20),), summary=summary).steps([1])
    job.close()
    with serving(job.run) as server:
        assert server.get(hist()).json()["type"] == "/problems/incomplete"
        assert server.head(hist()).status_code == 404
        assert server.head(hist(slice="0")).status_code == 200
        assert reads(server, RUN) == 0


def test_head_of_a_histogram_that_was_not_taken(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the selection left a parameter out at the step there is no histogram for HEAD either."""
    monkeypatch.setattr(SummaryReader, "histogram", lambda *args: None)
    assert server.get(hist()).json()["type"] == "/problems/incomplete"
    assert server.head(hist()).status_code == 404
    assert server.head(hist(slice="0")).status_code == 200


def test_the_run_is_opened_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A histogram is read from the run that was looked up: one that takes its place meanwhile cannot answer."""
    opened = []
    real = Catalog.open
    monkeypatch.setattr(Catalog, "open", lambda self, name: opened.append(name) or real(self, name))
    assert server.get(hist()).status_code == 200
    assert server.get(f"/api/v1/runs/{RUN}/norms").status_code == 200
    assert opened == [RUN, RUN]
