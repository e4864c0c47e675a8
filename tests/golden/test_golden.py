"""Stores of every release stay readable, with the numbers that were written."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

import gradtap
from gradtap.read import verify
from tests.golden.make import HERE, PARAMS
from tests.support.synthetic import Job

STORES = sorted(HERE.glob("*.tar.gz"))


@pytest.fixture(params=STORES, ids=[store.name for store in STORES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run.gradtap"


def expected(session: int, name: str, step: int) -> np.ndarray:
    """What that session was given."""
    job = Job.__new__(Job)
    job.params, job.seed, job.k = PARAMS, session, 3 if session == 1 else 0
    return job.expected(name, step)


def test_there_is_a_store() -> None:
    """The glob above found something to read."""
    assert STORES


def test_every_number_is_what_was_written(store: Path) -> None:
    """All steps and parameters of both sessions, bit for bit, and the earlier attempt."""
    run = gradtap.open(store)
    assert list(run.steps) == [1, 2, 4, 5, 6, 7]
    for step in run.steps:
        session = 2 if step >= 6 else 1
        for param in (p for p in run.params if p.stored):
            if step == 5 and param.name not in ("embed.weight", "scale"):
                with pytest.raises(gradtap.IncompleteError):
                    run.grad(param.name, step)
                continue
            found = np.asarray(run.grad(param.name, step))
            assert np.array_equal(found, expected(session, param.name, step)), (step, param.name)
    first = np.asarray(run.grad("head.weight", 6, attempt=1))
    assert np.array_equal(first, expected(1, "embed.weight", 6))


def test_facts_and_summaries_are_what_was_written(store: Path) -> None:
    """The ledger, the norms, and the state of the sessions."""
    run = gradtap.open(store)
    assert [session.state for session in run.sessions] == ["closed", "unclosed"]
    assert run.ledger.row(1)["loss_scale"] == 8.0 and run.ledger.row(3)["record"] == "dropped"
    norm = run.norms("double.bias", steps=[2]).values[0, 0]
    assert norm == pytest.approx(np.linalg.norm(expected(1, "double.bias", 2)))


def test_verify_finds_no_damage(store: Path) -> None:
    """Down to the last chunk."""
    assert not verify(store, deep=True).findings
