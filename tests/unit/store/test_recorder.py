"""The background half: what is committed, what a failure does, how a session ends."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import gradtap
from gradtap.errors import CaptureError, OtherModelError, StoreError
from gradtap.flags import UNTOUCHED
from gradtap.plan.rules import StepsRule
from gradtap.plan.schedule import ChangeEntry
from gradtap.store.chunk_writer import ChunkWriter
from gradtap.store.journal import JournalReader
from gradtap.store.lock import read_lock
from gradtap.store.norm_check import CHECKED_CAPTURES
from gradtap.store.rank_rows import RankRows
from gradtap.store.recorder import RankRecorder
from gradtap.store.runfile import read_run
from gradtap.store.schedule_log import append_entry
from gradtap.store.session import read_head
from gradtap.store.shard import ShardFile
from gradtap.types import StepOutcome
from tests.support.synthetic import MODEL, NEVER, SMALL, Job, spec


def group_of(job: Job) -> Any:
    return zarr.open_group(str(job.paths.zarr), mode="r")


def test_every_step_is_there_and_right(tmp_path: Path) -> None:
    """Over shard and growth boundaries, each stored gradient is what was handed over."""
    job = Job(run=tmp_path / "r").steps(range(1, 19))
    job.close()
    run = gradtap.open(job.run)
    assert list(run.steps) == list(range(1, 19))
    for step in (1, 4, 5, 16, 17, 18):
        for param in run.params:
            if param.stored:
                assert np.array_equal(np.asarray(run.grad(param.name, step)), job.expected(param.name, step))
    assert not job.reports


def test_lengths_grow_ahead_of_need_and_are_trimmed(tmp_path: Path) -> None:
    """A live session's arrays are powers of two long and longer than what is published; a closed one's fit."""
    job = Job(run=tmp_path / "r").steps(range(1, 11))
    job.wait_published(10)
    live = group_of(job)["_step"].shape[0]
    assert live & (live - 1) == 0 and live * 3 >= 10 * 4
    job.close()
    group = group_of(job)
    assert {array.shape[0] for name, array in group.arrays()} == {10}
    assert group["_ledger/step"].shape == (10,)
    ranks_own = zarr.open_array(str(job.paths.zarr / "_ledger/r00001/step"), mode="r")
    assert ranks_own.shape == (10,)


def test_a_failed_write_loses_one_capture_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at some steps leaves them incomplete, the others whole, the memory free, and one message."""
    original = ChunkWriter.write

    def failing(self: ChunkWriter, capture: int, *rest: Any) -> None:
        if capture in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, capture, *rest)

    monkeypatch.setattr(ChunkWriter, "write", failing)
    job = Job(run=tmp_path / "r", world=2).steps(range(1, 7))
    job.close()
    run = gradtap.open(job.run)
    assert list(run.steps) == [1, 2, 5, 6]
    assert len(job.reports) == 2, "one message for each rank, not for each step or piece"
    assert all("No space left" in report and "step" in report for report in job.reports)
    assert [run.ledger.row(step)["record"] for step in (5, 6)] == ["committed", "committed"]
    assert list(group_of(job)["_ledger/record"][:]) == [1, 1, 3, 3, 1, 1]
    assert list(group_of(job)["_step"][:]) == [1, 2, -1, -1, 5, 6]


def test_memory_comes_back_when_a_piece_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`done` is called for a piece that could not be written: training never waits for a buffer that is lost."""

    def broken(*args: Any) -> None:
        raise OSError("broken")

    job = Job(run=tmp_path / "r", world=1)
    monkeypatch.setattr(ChunkWriter, "write", broken)
    given_back = []
    monkeypatch.setattr("tests.support.synthetic._nothing", lambda: given_back.append(1))
    job.step(1)
    job.flush()
    assert len(given_back) == len([p for p in MODEL if p.stored])
    job.close()


def test_on_error_raise_reaches_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `raise_errors` the next step raises, with the cause."""

    def broken(*args: Any) -> None:
        raise OSError("no disk")

    job = Job(run=tmp_path / "r", world=1)
    job.recorders[0]._raise_errors = True
    monkeypatch.setattr(ChunkWriter, "write", broken)
    job.step(1)
    job.flush()
    with pytest.raises(CaptureError, match="no disk"):
        job.step(2)
    job.close()


