"""Parameters and steps: the query's own answers, in pages, with tags that save sending them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtap.query.params import params
from gradtap.query.step import step
from gradtap.query.steps import steps
from gradtap.read import open_run
from tests.server.serving import Server, serving
from tests.support.synthetic import Job

RUN = "/api/v1/runs/closed"


def followed(server: Server, path: str, rows: str) -> list[Any]:
    """All rows, page after page as `Link` says; the bodies' `next` must say the same."""
    found: list[Any] = []
    url = path
    while True:
        answer = server.get(url)
        body = answer.json()
        found += body[rows]
        if "next" not in answer.links:
            assert body["next"] is None
            assert body["total"] == len(found)
            return found
        assert body["next"] in answer.links["next"]["url"]
        url = path.partition("?")[0] + answer.links["next"]["url"]


def test_params_answer_as_the_query(server: Server, zoo: Path) -> None:
    """The body is the answer of the same query on the folder, and what page it is."""
    body = server.json(f"{RUN}/params?match=mlp&step=first")
    with open_run(zoo / "closed.gradtap") as run:
        assert body == params(run, "mlp", step="first").body() | {"next": None, "total": 2}


def test_steps_answer_as_the_query(server: Server, zoo: Path) -> None:
    """The body is the answer of the same query on the folder, range and tags included."""
    body = server.json(f"{RUN}/steps?steps=1:6:2&tags=1")
    with open_run(zoo / "closed.gradtap") as run:
        assert body == steps(run, "1:6:2", tags=True).body() | {"next": None, "total": 3}
    assert [row["step"] for row in body["steps"]] == [1, 3, 5]


def test_one_step_answers_as_the_query(server: Server, zoo: Path) -> None:
    """The body is the answer of the same query on the folder, whole."""
    with open_run(zoo / "closed.gradtap") as run:
        assert server.json(f"{RUN}/steps/3") == step(run, "3").body()
        assert server.json(f"{RUN}/steps/last?match=mlp&attempt=1") == step(run, "5", match="mlp", attempt=1).body()


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_add_up(server: Server, limit: int) -> None:
    """Pages of any size together have every row once, in order."""
    for path, rows in (("/params", "parameters"), ("/steps", "steps"), ("/steps?steps=0:5:2", "steps")):
        whole = server.json(RUN + path)[rows]
        joined = f"{RUN}{path}{'&' if '?' in path else '?'}limit={limit}"
        assert followed(server, joined, rows) == whole
    runs = server.json("/api/v1/runs")["runs"]
    assert followed(server, f"/api/v1/runs?limit={limit}", "runs") == runs
    assert len(runs) == 10


def test_a_page_after_new_steps_goes_on_where_it_was(tmp_path: Path) -> None:
    """Steps that come between two pages neither repeat a row nor hide one."""
    job = Job(run=tmp_path / "mine.gradtap", world=1).steps(range(4))
    job.flush()
    job.wait_published(4)
    with serving(tmp_path) as server:
        first = server.json("/api/v1/runs/mine/steps?limit=3")
        job.steps([4, 5])
        job.close()
        second = server.json(f"/api/v1/runs/mine/steps?limit=3&cursor={first['next']}")
    assert [row["step"] for row in first["steps"] + second["steps"]] == [0, 1, 2, 3, 4, 5]
    assert second["next"] is None


