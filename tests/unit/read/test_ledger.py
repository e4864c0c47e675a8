from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from gradtap.read import Ledger, open_run
from gradtap.store.ledger_fields import LEDGER_FIELDS
from tests.support.synthetic import MODEL, NEVER, Job


@pytest.fixture(scope="module", params=["closed", "killed"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Six steps, one not captured on one rank, one untouched parameter; merged by rank 0, or not merged at all."""
    settings = {} if request.param == "closed" else {"settings": NEVER}
    job = Job(run=tmp_path_factory.mktemp("ledger") / "r", world=2, k=3, **settings)
    job.steps([1, 2])
    job.step(3, dropped=[1], micro_seen=5)
    job.step(4, untouched=["mlp.bias"], flags=8, factor=0.5)
    job.steps([5, 6])
    job.close() if request.param == "closed" else job.kill()
    return job


def test_columns_are_aligned_with_steps(job: Job) -> None:
    """Every step has a row, captured or not; every column has one entry for each of them."""
    ledger = open_run(job.run).ledger
    assert ledger.steps == (1, 2, 3, 4, 5, 6)
    assert set(ledger.columns) == {"session", *(f.name for f in LEDGER_FIELDS)}
    for name in ledger:
        assert len(ledger[name]) == 6, name
    assert ledger["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert ledger["factor"].tolist() == [1, 1, 1, 0.5, 1, 1]
    assert ledger["k"].tolist() == [3] * 6
    assert ledger["record"].tolist() == ["committed", "committed", "dropped", *["committed"] * 3]
    assert ledger["micro_seen"].tolist() == [2, 2, 5, 2, 2, 2]
    assert ledger["state"].tolist() == ["applied"] * 6
    assert ledger["flags"].dtype == np.uint64
    np.testing.assert_allclose(ledger["learning_rate"], np.tile([0.1, 0.2], (6, 1)))


def test_ranks_are_merged(job: Job) -> None:
    """Bytes are summed over ranks, touched is the first of any rank, seconds the longest."""
    ledger = open_run(job.run).ledger
    elements = sum(p.numel for p in MODEL if p.stored)
    assert ledger["raw_bytes"][[0, 3]].tolist() == [4 * elements] * 2
    at = [p.name for p in MODEL].index("mlp.bias")
    assert ledger["touched"][:, at].tolist() == [0, 0, 0, -1, 0, 0]
    assert ledger["seconds"].tolist() == [0.25] * 6


def test_norm_is_that_of_the_stored_gradient(job: Job) -> None:
    """`norm` is the global norm of what was captured, NaN for a step without a complete capture."""
    norms = open_run(job.run).ledger["norm"]
    names = [p.name for p in MODEL if p.stored]
    for row, step in enumerate([1, 2, 3, 4, 5, 6]):
        if step == 3:
            continue
        wanted = np.sqrt(sum(np.sum(np.square(job.expected(n, step), dtype=np.float64)) for n in names))
        np.testing.assert_allclose(norms[row], wanted, rtol=1e-12)


def test_row(job: Job) -> None:
    """One row as a dict: plain values, flags by name; an unknown step is an error that names the nearest."""
    ledger = open_run(job.run).ledger
    row = ledger.row(4)
    assert row["flags"] == ("untouched",)
    assert (row["step"], row["state"], row["session"], row["factor"]) == (4, "applied", "0000", 0.5)
    assert row["capture"] == 3
    with pytest.raises(gradtap.StepNotFoundError, match="17"):
        ledger.row(17)
    with pytest.raises(gradtap.NotFoundError, match="did you mean factor"):
        ledger["facto"]


def test_late_fields_are_unknown_until_the_next_step(tmp_path: Path) -> None:
    """What only the next boundary tells reads as unknown, NaN for numbers, until it has come."""
    job = Job(run=tmp_path / "r", world=2, settings=NEVER)
    job.step(1)
    job.step(2, outcome=False)
    job.flush()
    ledger = open_run(job.run).ledger
    assert ledger["state"].tolist() == ["applied", "unknown"]
    assert ledger["clip_coef"][0] == 1.0
    assert np.isnan(ledger["clip_coef"][1])
    job.kill()


def test_sessions_are_joined(tmp_path: Path) -> None:
    """A step recorded again shows the row of the attempt in force; parameter groups may differ between sessions."""
    Job(run=tmp_path / "r", world=2, settings=NEVER, groups=1).steps(range(1, 6), divisor=3.0).kill()
    second = Job(run=tmp_path / "r", world=2, settings=NEVER, groups=2)
    second.step(4, divisor=7.0)
    second.step(5, dropped=[0], divisor=7.0)
    second.step(6, dropped=[0], divisor=7.0)
    second.kill()
    ledger = open_run(tmp_path / "r").ledger
    assert ledger.steps == (1, 2, 3, 4, 5, 6)
    assert ledger["session"].tolist() == ["0000", "0000", "0000", "0001", "0000", "0001"]
    assert ledger["divisor"].tolist() == [3, 3, 3, 7, 3, 7]
    np.testing.assert_array_equal(np.isnan(ledger["learning_rate"][:, 1]), [True, True, True, False, True, False])


def test_a_run_without_steps(tmp_path: Path) -> None:
    """A run that has recorded nothing has an empty ledger, not an error."""
    job = Job(run=tmp_path / "r", world=2, settings=NEVER)
    ledger = open_run(job.run).ledger
    assert ledger.steps == ()
    assert ledger["factor"].shape == (0,)
    assert ledger["session"].shape == (0,)
    job.kill()


@pytest.mark.parametrize("published", [True, False])
def test_norm_under_a_selection(tmp_path: Path, published: bool) -> None:
    """Parameters that the selection left out do not count; a NaN that was captured does."""
    job = Job(run=tmp_path / "r", world=2, **({} if published else {"settings": NEVER}))
    job.step(1, select=["mlp.bias", "norm.scale"])
    job.step(2)
    job.close() if published else job.kill()
    norms = open_run(job.run).ledger["norm"]
    for norm, names in zip(norms, (["mlp.bias", "norm.scale"], [p.name for p in MODEL if p.stored]), strict=True):
        step = 1 if len(names) == 2 else 2
        wanted = np.sqrt(sum(np.sum(np.square(job.expected(n, step), dtype=np.float64)) for n in names))
        np.testing.assert_allclose(norm, wanted, rtol=1e-12)


@pytest.mark.parametrize("published", [True, False])
def test_untouched_is_what_all_ranks_together_did_not_touch(tmp_path: Path, published: bool) -> None:
    """A parameter that one rank's backward reached is touched; one that none reached is not: ledger and gradients."""
    job = Job(run=tmp_path / "r", world=2, **({} if published else {"settings": NEVER}))
    job.step(1, untouched={0: ["mlp.bias"], 1: ["mlp.weight"]})
    job.step(2, untouched={0: ["mlp.bias"], 1: ["mlp.bias"]})
    job.close() if published else job.kill()
    run = open_run(job.run)
    assert [run.ledger.row(step)["flags"] for step in (1, 2)] == [(), ("untouched",)]
    assert [run.grad("mlp.bias", step).flags for step in (1, 2)] == [(), ("untouched",)]
    assert run.grad("mlp.weight", 2).flags == ()


def test_a_large_ledger_is_joined_quickly(closed: Job) -> None:
    """Two sessions of a million rows are joined as arrays, each step with the row of the attempt in force."""

    class Many:
        """A session of a million rows."""

        def __init__(self, first: int) -> None:
            self.session = type("Plain", (), {"first_step": first, "name": str(first)})
            self._known = np.arange(first, first + 10**6)

        def steps(self) -> np.ndarray:
            return self._known

    ledgers: Any = [Many(1), Many(500_001)]
    complete = np.arange(1, 600_001)
    inforce = np.where((complete > 500_000) & (complete % 2 == 0), 1, 0)
    begun = time.perf_counter()
    ledger = Ledger(ledgers, (complete, inforce))
    assert time.perf_counter() - begun < 2
    assert len(ledger.steps) == 1_500_000
    found = {step: (ledger.session_of(step), int(ledger._rows[step - 1])) for step in (1, 500_001, 500_002, 600_001)}
    assert found == {1: (0, 0), 500_001: (0, 500_000), 500_002: (1, 1), 600_001: (1, 100_000)}
