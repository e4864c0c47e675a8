"""One step: the row, tags and statistics of the very attempt that is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradtap.errors import StepNotFoundError
from gradtap.query.step import step
from gradtap.read import open_run
from tests.support.synthetic import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    first = Job(run=tmp_path / "run.gradtap").steps([1, 2, 3], loss_scale=8.0)
    first.recorders[0].tags(2, {"loss": 1.5})
    first.close()
    second = Job(run=first.run, seed=4).steps([2], loss_scale=16.0)
    second.close()
    return first


def test_each_attempt_has_its_own_row(job: Job) -> None:
    """Loss scale, tags and statistics are those of the attempt; a later one takes nothing over."""
    run = open_run(job.run)
    old, new = (step(run, "2", attempt=attempt) for attempt in (1, 2))
    assert (old.facts["ledger"]["loss_scale"], new.facts["ledger"]["loss_scale"]) == (8.0, 16.0)
    assert (old.facts["tags"], new.facts["tags"]) == ({"loss": 1.5}, {})
    norms = {row["name"]: row["l2"] for row in old.rows}
    assert norms["mlp.weight"] == pytest.approx(np.linalg.norm(job.expected("mlp.weight", 2).astype(np.float64)))


def test_without_an_attempt_it_is_the_newest(job: Job) -> None:
    """And says how many there are; the answer of a numbered attempt does not, so that it never changes."""
    run = open_run(job.run)
    newest = step(run, "2")
    assert (newest.facts["attempt"], newest.facts["attempts"]) == (2, 2)
    assert "attempts" not in step(run, "2", attempt=2).facts
    assert step(run, "first").facts["step"] == 1 and step(run, "last").facts["step"] == 3


def test_an_attempt_that_is_not_there_is_named(job: Job) -> None:
    """With those that are."""
    with pytest.raises(StepNotFoundError, match="attempts 1 to 2"):
        step(open_run(job.run), "2", attempt=3)


def test_a_live_step_is_settled_once_its_outcome_is_published(tmp_path: Path) -> None:
    """Before that, what is said of it may still change."""
    job = Job(run=tmp_path / "run.gradtap").steps([1])
    job.step(2, outcome=False)
    job.wait_published(2)
    run = open_run(job.run)
    assert step(run, "1").facts["settled"] and not step(run, "2").facts["settled"]
    job.close()
    assert step(run, "2").facts["settled"]


def test_only_matching_parameters_have_a_row(job: Job) -> None:
    """Part of a name, as `ls` takes it."""
    assert [row["name"] for row in step(open_run(job.run), "1", match="mlp").rows] == ["mlp.weight", "mlp.bias"]
