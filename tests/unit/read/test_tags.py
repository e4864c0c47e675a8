"""What a training logged with its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradtap
from gradtap.cli.app import main
from gradtap.read import open_run, verify
from tests.support.synthetic import NEVER, Job


def job_at(path: Path) -> Job:
    """Three steps of two ranks, tagged in several calls."""
    job = Job(run=path, world=2, settings=NEVER).steps([1, 2, 3])
    job.recorders[0].tags(2, {"loss": 0.5, "ids": [1, 2]})
    job.recorders[1].tags(2, {"loss": 9.0, "rank": 1})
    job.recorders[0].tags(2, {"loss": 0.25})
    job.recorders[0].tags(3, {"note": {"a": "b"}})
    job.flush()
    return job


def test_tags_are_merged(tmp_path: Path) -> None:
    """The latest value of a name counts, over ranks that of the lowest; a step without tags has none."""
    job = job_at(tmp_path / "r")
    run = open_run(job.run)
    assert run.tags_of(2) == {"loss": 0.25, "ids": [1, 2], "rank": 1}
    assert run.tags_of(1) == {}
    job.recorders[1].tags(1, {"late": True})
    job.flush()
    assert run.tags_of(1) == {"late": True}
    with pytest.raises(gradtap.StepNotFoundError, match="7"):
        run.tags_of(7)
    with pytest.raises(gradtap.UsageError):
        run.tags_of("2")  # type: ignore[arg-type]
    job.kill()


def test_tags_are_those_of_the_attempt_in_force(tmp_path: Path) -> None:
    """A step recorded again has the tags of the newer session alone; one that was dropped there those of the older."""
    job_at(tmp_path / "r").kill()
    again = Job(run=tmp_path / "r", world=2, settings=NEVER)
    again.step(2)
    again.step(3, dropped=[0])
    again.recorders[0].tags(2, {"again": 1})
    again.recorders[0].tags(3, {"again": 2})
    again.kill()
    run = open_run(tmp_path / "r")
    assert run.tags_of(2) == {"again": 1}
    assert run.tags_of(3) == {"note": {"a": "b"}}


def test_torn_and_damaged_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A last line without its end is still being written; a damaged one is an error, a note, and a word on stderr."""
    job = job_at(tmp_path / "r")
    job.kill()
    file = job.paths.tags(0)
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 1, "ta')
    assert open_run(job.run).tags_of(1) == {}
    assert not [note for note in verify(job.run).notes if "tags" in note.file]
    file.write_bytes(whole + b"\x00\x01\n" + whole)
    with pytest.raises(gradtap.DamagedError, match="line 4"):
        open_run(job.run).tags_of(1)
    report = verify(job.run)
    assert report.sound, report.findings
    assert ["line 4" in note.what for note in report.notes if note.file == "sessions/0000/tags/r00000"] == [True]
    assert main(["show", str(job.run), "2", "mlp.bias"]) == 0
    assert "tags of step 2" in capsys.readouterr().err


def test_the_command_line_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` prints tags, `steps --json` has them for each step."""
    job = job_at(tmp_path / "r")
    job.kill()
    assert main(["show", str(job.run), "2", "mlp.bias"]) == 0
    assert "loss=0.25" in capsys.readouterr().out
    assert main(["show", str(job.run), "2", "mlp.bias", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tags"]["ids"] == [1, 2]
    assert main(["steps", str(job.run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [row["tags"] for row in rows] == [{}, {"loss": 0.25, "ids": [1, 2], "rank": 1}, {"note": {"a": "b"}}]