def test_a_dropped_capture_keeps_its_number(tmp_path: Path) -> None:
    """A capture that one rank dropped is not complete, and the next one has the number after it."""
    job = Job(run=tmp_path / "r").steps([1, 2])
    job.step(3, dropped=[1])
    job.steps([4, 5]).close()
    assert list(group_of(job)["_step"][:]) == [1, 2, -1, 4, 5]
    assert list(group_of(job)["_ledger/record"][:]) == [1, 1, 2, 1, 1]


def test_a_schedule_change_read_late_drops_and_never_shifts(tmp_path: Path) -> None:
    """A capture whose number came to name another step by the time of its commit is recorded as dropped."""
    job = Job(run=tmp_path / "r", world=1, settings=NEVER).steps([1, 2])
    job.flush()
    recorder = job.recorders[0]
    recorder.begin(job._facts(3, (), {}), capture=True)
    job.flush()
    append_entry(job.paths.schedule_log, ChangeEntry(from_step=3, rule=StepsRule((10, 11))))
    recorder.end(3)
    job.flush()
    assert recorder.schedule is not None and recorder.schedule.number(3) is None
    job.step(10)
    job.close()
    assert list(group_of(job)["_ledger/record"][:3]) == [1, 1, 2]
    run = gradtap.open(job.run)
    assert list(run.steps) == [1, 2, 10], "number 2 is step 10's now"
    assert np.array_equal(np.asarray(run.grad("mlp.bias", 10)), job.expected("mlp.bias", 10))


def test_ranks_that_do_not_close_leave_a_readable_session(tmp_path: Path) -> None:
    """Rank 0 says who is missing, leaves the session unclosed, and what is complete can be read."""
    job = Job(run=tmp_path / "r", settings=replace(SMALL, close_timeout=0.2)).steps([1, 2])
    job.flush()
    job.recorders[0].close(0.2)
    assert any("ranks 1, 2" in report for report in job.reports)
    assert read_head(job.paths).closed is None
    assert list(gradtap.open(job.run).steps) == [1, 2]
    for recorder in job.recorders[1:]:
        recorder.close(1)


def test_a_wrong_norm_stops_capturing_and_labels(tmp_path: Path) -> None:
    """Where the engine's own norm says that the capture is wrong, capturing stops soon and every step is flagged."""
    job = Job(run=tmp_path / "r", world=2)
    for step in range(1, 4):
        job.step(step, outcome=False)
        for recorder in job.recorders:
            recorder.outcome(step, StepOutcome(state="applied", norm_engine=1.0))
    job.flush()
    job.wait_published(3)
    job.steps(range(4, 14))
    job.close()
    run = gradtap.open(job.run)
    assert len([r for r in job.reports if "norm" in r]) == 1
    assert run.steps[-1] < 13, "capturing went on"
    assert all("norm-mismatch" in run.ledger.row(step)["flags"] for step in run.steps)
    assert run.steps[-1] >= CHECKED_CAPTURES


def test_a_right_norm_raises_no_alarm(tmp_path: Path) -> None:
    """The twin: with the engine's norm equal to ours nothing is said and nothing is flagged."""
    job = Job(run=tmp_path / "r", world=2)
    stored = [i for i, p in enumerate(job.params) if p.stored]
    for step in range(1, 6):
        job.step(step, outcome=False)
        norm = np.sqrt(sum(np.square(job.gradient(i, step).astype(float)).sum() for i in stored))
        for recorder in job.recorders:
            recorder.outcome(step, StepOutcome(state="applied", norm_engine=float(norm)))
    job.close()
    run = gradtap.open(job.run)
    assert not job.reports and list(run.steps) == [1, 2, 3, 4, 5]
    assert np.allclose(run.ledger["norm"], run.ledger["norm_engine"])


