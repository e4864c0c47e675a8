"""Every error has one shape, from one table, and tells nothing of the machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from gradtap.errors import ERRORS, PROBLEMS, GradtapError
from gradtap.read.catalog import Catalog
from gradtap_server.problem_pages import MEANINGS
from gradtap_server.problems import without_folders
from tests.server.serving import Server, serving

KEYS = {"schema", "type", "title", "status", "detail", "exit_code", "instance"}


@pytest.fixture(scope="module")
def failing(zoo: Path) -> Iterator[Server]:
    """A server with an address for each error of the table, and one for an error that nobody foresaw."""
    with serving(zoo) as running:
        add_failures(running.app, zoo)
        # An error about a run comes after a look for runs.
        running.get("/api/v1/runs")
        yield running


def add_failures(app: FastAPI, zoo: Path) -> None:
    """Routes that fail."""

    @app.get("/fail/{slug}")
    def fail(slug: str) -> None:
        if slug == "bug":
            raise RuntimeError(f"secret at {zoo}")
        where = zoo / "closed.gradtap" / "sessions" / "0000"
        raise ERRORS[slug](f"{where} and {zoo}: see run.params").noting(path=str(where), deep=[{"a": f"{zoo}/x"}])


def shaped(answer: httpx2.Response) -> dict[str, Any]:
    """The problem, after a look at what all of them have."""
    body: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert body.keys() >= KEYS
    assert body["schema"] == "gradtap.problem/1"
    assert body["status"] == answer.status_code
    assert body["instance"] == answer.headers["x-request-id"]
    return body


@pytest.mark.parametrize("slug", ERRORS)
def test_every_error_has_the_shape(failing: Server, zoo: Path, slug: str) -> None:
    """Each error of the table is a problem with its status, exit code and facts, and without a path."""
    answer = failing.get(f"/fail/{slug}")
    body, problem = shaped(answer), PROBLEMS[ERRORS[slug]]
    assert answer.status_code == problem.status
    assert (body["type"], body["exit_code"]) == (f"/problems/{slug}", problem.exit_code)
    assert body["title"] == slug.replace("-", " ")
    assert body["detail"] == "closed.gradtap/sessions/0000 and all runs: see `params` of the run"
    assert (body["path"], body["deep"]) == ("closed.gradtap/sessions/0000", [{"a": "all runs/x"}])
    assert str(zoo.parent) not in answer.text + str(answer.headers)
    assert ("retry-after" in answer.headers) == (problem.status in (409, 503))
    assert ("www-authenticate" in answer.headers) == (problem.status == 401)


def test_a_bug_tells_its_id_alone(failing: Server, caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody foresaw is a 500 with the request's id, under which the log has the traceback."""
    with caplog.at_level(logging.ERROR, "gradtap_server"):
        answer = failing.get("/fail/bug", headers={"X-Request-ID": "trace-me"})
    body = shaped(answer)
    assert (answer.status_code, body["type"], body["instance"]) == (500, "/problems/error", "trace-me")
    assert "secret" not in answer.text
    assert "trace-me" in caplog.text
    assert "RuntimeError: secret" in caplog.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
def test_other_methods_are_problems(server: Server, method: str) -> None:
    """The service only reads: every other method is a 405 that lists GET and HEAD."""
    answer = server.client.request(method, "/api/v1/runs")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert shaped(answer)["type"] == "/problems/usage"


@pytest.mark.parametrize("path", ["/nope", "/api", "/api/v2", "/api/v1/", "/api/v1/runs/", "/api/v1/runs/closed/x"])
def test_unknown_addresses_are_problems(server: Server, path: str) -> None:
    """An address that there is nothing at is a problem too, not the framework's own error."""
    answer = server.get(path)
    assert answer.status_code == 404
    shaped(answer)


def test_several_wrong_arguments_are_all_named(server: Server) -> None:
    """A 400 lists each argument with its value and what was wrong with it."""
    body = shaped(server.get("/api/v1/runs/closed/steps/1?attempt=x&limit=y"))
    assert [(each["parameter"], each["value"]) for each in body["errors"]] == [("attempt", "x"), ("limit", "y")]


def test_head_of_an_error_has_its_headers(server: Server) -> None:
    """HEAD answers errors as GET does, without the body."""
    answer = server.head("/api/v1/runs/nope")
    assert (answer.status_code, answer.content) == (404, b"")
    assert answer.headers["content-type"] == "application/problem+json"


def test_every_slug_has_a_page(server: Server) -> None:
    """Each problem's `type` is an address that says what it means, as JSON and for browsers."""
    assert MEANINGS.keys() == ERRORS.keys()
    for slug, error in ERRORS.items():
        body = server.json(f"/problems/{slug}")
        assert (body["status"], body["meaning"]) == (PROBLEMS[error].status, MEANINGS[slug])
        page = server.get(f"/problems/{slug}", headers={"Accept": "text/html,*/*;q=0.5"})
        assert page.headers["content-type"].startswith("text/html")
        assert "<script" not in page.text
    assert server.json("/problems/to-large", 404)["did_you_mean"][0] == "too-large"


def test_damage_is_no_absence(server: Server, zoo: Path) -> None:
    """Bytes that are not what was committed are a 500 that says so, never a 404."""
    body = server.json("/api/v1/runs/damaged/steps/1/grads/mlp.bias", 500)
    assert body["type"] == "/problems/damaged"
    assert str(zoo.parent) not in body["detail"]
    assert server.get("/api/v1/runs/damaged/steps/2/grads/mlp.bias").status_code == 200


def test_folders_are_called_by_their_last_name(zoo: Path, tmp_path: Path) -> None:
    """Paths of runs, stores and what their links lead to are all cut; other text stays."""
    (tmp_path / "link").symlink_to(zoo)
    found = Catalog([tmp_path / "link"])
    text = f"{tmp_path}/link/closed.gradtap/x, {zoo}/a/twin.gradtap, {zoo}: /etc/x"
    found.entries()
    assert without_folders(text, found) == "closed.gradtap/x, twin.gradtap, all runs: /etc/x"


def test_facts_never_replace_the_shape() -> None:
    """A fact that is called as a key of the shape does not take its place."""
    from gradtap_server.problems import error_response

    error = GradtapError("what happened").noting(status=200, detail="fine", type="x")
    response = error_response(error, {"type": "http"}, Catalog([]))
    assert response.status_code == 500
    assert b"fine" not in response.body
