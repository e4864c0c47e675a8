"""Names of parameters that are made of more than one line, and runs that share an id."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from gradtap.read import Run
from tests.server.samples import array_of, grad_path, same_bits, stack_path
from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

NAMES = ("nl\nx", "cr\r\nSet-Cookie: a=b", "end\n", "x/hist\n", "\n", "u\u2028x")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run with such names, and one that is part of another."""
    params = (spec("w", 3), spec("x", 5), *(spec(name, 4 + at) for at, name in enumerate(NAMES)))
    made = Job(run=tmp_path_factory.mktemp("odd") / "odd.gradtap", params=params, world=1).steps([1, 2])
    made.close()
    return made


@pytest.fixture(scope="module")
def server(job: Job) -> Iterator[Server]:
    """A server of it."""
    with serving(job.run) as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_several_lines_is_found(server: Server, job: Job, name: str) -> None:
    """Values, stacks and histograms of a name with line ends are those of that name, and no header of its making."""
    with Run(job.run) as run:
        whole = server.get(grad_path("odd", 1, name, download=1))
        assert same_bits(array_of(whole), run.grad(name, 1).values)
        assert whole.headers["x-gradtap-name"] == quote(name, safe="")
        assert same_bits(array_of(server.get(stack_path("odd", name, ":"))), run.grad(name, steps=slice(None)).values)
        path = grad_path("odd", 1, name)
        counted = server.get(path + "/hist")
        assert (counted.status_code, counted.json()["name"]) == (200, name)
        for answer in (whole, counted, server.head(path)):
            assert answer.status_code == 200
            assert "set-cookie" not in answer.headers
            lasting = server.get(answer.headers["content-location"])
            assert "immutable" in lasting.headers["cache-control"]
            assert lasting.content == answer.content or not answer.content


def test_an_id_of_two_runs_is_no_lasting_address(tmp_path: Path) -> None:
    """A copy of a run has its id, and may come to hold other bytes: no answer names a lasting address by it."""
    Job(run=tmp_path / "a", params=(spec("w", 3),), world=1).steps([1]).close()
    with serving(tmp_path) as server:
        paths = ["/api/v1/runs/{}/steps/1", grad_path("{}", 1, "w"), grad_path("{}", 1, "w") + "/hist"]
        for path in paths:
            alone = server.get(path.format("a"))
            assert server.get(alone.headers["content-location"]).status_code == 200
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        found = server.json("/api/v1/runs")["runs"]
        assert len({row["run"] for row in found}) == 1
        for row in found:
            for path in paths:
                answer = server.get(path.format(row["name"]))
                assert answer.status_code == 200
                assert "content-location" not in answer.headers
                assert answer.headers["cache-control"] == "no-cache"
                with_attempt = server.get(path.format(row["name"]) + "?attempt=1")
                assert "immutable" not in with_attempt.headers["cache-control"]
        assert server.get(f"/api/v1/runs/{found[0]['run']}").status_code == 404


def test_a_missing_part_of_an_address_is_named(server: Server) -> None:
    """A stack without its steps is told which, and what to give, in plain words."""
    problem = server.json("/api/v1/runs/odd/grads/w", status=400)
    assert problem["detail"] == "steps is missing; give steps=A:B:C, such as steps=0:9, or steps=: for all"
    assert problem["errors"][0]["parameter"] == "steps"