def test_late_facts_read_unknown_until_they_are_written(tmp_path: Path) -> None:
    """Whether the last step was applied is not known before the next boundary, and does not read as a value."""
    job = Job(run=tmp_path / "r", world=1)
    job.step(1, outcome=False)
    job.flush()
    job.wait_published(1)
    row = gradtap.open(job.run).ledger.row(1)
    assert row["state"] == "unknown" and np.isnan(row["clip_coef"])
    job.recorders[0].outcome(1, StepOutcome(state="skipped-overflow"))
    job.close()
    assert gradtap.open(job.run).ledger.row(1)["state"] == "skipped-overflow"


def test_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    """A session of another model is refused by name; run.json and the sessions stay as they were."""
    job = Job(run=tmp_path / "r").steps([1])
    job.close()
    before = read_run(job.run)
    with pytest.raises(OtherModelError, match="embed.weight"):
        Job(run=tmp_path / "r", params=(spec("embed.weight", 3, 3), *MODEL[1:]))
    assert read_run(job.run) == before
    assert sorted(p.name for p in (job.run / "sessions").iterdir()) == ["0000"]


def test_a_second_session_adds_an_attempt(tmp_path: Path) -> None:
    """The same steps again are a new attempt; the first one stays readable."""
    Job(run=tmp_path / "r", seed=1).steps([1, 2, 3]).close()
    again = Job(run=tmp_path / "r", seed=2, world=2).steps([2, 3, 4])
    again.close()
    run = gradtap.open(tmp_path / "r")
    assert list(run.steps) == [1, 2, 3, 4]
    assert np.array_equal(np.asarray(run.grad("mlp.bias", 2)), again.expected("mlp.bias", 2))
    first = run.grad("mlp.bias", 2, attempt=1)
    assert first.attempts == (1,) and not np.array_equal(np.asarray(first), np.asarray(run.grad("mlp.bias", 2)))


def test_steps_that_are_not_captured_have_a_ledger_row(tmp_path: Path) -> None:
    """With every=3 the ledger still has a row for each step."""
    job = Job(run=tmp_path / "r", world=1, every=3)
    recorder = job.recorders[0]
    for step in range(1, 7):
        if step % 3 == 0:
            job.step(step)
            continue
        recorder.begin(job._facts(step, (), {}), capture=False)
        recorder.end(step)
    job.close()
    assert list(group_of(job)["_ledger/step"][:]) == [1, 2, 3, 4, 5, 6]
    assert list(group_of(job)["_ledger/capture"][:]) == [-1, -1, 0, -1, -1, 1]
    assert list(gradtap.open(job.run).steps) == [3, 6]


def test_a_journal_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    """A second recorder of the same rank in one session is refused."""
    job = Job(run=tmp_path / "r", world=1).steps([1])
    with pytest.raises(gradtap.StoreError):
        RankRecorder(job.paths, 0, rule=StepsRule(()), settings=SMALL, report=print)
    job.close()
    assert list(gradtap.open(job.run).steps) == [1]


