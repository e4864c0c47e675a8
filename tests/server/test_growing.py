"""Pages of a run that grows between them: one answer is of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest

from gradtap.errors import StoreError
from gradtap.query.local import LocalPlace
from gradtap.read import open_run
from gradtap.remote.address import Address
from gradtap.remote.client import Client
from gradtap.remote.place import RemotePlace, remote_place
from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

RUN = "grows"
PARAMS = tuple(spec(f"p{at}", 3) for at in range(7))


@contextmanager
def growing(folder: Path, first: int = 2) -> Iterator[tuple[Job, Server, Callable[[], None]]]:
    """A live run, a server of it with small pages, and what makes the run one step longer."""
    job = Job(run=folder / RUN, params=PARAMS, world=1)
    step = 0

    def grow() -> None:
        nonlocal step
        job.steps([step])
        step += 1
        job.flush()
        job.wait_published(step)

    for _ in range(first):
        grow()
    try:
        with serving(job.run, page=3, page_max=3) as server:
            yield job, server, grow
    finally:
        job.close()


class Growing(Client):
    """A client whose run grows after each page that it gets."""

    def __init__(self, base: str, grow: Callable[[], None]) -> None:
        super().__init__(base)
        self.grow = grow

    def json(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().json(*args, **options)
        self.grow()
        return found


@contextmanager
def remote(server: Server, grow: Callable[[], None]) -> Iterator[RemotePlace]:
    """The run on the server; it grows after each page."""
    with Growing(server.url, grow) as client:
        yield remote_place(Address(base=server.url), RUN, client=client)


def norm(job: Job, name: str, step: int) -> float:
    return float(np.linalg.norm(job.expected(name, step).astype(np.float64)))


def test_a_client_stays_on_the_step_of_its_first_page(tmp_path: Path) -> None:
    """`params` of the last step of a live run: every row is of the step that the answer names."""
    with growing(tmp_path) as (job, server, grow), remote(server, grow) as place:
        answer = place.params()
        assert answer.facts["step"] == 1
        assert [row["name"] for row in answer.rows] == [p.name for p in PARAMS]
        for row in answer.rows:
            assert row["norm"] == pytest.approx(norm(job, row["name"], 1))


def test_a_step_of_several_pages_is_one_step(tmp_path: Path) -> None:
    """The last step, asked for in pages, is the same step and attempt on all of them."""
    with growing(tmp_path) as (job, server, grow), remote(server, grow) as place:
        answer = place.step("last")
        assert (answer.facts["step"], answer.facts["attempt"], answer.facts["attempts"]) == (1, 1, 1)
        assert [row["l2"] for row in answer.rows] == pytest.approx([norm(job, p.name, 1) for p in PARAMS])


@pytest.mark.parametrize("path", ["params?step=last", "params", "steps/last?limit=2"])
@pytest.mark.parametrize("by_link", [True, False])
def test_any_client_stays_on_it(tmp_path: Path, path: str, by_link: bool) -> None:
    """Whoever follows `Link`, or puts `next` on the address of the first page, gets rows of that page's step."""
    with growing(tmp_path) as (_, server, grow):
        address = first = f"{server.url}/api/v1/runs/{RUN}/{path}"
        seen = []
        while True:
            answer = server.get(address)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            seen.append(body["step"])
            if body["next"] is None:
                break
            grow()
            link = answer.headers["link"].partition(">")[0].removeprefix("<")
            more = f"{first}{'&' if '?' in first else '?'}cursor={body['next']}"
            address = urljoin(address, link) if by_link else more
        assert len(seen) >= 3 and set(seen) == {1}


def test_a_cursor_of_another_step_is_refused(tmp_path: Path) -> None:
    """A number beside the cursor of another step's page is a 400: its rows would bear the wrong label."""
    with growing(tmp_path) as (_, server, _grow):
        cursor = server.json(f"/api/v1/runs/{RUN}/params?step=1")["next"]
        assert server.json(f"/api/v1/runs/{RUN}/params?step=1&cursor={cursor}")["step"] == 1
        assert "cursor is of step 1" in server.json(f"/api/v1/runs/{RUN}/params?step=0&cursor={cursor}", 400)["detail"]


def test_a_first_step_between_two_pages(tmp_path: Path) -> None:
    """A run that has its first step between two pages is an error, not rows of which some have norms."""
    said = pytest.raises(StoreError, match="step went from None to 0")
    with growing(tmp_path, first=0) as (_, server, grow), remote(server, grow) as place, said:
        place.params()


def test_what_json_lacks_is_counted_once(tmp_path: Path) -> None:
    """Numbers that JSON lacks count once each, those of the facts too, in however many pages the rows came."""

    class Odd(Job):
        def gradient(self, param: int, step: int) -> Any:
            values = super().gradient(param, step)
            values[: param % 3] = [np.nan, np.inf][: param % 3]
            return values

    job = Odd(run=tmp_path / RUN, params=PARAMS, world=1).steps([0, 1, 2])
    job.close()
    local = LocalPlace(run=open_run(job.run), label="x")
    with serving(job.run, page=3, page_max=3) as server, remote(server, lambda: None) as place:
        assert place.step("1").body() == local.step("1").body()
        assert place.steps().body() == local.steps().body()
        assert place.params().body() == local.params().body()
    assert local.step("1").body()["nonfinite"]["nan"] > 7
