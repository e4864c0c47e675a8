"""A damaged store over HTTP: an error that says so, never a 404, zeros or half an answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.server.samples import array_of, grad_path, same_bits, stack_path
from tests.server.serving import serving
from tests.support.synthetic import Job, spec
from tests.support.wounds import WOUNDS, spot

RUN = "hurt"
SMALL = (spec("w", 30, 20), spec("b", 30))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A closed run of five steps, to be copied and harmed."""
    job = Job(run=tmp_path_factory.mktemp("whole") / RUN, params=SMALL, kind="whole").steps(range(1, 6))
    job.close()
    return job


@pytest.fixture
def run(whole: Job, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.run, tmp_path / RUN))


@pytest.mark.parametrize("wound", WOUNDS)
def test_damage_is_a_500(run: Path, whole: Job, wound: str) -> None:
    """However a chunk is harmed, whatever needs it is a `damaged` problem in every form; all else is still given."""
    WOUNDS[wound](spot(run, "w", 1, chunk=1))
    with serving(run) as server:
        for path in (
            grad_path(RUN, 2, "w"),
            grad_path(RUN, 2, "w", format="json", slice="8"),
            grad_path(RUN, 2, "w", partial=1),
            grad_path(RUN, 2, "w", attempt=1, format="safetensors"),
            stack_path(RUN, "w", "1:4"),
            grad_path(RUN, 2, "w") + "/hist?scale=linear",
        ):
            answer = server.get(path)
            body = answer.json()
            assert (answer.status_code, body["type"]) == (500, "/problems/damaged"), path
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["cache-control"] == "no-store"
            assert "etag" not in answer.headers
            assert "verify" in body["detail"] and str(run.parent) not in answer.text
        assert same_bits(array_of(server.get(grad_path(RUN, 2, "b"))), whole.expected("b", 2))
        assert same_bits(array_of(server.get(grad_path(RUN, 5, "w"))), whole.expected("w", 5))
        if wound in ("flip_body", "flip_crc", "other_values", "empty_entry", "entry_outside"):
            assert same_bits(array_of(server.get(grad_path(RUN, 2, "w", slice="0:3"))), whole.expected("w", 2)[:3])


def test_a_lost_journal(run: Path) -> None:
    """A run whose journals are gone is an error too, not a run without steps."""
    shutil.rmtree(run / "sessions" / "0000" / "journal")
    with serving(run) as server:
        answer = server.get(grad_path(RUN, 2, "w"))
        assert answer.status_code == 500
        assert str(run.parent) not in answer.text


def test_damage_after_the_first_answer(run: Path, whole: Job) -> None:
    """What rots while it is served is an error at the next read, and a lasting address is no shield for it."""
    with serving(run) as server:
        answer = server.get(grad_path(RUN, 2, "w"))
        assert same_bits(array_of(answer), whole.expected("w", 2))
        WOUNDS["flip_body"](spot(run, "w", 1))
        assert server.get(answer.headers["content-location"]).status_code == 500