def test_a_follower_that_fell_behind_publishes_everything_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows wait, the merged ledger of a closed session has them all, late fields too."""
    monkeypatch.setattr("gradtap.store.publisher.BATCH", 3)
    job = Job(run=tmp_path / "r", world=2, settings=NEVER).steps(range(1, 12))
    job.close()
    group = group_of(job)
    assert list(group["_ledger/step"][:]) == list(range(1, 12))
    assert list(group["_ledger/state"][:]) == [1] * 11
    assert np.isfinite(group["_ledger/norm"][:]).all()


def test_a_rank_that_falls_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that wait for one rank are said once, with the rank."""
    monkeypatch.setattr("gradtap.store.publisher.LAG", 5)
    job = Job(run=tmp_path / "r", settings=replace(SMALL, close_timeout=0.2)).steps([1, 2])
    job.steps(range(3, 13), absent=[1])
    job.flush()
    deadline = time.monotonic() + 20
    while not any("rank 1 journaled" in report for report in job.reports):
        assert time.monotonic() < deadline, job.reports
        time.sleep(0.01)
    job.close()
    assert len([r for r in job.reports if "journaled nothing" in r]) == 1
    assert list(gradtap.open(job.run).steps) == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for buffers is told when the background thread ends, even by what no handler catches."""
    job = Job(run=tmp_path / "r", world=1)
    heard: list[str] = []
    job.recorders[0]._on_end = heard.append

    class Fatal(BaseException):
        """Not an Exception: no handler of the recorder's takes it."""

    def die(*args: Any) -> None:
        raise Fatal("gone")

    monkeypatch.setattr(ChunkWriter, "write", die)
    job.step(1)
    job.recorders[0]._thread.join(20)
    assert heard and "gone" in heard[0]
    follower = job.recorders[0]._follower
    assert follower is not None
    follower._stop.set()
    follower._thread.join()


def test_a_ledger_row_that_fails_is_a_hole_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture is journaled as failed, and the merged ledger goes on after the hole."""
    original, failed = RankRows.write_ledger, []

    def failing(self: RankRows, row: int, values: Any) -> None:
        if row == 2 and self._rank == 1 and "step" in values:
            failed.append(row)
            raise OSError("one bad moment")
        original(self, row, values)

    monkeypatch.setattr(RankRows, "write_ledger", failing)
    job = Job(run=tmp_path / "r", world=2).steps(range(1, 9))
    job.close()
    assert failed == [2] and len(job.reports) == 1
    group = group_of(job)
    assert list(group["_ledger/step"][:]) == [1, 2, 3, 4, 5, 6, 7, 8], "rank 0's row is there"
    assert list(group["_step"][:]) == [1, 2, -1, 4, 5, 6, 7, 8]
    assert list(group["_ledger/state"][:]) == [1] * 8
    with JournalReader(job.paths.journal(1)) as journal:
        head = journal.head(2)
    assert head is not None and head.state == "failed"


def test_a_row_that_no_rank_wrote_does_not_stop_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole on every rank reads as no row; the rows after it are merged."""
    original = RankRows.write_ledger

    def failing(self: RankRows, row: int, values: Any) -> None:
        if row in (0, 2) and "step" in values:
            raise OSError("one bad moment")
        original(self, row, values)

    monkeypatch.setattr(RankRows, "write_ledger", failing)
    job = Job(run=tmp_path / "r", world=2).steps(range(1, 7))
    job.close()
    assert list(group_of(job)["_ledger/step"][:]) == [-1, 2, -1, 4, 5, 6]
    assert list(gradtap.open(job.run).steps) == [2, 4, 5, 6]


def test_a_shard_that_cannot_be_sealed_costs_no_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing is for other readers: when it fails that is said once, and every capture is committed."""

    def fail(self: Any) -> None:
        raise StoreError("cannot seal")

    monkeypatch.setattr("gradtap.store.shard.ShardFile.seal", fail)
    job = Job(run=tmp_path / "r", world=2).steps(range(1, 13))
    job.close()
    run = gradtap.open(job.run)
    assert list(run.steps) == list(range(1, 13)) and run.sessions[0].state == "closed"
    assert np.array_equal(np.asarray(run.grad("mlp.weight", 12)), job.expected("mlp.weight", 12))
    assert 1 <= len([r for r in job.reports if "cannot seal" in r]) <= 2 * len(job.recorders)


def test_the_lock_is_kept_while_rank_0_waits_for_others(tmp_path: Path) -> None:
    """Closing may take long where other ranks still write: the lock's heartbeat goes on, and captures appear."""
    settings = replace(SMALL, heartbeat=0.05, close_timeout=10.0)
    job = Job(run=tmp_path / "r", world=2, settings=settings).steps([1])
    job.flush()
    closing = threading.Thread(target=job.recorders[0].close, args=(10.0,))
    closing.start()
    before = read_lock(job.run)
    time.sleep(0.4)
    after = read_lock(job.run)
    assert before is not None and after is not None and after.heartbeat > before.heartbeat
    job.recorders[1].close(1)
    closing.join(20)
    assert gradtap.open(job.run).sessions[0].state == "closed"


