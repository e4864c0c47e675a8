"""`gradtap audit`: tables, forms for programs, exit codes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from gradtap.cli.app import main
from tests.support.synthetic import Job


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose counts of accumulation differ, among others in its folder."""
    job = Job(run=tmp_path_factory.mktemp("runs") / "faulty.gradtap", world=1, engine="deepspeed-zero2")
    job.steps([1, 2, 3], accum_engine=4, divisor=4.0, micro_seen=4).close()
    Job(run=job.run.parent / "sound.gradtap", world=1).steps([1, 2]).close()
    return job.run


def test_a_finding_is_told_with_cause_and_cure(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has code, severity and steps; below it evidence, cause and cure; the exit code is 1."""
    assert main(["audit", str(faulty)]) == 1
    out = capsys.readouterr().out
    assert "accumulation-mismatch  error" in out
    assert "accum_engine 4, accum_loop 2" in out and "cause: " in out and "cure: give both the same count" in out


def test_a_sound_run_is_silent(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No finding, exit code 0, and on stderr what could not be judged."""
    assert main(["audit", str(faulty.parent), "--run", "sound"]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == "no finding in 2 steps"
    assert "not judged in full: rank-disagreement" in told.err


def test_forms_for_programs(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON, a line a finding, and CSV have the same finding, each with exit code 1."""
    assert main(["audit", str(faulty), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert main(["audit", str(faulty), "--jsonl"]) == 1
    assert json.loads(capsys.readouterr().out) == finding
    assert main(["audit", str(faulty), "--csv"]) == 1
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["code"], row["count"], json.loads(row["evidence"])) == (finding["code"], "3", finding["evidence"])


def test_other_errors_keep_their_codes(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding is told from a run that is not there, or that must be chosen."""
    assert main(["audit", str(faulty.parent)]) == 2
    assert main(["audit", str(faulty.parent), "--run", "fauty"]) == 4
    assert main(["audit", str(faulty.parent / "none")]) == 3
    assert capsys.readouterr().out == ""
