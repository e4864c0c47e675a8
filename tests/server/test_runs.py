"""The list of runs, and one run, in every state that a run can be in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtap.query.info import info
from gradtap.read import open_run
from gradtap.store.runfile import create_run
from tests.server.serving import Server, serving
from tests.support.synthetic import Job


def rows(server: Server, query: str = "") -> dict[str, dict[str, Any]]:
    """The listed runs by name."""
    return {row["name"]: row for row in server.json(f"/api/v1/runs{query}")["runs"]}


def test_every_run_is_listed_with_its_state(server: Server) -> None:
    """Live, closed, unclosed, empty, newer and torn runs are all listed, each with its state."""
    states = {name: row["state"] for name, row in rows(server).items() if not name.startswith("twin")}
    assert states == {
        "closed": "closed",
        "copy": "empty",
        "damaged": "closed",
        "empty": "empty",
        "live": "live",
        "newer": "unreadable",
        "torn": "unreadable",
        "unclosed": "unclosed",
    }


def test_a_row_tells_steps_and_bytes(server: Server) -> None:
    """A row has the run's id, engine, world, steps and bytes, and the address of more."""
    row = rows(server)["closed"]
    assert (row["engine"], row["world"], row["steps"]) == ("synthetic", 3, {"first": 0, "last": 5, "count": 6})
    assert row["ratio"] == row["raw_bytes"] / row["stored_bytes"]
    assert server.json(row["url"])["run"] == row["run"]


def test_a_run_that_does_not_open_has_its_error(server: Server) -> None:
    """A row of a newer or torn run has the problem that its address answers with, and no path."""
    for name, status, kind in (("newer", 500, "newer-format"), ("torn", 500, "damaged")):
        error = rows(server)[name]["error"]
        problem = server.json(f"/api/v1/runs/{name}", status)
        assert (error["type"], error["detail"]) == (problem["type"], problem["detail"])
        assert error["type"] == f"/problems/{kind}"
        assert "/all runs" not in error["detail"]


def test_two_runs_of_one_name(server: Server) -> None:
    """Twins are listed by name and id; the bare name is not found and names both, each of which answers."""
    twins = [name for name in rows(server) if name.startswith("twin-")]
    assert len(twins) == 2
    problem = server.json("/api/v1/runs/twin", 404)
    assert problem["type"] == "/problems/run-not-found"
    assert sorted(problem["did_you_mean"]) == twins
    assert [server.json(f"/api/v1/runs/{name}")["name"] for name in twins] == ["twin", "twin"]


def test_a_copied_run_is_ambiguous_by_id(server: Server) -> None:
    """The id of a run that was copied names both copies; each answers by its name."""
    run = rows(server)["copy"]["run"]
    assert run == rows(server)["empty"]["run"]
    assert sorted(server.json(f"/api/v1/runs/{run}", 404)["did_you_mean"]) == ["copy", "empty"]


@pytest.mark.parametrize("name", ["live", "closed", "unclosed", "damaged", "empty"])
def test_one_run_answers_as_the_query(server: Server, zoo: Path, name: str) -> None:
    """The body is the answer of the same query on the folder, by name and by id."""
    body = server.json(f"/api/v1/runs/{name}")
    with open_run(zoo / f"{name}.gradtap") as run:
        assert body == info(run).body()
        if name != "empty":
            assert server.json(f"/api/v1/runs/{run.id}") == body


def test_an_empty_run_has_no_steps(server: Server) -> None:
    """A run without sessions has empty lists, and no step at all."""
    assert server.json("/api/v1/runs/empty/params")["parameters"] == []
    assert server.json("/api/v1/runs/empty/steps")["steps"] == []
    assert server.json("/api/v1/runs/empty/steps/last", 404)["type"] == "/problems/step-not-found"


def test_a_typo_is_answered_with_near_names(server: Server) -> None:
    """A run that is not there is a 404 with the nearest names."""
    problem = server.json("/api/v1/runs/clsed", 404)
    assert (problem["type"], problem["exit_code"]) == ("/problems/run-not-found", 4)
    assert problem["did_you_mean"][0] == "closed"


@pytest.mark.parametrize(
    "name", ["%2e%2e", "..%2fzoo", "%2fetc", "closed.gradtap", "closed%00", "%5c..", "c", "a%2ftwin"]
)
def test_names_are_never_paths(server: Server, name: str) -> None:
    """What would be another folder as a path is not found."""
    problem = server.json(f"/api/v1/runs/{name}", 404)
    assert problem["type"] in ("/problems/run-not-found", "/problems/not-found")


def test_filters(server: Server) -> None:
    """`q` keeps names that hold a text or fit a pattern, or an id; `state` keeps one state."""
    assert set(rows(server, "?q=clos")) == {"closed", "unclosed"}
    assert set(rows(server, "?q=clos*")) == {"closed"}
    assert set(rows(server, f"?q={rows(server)['live']['run'][:12]}")) == {"live"}
    assert set(rows(server, "?state=live")) == {"live"}
    assert set(rows(server, "?state=unreadable")) == {"newer", "torn"}
    problem = server.json("/api/v1/runs?state=alive", 400)
    assert "did you mean live" in problem["detail"]


def test_a_new_run_and_its_steps_appear(tmp_path: Path) -> None:
    """Runs and steps that come while the server runs are in its next answers."""
    with serving(tmp_path) as server:
        assert server.json("/api/v1/runs")["total"] == 0
        job = Job(run=tmp_path / "mine.gradtap", world=1).steps([0])
        job.flush()
        assert server.json("/api/v1/runs")["total"] == 1
        assert server.json("/api/v1/runs/mine/steps/last")["step"] == 0
        job.step(1)
        job.flush()
        assert server.json("/api/v1/runs/mine/steps/last")["step"] == 1
        job.close()
        assert server.json("/api/v1/runs/mine")["state"] == "closed"


def test_a_lost_store_is_no_empty_list(tmp_path: Path) -> None:
    """A store that is gone is a row with its error and no missing run; the other stores are served on."""
    create_run(tmp_path / "a" / "mine")
    create_run(tmp_path / "b" / "other")
    with serving(tmp_path / "a", tmp_path / "b") as server:
        assert server.get("/readyz").status_code == 200
        (tmp_path / "a").rename(tmp_path / "away")
        ready = server.json("/readyz", 503)
        assert (ready["type"], "retry-after" in server.get("/readyz").headers) == ("/problems/store-unreadable", True)
        assert server.get("/healthz").status_code == 200
        listed = rows(server)
        assert listed["a"]["state"] == "unreadable"
        assert str(tmp_path) not in listed["a"]["error"]["detail"]
        assert server.json("/api/v1/runs/mine", 500)["type"] == "/problems/store-unreadable"
        assert server.json("/api/v1/runs/other")["name"] == "other"
        (tmp_path / "away").rename(tmp_path / "a")
        assert server.json("/readyz")["runs"] == 2


def test_a_run_is_its_own_store(zoo: Path) -> None:
    """A store that is a run's folder serves that run."""
    with serving(zoo / "closed.gradtap") as server:
        assert list(rows(server)) == ["closed"]