def test_the_norm_of_a_selection_is_that_of_what_was_captured(tmp_path: Path) -> None:
    """Parameters left out do not make it NaN, and it is not compared with the engine's."""
    job = Job(run=tmp_path / "r", world=2)
    for step in (1, 2):
        job.step(step, select={"mlp.bias", "conv.weight"}, outcome=False)
        for recorder in job.recorders:
            recorder.outcome(step, StepOutcome(state="applied", norm_engine=99.0))
    job.close()
    parts = [job.expected(name, 1).ravel() for name in ("mlp.bias", "conv.weight")]
    norms = group_of(job)["_ledger/norm"][:]
    assert norms[0] == pytest.approx(np.linalg.norm(np.concatenate(parts)), rel=1e-6)
    assert not job.reports


def test_untouched_is_what_all_ranks_together_say(tmp_path: Path) -> None:
    """A parameter that another rank's backward reached is not untouched, whatever one rank saw."""
    job = Job(run=tmp_path / "r", world=2)
    for step, blind in ((1, (0,)), (2, (0, 1))):
        for rank, recorder in enumerate(job.recorders):
            unseen = ("mlp.bias",) if rank in blind else ()
            recorder.begin(job._facts(step, unseen, {}), capture=False)
            recorder.end(step)
    job.close()
    flags = group_of(job)["_ledger/flags"][:]
    assert [bool(int(f) & UNTOUCHED) for f in flags] == [False, True]


def test_a_changed_number_of_groups_fits_the_ledger(tmp_path: Path) -> None:
    """Learning rates of later groups are left out, of missing ones unknown; the row is there."""
    job = Job(run=tmp_path / "r", world=1, groups=2)
    job.step(1, learning_rates=(0.1, 0.2, 0.3))
    job.step(2, learning_rates=(0.1,))
    job.close()
    rates = group_of(job)["_ledger/learning_rate"][:]
    assert rates[0].tolist() == [0.1, 0.2] and rates[1][0] == 0.1 and np.isnan(rates[1][1])
    assert list(gradtap.open(job.run).steps) == [1, 2]


def test_recording_goes_on_when_a_full_disk_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the disk was full when a new shard file was due: once there is room, captures are whole again."""
    original = ShardFile.create.__func__
    full: list[bool] = []

    def create(cls: Any, path: Path, **shape: Any) -> ShardFile:
        if full and full[0] and "_" not in path.parent.name:
            raise StoreError(errno.ENOSPC, "No space left on device")
        return original(cls, path, **shape)

    monkeypatch.setattr(ShardFile, "create", classmethod(create))
    job = Job(run=tmp_path / "r", world=2).steps(range(1, 4))
    job.flush()
    full[:] = [True]
    job.steps(range(4, 11))
    job.flush()
    full[:] = [False]
    job.steps(range(11, 15)).close()
    run = gradtap.open(job.run)
    assert list(run.steps) == [1, 2, 3, 4, 11, 12, 13, 14]
    assert np.array_equal(np.asarray(run.grad("mlp.weight", 12)), job.expected("mlp.weight", 12))
    assert all("No space left" in report for report in job.reports)
