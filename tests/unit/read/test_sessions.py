"""Runs of which one session does not read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import gradtap
from gradtap.cli.app import main
from gradtap.read import open_run, verify
from tests.support.synthetic import NEVER, Job


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    """Two killed sessions of one run: steps 1 to 3, then 3 to 5."""
    made = []
    for seed, steps in ((1, [1, 2, 3]), (2, [3, 4, 5])):
        job = Job(run=tmp_path / "r", world=2, seed=seed, settings=NEVER).steps(steps)
        job.kill()
        made.append(job)
    return made


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("text", ["{", None])
def test_the_others_are_served(jobs: list[Job], lost: int, text: str | None) -> None:
    """The steps of a session that does not read are absent, those of the other are served, and it is named."""
    file = jobs[lost].paths.session_json
    whole = file.read_text()
    file.unlink()
    if text is not None:
        file.write_text(text)
    run = open_run(jobs[0].run)
    assert run.steps == ((3, 4, 5), (1, 2, 3))[lost]
    kept = jobs[1 - lost]
    np.testing.assert_array_equal(run.grad("mlp.bias", 3).values, kept.expected("mlp.bias", 3))
    assert tuple(s.state for s in run.sessions) == [("damaged", "unclosed"), ("unclosed", "damaged")][lost]
    assert str(file) in str(run.sessions[lost].error)
    assert list(run.damaged) == [f"000{lost}"]
    assert [f.file for f in verify(run.path).findings] == [f"sessions/000{lost}/session.json"]
    file.write_text(whole)
    assert run.steps == (1, 2, 3, 4, 5)
    assert run.damaged == {}


def test_none_reads(jobs: list[Job]) -> None:
    """A run of which no session reads is an error."""
    for job in jobs:
        job.paths.session_json.write_text("{")
    with pytest.raises(gradtap.DamagedError, match="none of the sessions 0000, 0001"):
        open_run(jobs[0].run)


def test_a_newer_session_refuses_the_run(jobs: list[Job]) -> None:
    """Where a newer gradtap went on with a run, older attempts must not pass for the current ones."""
    file = jobs[1].paths.session_json
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    with pytest.raises(gradtap.FormatVersionError, match="format 2"):
        open_run(jobs[0].run)


def test_the_command_line_says_so(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb names the damaged session on stderr, `info` also in its answer; `verify` ends with 5."""
    jobs[1].paths.session_json.write_text("{")
    run = str(jobs[0].run)
    for words in (["info", run], ["ls", run], ["steps", run], ["show", run, "3", "mlp.bias"]):
        assert main(words) == 0
        assert "DAMAGED: session 0001" in capsys.readouterr().err
    main(["info", run])
    assert "DAMAGED session 0001" in capsys.readouterr().out
    main(["info", run, "--json"])
    body = json.loads(capsys.readouterr().out)
    assert list(body["damaged"]) == ["0001"]
    assert body["state"] == "damaged"
    assert body["engine"] == "synthetic"
    assert main(["verify", run]) == 5
