from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gradtap
from gradtap.read import open_run
from gradtap.read.norms import STATS
from tests.support.synthetic import MODEL, NEVER, Job

STORED = [p.name for p in MODEL if p.stored]

FORMULAS = {
    "l2": lambda v: np.sqrt(np.sum(v**2)),
    "l1": lambda v: np.sum(np.abs(v)),
    "absmax": lambda v: np.max(np.abs(v)),
    "mean": np.mean,
    "std": np.std,
    "zeros": lambda v: np.sum(v == 0),
    "nan": lambda v: np.sum(np.isnan(v)),
    "inf": lambda v: np.sum(np.isinf(v)),
}


@pytest.mark.parametrize("stat", STATS)
def test_equal_numpy_on_the_gradients(closed: Job, unclosed: Job, stat: str) -> None:
    """Each statistic of parameters cut between ranks equals NumPy's of the whole, published or not."""
    for job in (closed, unclosed):
        norms = open_run(job.run).norms(stat=stat)
        assert (list(norms.params), norms.steps, norms.stat) == (STORED, tuple(range(1, 10)), stat)
        assert norms.values.dtype == np.float64
        wanted = [[FORMULAS[stat](job.expected(n, s).astype(np.float64)) for s in norms.steps] for n in STORED]
        np.testing.assert_allclose(norms.values, wanted, rtol=1e-9, atol=1e-12)


def test_reads_no_gradient(closed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms come from the summaries: not one chunk of a gradient is read."""
    from gradtap.read.chunks import ChunkReader

    monkeypatch.setattr(ChunkReader, "_body", None)
    assert open_run(closed.run).norms().values.shape == (len(STORED), 9)


def test_match_and_steps(closed: Job) -> None:
    """Names, globs and steps narrow the table; rows keep the model's order, steps ascend."""
    run = open_run(closed.run)
    everything = run.norms()
    some = run.norms(["mlp.*", "!*.bias", "embed.weight"], steps=[8, 2])
    assert some.params == ("embed.weight", "mlp.weight")
    assert some.steps == (2, 8)
    np.testing.assert_array_equal(some["mlp.weight"], everything["mlp.weight"][[1, 7]])
    assert run.norms("mlp.bias").params == ("mlp.bias",)
    assert run.norms(lambda name, shape: len(shape) == 4).params == ("conv.weight",)
    assert run.norms(steps=slice(3, 5)).steps == (3, 4)


def test_refusals(closed: Job) -> None:
    """An unknown statistic, parameter or step is named."""
    run = open_run(closed.run)
    with pytest.raises(gradtap.UsageError, match="'l3'.*l2, l1"):
        run.norms(stat="l3")
    with pytest.raises(gradtap.ParamNotFoundError, match="did you mean mlp.bias"):
        run.norms("mlp.bisa")
    with pytest.raises(gradtap.ParamNotFoundError):
        run.norms("frozen.bias")
    with pytest.raises(gradtap.StepNotFoundError, match="44"):
        run.norms(steps=[1, 44])
    with pytest.raises(gradtap.ParamNotFoundError):
        run.norms()["none"]


def test_without_summaries(tmp_path: Path) -> None:
    """A run recorded without summaries says so instead of showing nothing."""
    job = Job(run=tmp_path / "r", world=2, summary="none", settings=NEVER).steps([1])
    job.kill()
    with pytest.raises(gradtap.IncompleteError, match="summary='none'"):
        open_run(job.run).norms()


def test_left_out_parameters_are_nan(tmp_path: Path) -> None:
    """A parameter that the selection left out at a step has no statistic there: NaN, not zero."""
    for settings in ({}, {"settings": NEVER}):
        job = Job(run=tmp_path / f"r{len(settings)}", world=2, **settings)
        job.step(1)
        job.step(2, select=["mlp.bias"])
        job.kill() if settings else job.close()
        run = open_run(job.run)
        for stat in ("l2", "zeros"):
            missing = np.isnan(run.norms(stat=stat).values)
            assert missing.sum(axis=0).tolist() == [0, len(STORED) - 1]
            assert not missing[STORED.index("mlp.bias")].any()


def test_attempts_and_sessions(tmp_path: Path) -> None:
    """Norms of steps of several sessions come from the attempts in force."""
    first = Job(run=tmp_path / "r", world=2, seed=1, settings=NEVER).steps([1, 2])
    first.kill()
    second = Job(run=tmp_path / "r", world=3, seed=2, settings=NEVER).steps([2, 3])
    second.kill()
    got = open_run(tmp_path / "r").norms("mlp.weight")
    jobs = [first, second, second]
    wanted = [
        np.linalg.norm(j.expected("mlp.weight", s).astype(np.float64)) for j, s in zip(jobs, [1, 2, 3], strict=True)
    ]
    np.testing.assert_allclose(got.values, [wanted], rtol=1e-12)
