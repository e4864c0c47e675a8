"""The reader contract: what every place that runs are read from must answer alike. Inherit it, give `reader`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from tests.support.synthetic import MODEL, NEVER, Job

CAPTURED = [p for p in MODEL if p.status == "captured"]
KEYS: dict[int, tuple[str, ...]] = {
    0: ("", "..."),
    1: ("3", "-2:", "::-4", "5:5"),
    2: ("0", ":, -1", "1:9:2, 3:11", "::-5, ::3", "..., 2"),
    4: ("1, 2, 0, 3", "..., 0", "::2, :, 1", "-1"),
}


class ReaderContract:
    """Facts that hold for a run wherever it is read from."""

    def reader(self, job: Job) -> Any:
        """A reader of the run that the job has written."""
        raise NotImplementedError

    @pytest.fixture(scope="class", params=["cuts", "replicated", "flat"])
    @classmethod
    def job(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
        """A run of two sessions: steps 1 to 6 killed, then 5 to 9 by other ranks, step 8 dropped by one."""
        path = tmp_path_factory.mktemp("contract") / "run.gradtap"
        cls.before(path, request.param).kill()
        job = Job(run=path, kind=request.param, world=3, seed=2, settings=NEVER)
        job.steps([5, 6, 7])
        job.step(8, dropped=[1])
        job.step(9, untouched=["mlp.bias"], flags=8, factor=0.25)
        job.close()
        return job

    @staticmethod
    def before(path: Path, kind: str) -> Job:
        """The job of the first session."""
        return Job(run=path, kind=kind, world=2, seed=1, settings=NEVER).steps(range(1, 7))

    @pytest.fixture
    def run(self, job: Job) -> Iterator[Any]:
        """The run, open."""
        with self.reader(job) as run:
            yield run

    def expected(self, job: Job, name: str, step: int, attempt: int | None = None) -> np.ndarray:
        """What was handed to the recorders for the attempt in force, or the one asked for."""
        seed = 1 if step < 5 or attempt == 1 else 2
        kept, job.seed = job.seed, seed
        try:
            return job.expected(name, step)
        finally:
            job.seed = kept

    def test_identity(self, job: Job, run: Any) -> None:
        """Steps ascend and are complete ones only; parameters are those of the model in its order."""
        assert list(run.steps) == [1, 2, 3, 4, 5, 6, 7, 9]
        assert run.params == MODEL
        assert run.name == "run"
        assert len(run.id) == 32

    def test_every_gradient(self, job: Job, run: Any) -> None:
        """Every element of every parameter at every step is what was handed over, in full precision."""
        for p in CAPTURED:
            for step in run.steps:
                got = run.grad(p.name, step)
                np.testing.assert_array_equal(got.values, self.expected(job, p.name, step), strict=True)
                assert (got.name, got.step, got.complete, got.dtype_captured) == (p.name, step, True, p.dtype)

    def test_every_slice(self, job: Job, run: Any) -> None:
        """Slices of any number of dimensions are NumPy's of the whole, given as text or as an index."""
        for p in CAPTURED:
            if not p.numel:
                continue
            whole = self.expected(job, p.name, 6)
            for key in KEYS[len(p.shape)]:
                index = eval(f"np.s_[{key}]", {"np": np}) if key else ()
                for given in (key, index):
                    got = run.grad(p.name, 6, slice=given)
                    np.testing.assert_array_equal(got.values, whole[index])
                    assert got.shape == np.shape(whole[index])

    def test_stacks(self, job: Job, run: Any) -> None:
        """A stack over steps crosses sessions and says the attempt of each."""
        got = run.grad("conv.weight", steps=slice(3, 8), slice="0")
        wanted = np.stack([self.expected(job, "conv.weight", s)[0] for s in (3, 4, 5, 6, 7)])
        np.testing.assert_array_equal(got.values, wanted, strict=True)
        assert (got.steps, got.attempts) == ((3, 4, 5, 6, 7), (1, 1, 2, 2, 1))

    def test_attempts(self, job: Job, run: Any) -> None:
        """The last attempt counts, earlier ones stay readable."""
        assert tuple(run.attempts(5)) == (1, 2)
        first = run.grad("mlp.bias", 5, attempt=1)
        np.testing.assert_array_equal(first.values, self.expected(job, "mlp.bias", 5, attempt=1))
        assert first.attempts == (1,)

    def test_incomplete(self, job: Job, run: Any) -> None:
        """A dropped step is said to be dropped; `partial` gives what other ranks have, NaN for the rest."""
        with pytest.raises(gradtap.IncompleteError, match="rank 1 dropped"):
            run.grad("mlp.weight", 8)
        seen = 0
        for name in ("embed.weight", "conv.weight", "mlp.weight", "mlp.bias"):
            part = run.grad(name, 8, partial=True)
            there = ~np.isnan(part.values)
            seen += there.sum()
            np.testing.assert_array_equal(part.values[there], self.expected(job, name, 8)[there])
        assert 0 < seen < sum(p.numel for p in CAPTURED)

    def test_flags(self, job: Job, run: Any) -> None:
        """Flags and factor of the step come with the values, which are not multiplied."""
        got = run.grad("mlp.bias", 9)
        assert (got.flags, got.factor) == (("untouched",), (0.25,))
        assert run.grad("mlp.weight", 9).flags == ()
        assert run.grad("mlp.weight", 7).factor == (1.0,)

    @pytest.mark.parametrize(
        ("name", "step", "key", "error"),
        [
            ("mlp.bia", 1, None, gradtap.ParamNotFoundError),
            ("frozen.bias", 1, None, gradtap.ParamNotFoundError),
            ("mlp.bias", 99, None, gradtap.StepNotFoundError),
            ("mlp.bias", 1, "99", gradtap.SelectionError),
            ("mlp.bias", 1, "a", gradtap.SelectionError),
        ],
    )
    def test_errors(self, run: Any, name: str, step: int, key: str | None, error: type[Exception]) -> None:
        """What is not there is an error of its own kind, never an empty answer."""
        with pytest.raises(error):
            run.grad(name, step, slice=key)

    def test_norms(self, job: Job, run: Any) -> None:
        """Norms are those of the gradients in force."""
        norms = run.norms()
        assert list(norms.steps) == list(run.steps)
        for p, row in zip(norms.params, norms.values, strict=True):
            wanted = [np.linalg.norm(self.expected(job, p, s).astype(np.float64).reshape(-1)) for s in run.steps]
            np.testing.assert_allclose(row, wanted, rtol=1e-12)

    def test_ledger(self, run: Any) -> None:
        """The ledger has every step, the dropped one too."""
        ledger = run.ledger
        assert list(ledger.steps) == list(range(1, 10))
        assert ledger["record"].tolist().index("dropped") == 7
        assert ledger["factor"].tolist() == [1.0] * 8 + [0.25]

    def test_info(self, run: Any) -> None:
        """Facts agree with what can be read."""
        info = run.info()
        assert (info.steps, info.first_step, info.last_step) == (8, 1, 9)
        assert [s.state for s in run.sessions] == ["unclosed", "closed"]


class TestFolder(ReaderContract):
    """A run in a folder of this machine."""

    def reader(self, job: Job) -> Any:
        """Opened by its path."""
        return gradtap.open(job.run)


def test_contract_can_fail(tmp_path: Path) -> None:
    """The contract notices a reader that gives another number."""

    class Wrong(TestFolder):
        def expected(self, job: Job, name: str, step: int, attempt: int | None = None) -> np.ndarray:
            values = super().expected(job, name, step, attempt).copy()
            values.reshape(-1)[-1:] += 1
            return values

    ReaderContract.before(tmp_path / "r", "cuts").kill()
    job = Job(run=tmp_path / "r", seed=2, settings=NEVER).steps([5, 6, 7, 8, 9])
    job.kill()
    wrong = Wrong()
    with gradtap.open(job.run) as run, pytest.raises(AssertionError):
        wrong.test_every_gradient(job, run)