def test_a_wide_step_comes_in_pages(zoo: Path) -> None:
    """A step with more parameters than a page may have is paged; with `limit` any step is."""
    with serving(zoo, page=2, page_max=2) as server:
        whole = f"{RUN}/steps/2"
        assert len(server.json(whole)["parameters"]) == 2
        names = [row["name"] for row in followed(server, whole, "parameters")]
    with open_run(zoo / "closed.gradtap") as run:
        assert names == [p.name for p in run.params if p.stored]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("limit=0", "limit is 0; give 1 to 1000"),
        ("limit=1001", "give 1 to 1000"),
        ("limit=many", "limit is 'many'"),
        ("cursor=!!", "cursor is '!!'"),
        ("cursor=WyJydW5zIiwgImEiXQ", "cursor is"),
        ("cursor=WyJzdGVwcyIsIHRydWVd", "cursor is"),
        ("stesp=0:3", "did you mean steps"),
        ("steps=1:2:3:4", "range is '1:2:3:4'"),
        ("tags=perhaps", "tags is 'perhaps'"),
        ("limit=1&limit=2", "limit is given 2 times"),
    ],
)
def test_wrong_arguments_are_named(server: Server, query: str, said: str) -> None:
    """Each wrong argument is a 400 that names it, its value and what is allowed."""
    problem = server.json(f"{RUN}/steps?{query}", 400)
    assert problem["type"] == "/problems/usage"
    assert said in problem["detail"]


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/steps/99", 404, "step-not-found"),
        ("/steps/x", 400, "usage"),
        ("/steps/2?attempt=2", 404, "step-not-found"),
        ("/steps/2?match=nothing-like-it", 404, "parameter-not-found"),
        ("/params?match=embd.weight", 404, "parameter-not-found"),
        ("/params?step=77", 404, "step-not-found"),
    ],
)
def test_what_is_not_there(server: Server, path: str, status: int, kind: str) -> None:
    """A step, attempt or parameter that is not there is a problem of its kind."""
    assert server.json(RUN + path, status)["type"] == f"/problems/{kind}"


def test_a_step_names_its_attempt(server: Server) -> None:
    """A step without attempt says under which address this very attempt is; that is the same, and may be kept.

    By the run's id: under its name, whatever else is asked, nothing is kept.
    """
    answer = server.get(f"{RUN}/steps/last?match=mlp")
    lasting = f"/api/v1/runs/{answer.json()['run']}/steps/5?attempt=1&match=mlp"
    assert answer.headers["content-location"] == lasting
    named = server.get(f"{RUN}/steps/5?attempt=1&match=mlp").headers
    assert (named["content-location"], named["cache-control"]) == (lasting, "no-cache")
    assert answer.headers["cache-control"] == "no-cache"
    again = server.get(answer.headers["content-location"])
    assert again.json() == {key: value for key, value in answer.json().items() if key != "attempts"}
    assert "content-location" not in again.headers
    assert again.headers["cache-control"] == "public, max-age=31536000, immutable"


def test_a_kept_attempt_is_told_from_a_newer_one(tmp_path: Path) -> None:
    """A step recorded again is another answer; the first attempt's own address keeps answering as before."""
    Job(run=tmp_path / "mine.gradtap", world=1, seed=1).steps([0, 1]).close()
    with serving(tmp_path) as server:
        path = "/api/v1/runs/mine/steps/1"
        before, kept = server.get(path), server.json(f"{path}?attempt=1")
        Job(run=tmp_path / "mine.gradtap", world=1, seed=2).steps([1]).close()
        after = server.get(path, headers={"If-None-Match": before.headers["etag"]})
        assert after.status_code == 200
        assert after.headers["content-location"] == f"/api/v1/runs/{kept['run']}/steps/1?attempt=2"
        assert (after.json()["attempts"], after.json()["parameters"] == before.json()["parameters"]) == (2, False)
        assert server.json(f"{path}?attempt=1") == kept


def test_an_unsettled_attempt_is_not_kept(server: Server) -> None:
    """The newest step of a live run may still learn its outcome: no cache may keep it unasked."""
    run = server.json("/api/v1/runs/live")
    newest = server.get(f"/api/v1/runs/{run['run']}/steps/{run['steps']['last']}?attempt=1")
    assert (newest.headers["cache-control"] == "no-cache") == (not newest.json()["settled"])


@pytest.mark.parametrize("path", ["/api/v1", "/api/v1/runs", RUN, f"{RUN}/params", f"{RUN}/steps", f"{RUN}/steps/1"])
def test_tags_save_sending_again(server: Server, path: str) -> None:
    """What a client has already is a 304 without a body; another tag gets the whole."""
    first = server.get(path)
    same = server.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == first.headers["etag"]
    assert server.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_tag_changes_with_the_run(tmp_path: Path) -> None:
    """A new step changes the tag of what tells of it."""
    job = Job(run=tmp_path / "mine.gradtap", world=1).steps([0])
    job.flush()
    with serving(tmp_path) as server:
        tag = server.get("/api/v1/runs/mine").headers["etag"]
        job.step(1)
        job.close()
        again = server.get("/api/v1/runs/mine", headers={"If-None-Match": tag})
    assert again.status_code == 200
