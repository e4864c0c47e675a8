"""Rows that lie where others belong: every byte of them is sound, and they are found all the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gradtap.encode.checksum import with_crc
from gradtap.encode.summary import summarize
from gradtap.plan.schedule import ChangeEntry, parse_rule
from gradtap.read import verify
from gradtap.read.verify_norms import norm_of
from gradtap.store.schedule_log import append_entry, read_schedule
from tests.support.synthetic import Job

GROUP = Path("sessions/0000/gradients.zarr")


def swap(run: Path, one: str, other: str) -> None:
    """Exchange two files or folders of the first session's group."""
    a, b, aside = run / GROUP / one, run / GROUP / other, run / GROUP / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


SWAPS = [
    ("_ledger/factor/c.0", "_ledger/divisor/c.0", "_ledger/factor/c.0", "factor"),
    ("_ledger/k/c.0", "_ledger/micro_seen/c.0", "_ledger/micro_seen/c.0", "micro_seen"),
    ("_ledger/flags/c.0", "_ledger/raw_bytes/c.0", "_ledger/flags/c.0", "flags"),
    ("_ledger/step/c.0", "_ledger/capture/c.0", "_ledger/capture/c.0", "capture"),
    ("_ledger/step", "_ledger/capture", "_ledger/capture/c.0", "capture"),
    ("_ledger/time/c.0", "_ledger/time/c.1", "_ledger/time/c.0", "time"),
    ("_ledger/r00001/raw_bytes/c.0", "_ledger/r00001/stored_bytes/c.0", "_ledger/raw_bytes/c.0", "raw_bytes"),
    ("_summary/l2", "_summary/l1", "_summary/l2/c.0.0", "l2"),
    ("_summary/l2/c.0.0", "_summary/l2/c.1.0", "_summary/l2/c.0.0", "l2"),
    ("_summary/hist/c.0.0.0", "_summary/hist/c.1.0.0", "_summary/hist/c.0.0.0", "hist"),
    ("_summary/mean/c.0.0", "_summary/std/c.0.0", "_summary/mean/c.0.0", "mean"),
    ("_ledger/norm/c.0", "_ledger/norm/c.1", "_ledger/norm/c.0", "norm"),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run whose job was killed after all of it was published."""
    job = Job(run=tmp_path_factory.mktemp("killed") / "run.gradtap").steps(range(1, 10))
    job.flush()
    job.wait_published(9)
    job.kill()
    return job


@pytest.mark.parametrize("ended", ["closed", "killed"])
@pytest.mark.parametrize(("one", "other", "file", "field"), SWAPS)
def test_swapped_rows(
    one: str,
    other: str,
    file: str,
    field: str,
    ended: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Rows exchanged with others of the same shape are found, with file, field and step; the twin is sound."""
    job: Job = request.getfixturevalue(ended)
    run = Path(shutil.copytree(job.run, tmp_path / "copy.gradtap"))
    assert verify(run).sound
    swap(run, one, other)
    findings = verify(run).findings
    said = [f for f in findings if f.file == str(GROUP / file) and f.what.startswith(field)]
    assert said, findings
    assert said[0].step is not None


def test_times_of_captures(copy: Path) -> None:
    """`_time` is compared with the journals."""
    file = copy / GROUP / "_time/c.0"
    body = np.frombuffer(file.read_bytes()[:-4], "<f8").copy()
    body[2] += 1.0
    file.write_bytes(with_crc(body.tobytes())[0])
    (finding,) = verify(copy).findings
    assert (finding.file, finding.step) == (str(GROUP / "_time/c.0"), 3)


def test_norms_of_the_gradients_themselves(copy: Path) -> None:
    """Summaries exchanged in the merged rows and in those of all ranks are found by the deep check alone."""
    for place in ("_summary", *(f"_summary/r{rank:05d}" for rank in range(3))):
        swap(copy, f"{place}/l2/c.0.0", f"{place}/l2/c.1.0")
    swap(copy, "_ledger/norm/c.0", "_ledger/norm/c.1")
    assert not [f for f in verify(copy).findings if "_summary/l2" in f.file]
    said = [f for f in verify(copy, deep=True).findings if "the gradient itself" in f.what]
    assert (said[0].file, said[0].param, said[0].step) == (str(GROUP / "_summary/l2/c.0.0"), "embed.weight", 1)


def test_a_partial_selection_and_odd_dtypes_are_sound(tmp_path: Path) -> None:
    """A deep check of captures of some parameters, scaled ones, and of a dropped one finds nothing."""
    job = Job(run=tmp_path / "r", k=3).steps([1, 2])
    job.step(3, select=["mlp.weight"])
    job.step(4, dropped=[1])
    job.step(5, untouched=["mlp.bias"])
    job.close()
    report = verify(job.run, deep=True)
    assert report.sound, report.findings


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [3.0, -4.0], [1e300, 1e300], [1e-310, 0.0], [np.inf, 1.0]])
def test_norms_without_overflow(values: list[float]) -> None:
    """The norm of a chunk is the one that the writer's summary has, for huge, tiny and infinite values too."""
    given = np.array(values)
    assert norm_of(given) == pytest.approx(summarize(given, "basic").l2, rel=1e-12)


def test_norm_of_nan() -> None:
    """A NaN makes the norm of its chunk NaN."""
    assert np.isnan(norm_of(np.array([1.0, np.nan, np.inf])))


def test_a_lost_schedule(copy: Path) -> None:
    """A schedule.log that is gone, or empty, is damage whose cure says where the steps still are."""
    log = copy / "sessions/0000/schedule.log"
    assert read_schedule(log) is not None
    for harm in (lambda: log.write_bytes(b""), log.unlink):
        harm()
        (finding,) = verify(copy).findings
        assert finding.file == "sessions/0000/schedule.log"
        assert "9 captures, steps 1 to 9" in finding.what
        assert "the steps are in the journals" in finding.cure


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    """A session that has not begun a step lacks a schedule rightly."""
    job = Job(run=tmp_path / "r")
    job.flush()
    report = verify(job.run)
    assert report.sound, report.findings
    assert any("no step has been recorded yet" in note.what for note in report.notes)
    job.close()


def test_an_unlisted_session_with_captures(copy: Path) -> None:
    """A session that run.json lacks is damage where it holds captures, counted, and is never called deletable."""
    shutil.copytree(copy / "sessions/0000", copy / "sessions/0007")
    (finding,) = verify(copy).findings
    assert finding.file == "sessions/0007"
    assert "9 committed captures" in finding.what
    assert "delete" not in finding.cure and "attaching again" in finding.cure


def test_an_unlisted_session_whose_journal_is_damaged(copy: Path) -> None:
    """What cannot be counted is not taken for nothing."""
    shutil.copytree(copy / "sessions/0000", copy / "sessions/0007")
    (copy / "sessions/0007/journal/r00001").write_bytes(b"x" * 500)
    (finding,) = verify(copy).findings
    assert "do not read" in finding.what and "keep it" in finding.cure


def test_a_first_step_beyond_all_numbers(tmp_path: Path) -> None:
    """A schedule that begins at no possible step is damage, not an overflow."""
    job = Job(run=tmp_path / "r")
    append_entry(job.paths.schedule_log, ChangeEntry(from_step=10**30, rule=parse_rule(1), select=None))
    (finding,) = verify(job.run).findings
    assert finding.file == "sessions/0000/schedule.log"
    assert "no step to begin with" in finding.what
    job.close()
