"""A request: everything but the values, and no chunk read for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradtap.errors import DamagedError, IncompleteError, InFlightError, UsageError
from gradtap.read import Run, open_run
from tests.support.synthetic import NEVER, Job, spec
from tests.support.wounds import flip_body, spot


def reads(run: Run) -> int:
    return sum(reader.chunks.reads for reader in run._sessions())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(run=tmp_path / "run.gradtap").steps([1, 2, 3])
    made.close()
    yield made


def test_a_request_tells_the_answer_without_reading_it(job: Job) -> None:
    """Shape, dtype, steps and bytes are those of the gradient that is read afterwards; no chunk was read for them."""
    run = open_run(job.run)
    wanted = run.request("embed.weight", steps=[1, 3], slice="3:9, ::2")
    wanted.check()
    assert reads(run) == 0
    read = wanted.read()
    assert reads(run) == wanted.chunks > 0
    assert (wanted.shape, wanted.dtype, wanted.nbytes) == (read.shape, read.dtype, read.values.nbytes)
    assert (wanted.steps, wanted.attempts, wanted.flags, wanted.factor) == (
        read.steps,
        read.attempts,
        read.flags,
        read.factor,
    )
    assert np.array_equal(read.values[1], job.expected("embed.weight", 3)[3:9, ::2])


def test_read_bytes_are_those_of_the_touched_chunks(job: Job) -> None:
    """One element costs its chunk; the whole parameter costs all of its chunks, at least its own size."""
    run = open_run(job.run)
    one, whole = run.request("embed.weight", 1, slice="0, 0"), run.request("embed.weight", 1)
    assert one.chunks == 1 and 4 <= one.read_bytes <= 512
    assert whole.chunks > 1 and whole.read_bytes >= whole.nbytes


def test_identity_differs_by_capture_and_parameter(job: Job) -> None:
    """Two steps, two parameters and two attempts never have the same identity; the same question always has."""
    run = open_run(job.run)
    again = Job(run=job.run).steps([3])
    again.close()
    kinds = [
        run.request("embed.weight", 1).identity,
        run.request("embed.weight", 2).identity,
        run.request("mlp.weight", 1).identity,
        run.request("embed.weight", 3, attempt=1).identity,
        run.request("embed.weight", 3).identity,
    ]
    assert len(set(kinds)) == len(kinds)
    assert open_run(job.run).request("embed.weight", 3).identity == kinds[-1]


def test_what_can_still_change_is_not_settled(tmp_path: Path) -> None:
    """In a live session a step is settled once its outcome is published; after the close all are."""
    job = Job(run=tmp_path / "run.gradtap", settings=NEVER).steps([1, 2])
    job.flush()
    run = open_run(job.run)
    assert not run.request("mlp.bias", 1).settled
    job.close()
    assert run.request("mlp.bias", 1).settled
    assert not run.request("mlp.bias", 1, partial=True).settled


def test_a_published_step_of_a_live_session_is_settled(tmp_path: Path) -> None:
    """With its outcome known; the newest step, whose outcome is not, is not."""
    job = Job(run=tmp_path / "run.gradtap").steps([1, 2])
    job.step(3, outcome=False)
    job.wait_published(3)
    run = open_run(job.run)
    assert run.request("mlp.bias", 1).settled
    assert not run.request("mlp.bias", 3).settled
    assert not run.request("mlp.bias", steps=[1, 3]).settled
    job.close()


def test_check_finds_what_the_selection_left_out(tmp_path: Path) -> None:
    """A parameter that was not captured at a step is refused before a chunk is read."""
    job = Job(run=tmp_path / "run.gradtap")
    job.step(1, select=["mlp.bias"])
    job.close()
    wanted = open_run(job.run).request("embed.weight", 1)
    with pytest.raises(IncompleteError, match="selection"):
        wanted.check()


def test_a_step_in_flight_is_its_own_error(tmp_path: Path) -> None:
    """While the job lives it is in flight; once the job is gone it is incomplete for good."""
    job = Job(run=tmp_path / "run.gradtap").steps([1])
    job.step(2, absent=[1])
    job.flush()
    with pytest.raises(InFlightError) as caught:
        open_run(job.run).request("mlp.bias", 2)
    assert caught.value.facts == {"last_complete": 1}
    job.kill()
    with pytest.raises(IncompleteError) as later:
        open_run(job.run).request("mlp.bias", 2)
    assert not isinstance(later.value, InFlightError)


def test_damage_is_met_when_it_is_read(job: Job) -> None:
    """A rotten chunk does not keep a request from being made; reading it raises."""
    flip_body(spot(job.run, "mlp.weight", 0))
    wanted = open_run(job.run).request("mlp.weight", 1)
    wanted.check()
    with pytest.raises(DamagedError, match="mlp.weight"):
        wanted.read()


def test_summary_has_every_stored_statistic(job: Job) -> None:
    """They are those of the gradients, and of the attempt that was asked for."""
    again = Job(run=job.run, seed=5).steps([2])
    again.close()
    run = open_run(job.run)
    for attempt, made in ((1, job), (2, again), (None, again)):
        found = run.summary(2, attempt=attempt)
        values = made.expected("mlp.weight", 2).astype(np.float64)
        at = found.params.index("mlp.weight")
        assert found.stats["l2"][at] == pytest.approx(np.linalg.norm(values))
        assert found.stats["absmax"][at] == np.abs(values).max()
        assert set(found.stats) == {"l2", "l1", "absmax", "mean", "std", "zeros", "nan", "inf"}


@pytest.mark.parametrize("level", ["none", "basic"])
def test_a_run_without_histograms_says_so(tmp_path: Path, level: str) -> None:
    """The stored histogram is refused with what to do; counting the values works."""
    job = Job(run=tmp_path / "run.gradtap", summary=level).steps([1])
    job.close()
    run = open_run(job.run)
    with pytest.raises(IncompleteError, match="slice="):
        run.hist("mlp.bias", 1)
    assert run.hist("mlp.bias", 1, slice="...").histogram.counts.sum() == 29


def test_the_stored_histogram_is_that_of_the_values(job: Job) -> None:
    """Stored and counted anew are equal, and the stored one reads no chunk."""
    run = open_run(job.run)
    stored = run.hist("mlp.weight", 2)
    assert reads(run) == 0 and stored.histogram.source == "summary"
    anew = run.hist("mlp.weight", 2, slice="...")
    assert anew.histogram.source == "values"
    assert np.array_equal(stored.histogram.counts, anew.histogram.counts)


def test_the_stored_histogram_counts_what_is_not_finite(tmp_path: Path) -> None:
    """NaN and infinities are beside the bins."""

    class Odd(Job):
        def gradient(self, param: int, step: int) -> np.ndarray:
            return np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32)

    job = Odd(run=tmp_path / "run.gradtap", params=(spec("w", 6),), kind="whole").steps([1])
    job.close()
    found = open_run(job.run).hist("w", 1).histogram
    assert (found.nan, found.inf, found.counts.sum()) == (1, 2, 3)
    anew = open_run(job.run).hist("w", 1, slice="...").histogram
    assert (anew.nan, anew.posinf, anew.neginf) == (1, 1, 1)


@pytest.mark.parametrize("bad", [{"scale": "log3"}, {"bins": 7}, {"bins": 0, "scale": "linear"}])
def test_wrong_bins_are_refused(job: Job, bad: dict[str, object]) -> None:
    """An unknown scale, bins where the scale has its own, and none at all."""
    with pytest.raises(UsageError):
        open_run(job.run).hist("mlp.bias", 1, **bad)  # type: ignore[arg-type]
