from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradtap.demo.report import next_commands, show_report
from tests.support.synthetic import Job

STEP = {"step": 1, "parameters": 2, "missing": [], "unexpected": [], "largest_error": 2e-7, "largest_name": "a[0]"}
REPORT: dict[str, Any] = {
    "store": "runs/[red]x.gradtap",
    "session": "0000",
    "engine": "deepspeed",
    "stage": 2,
    "processes": 2,
    "device": "cpu",
    "loss": {"first": 5.5, "last": None},
    "steps": {"asked": 2, "captured": 2, "first": 1, "last": 2},
    "parameters": {"stored": 2, "elements": 1234567, "frozen": ["p"], "tied": {"a": ["b"]}},
    "bytes": {"raw": 3 * 2**20, "stored": 2 * 2**20, "ratio": 1.5, "files": 9},
    "norms": {"params": ["a", "c"], "steps": [1, 2], "l2": [[1.0, 2.0], [0.1, float("nan")]]},
    "seconds": {"train": 9.0, "check": 1.0},
    "check": {"held": True, "tolerance": 1e-4, "steps": [STEP]},
    "warnings": ["gradtap: slow disk"],
    "next": ["gradtap info 'runs/[red]x.gradtap'"],
}


def _shown(report: dict[str, Any]) -> str:
    screen = Console(file=io.StringIO(), width=100)
    show_report(report, screen)
    return screen.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_report_shows_sizes_norms_check_and_commands() -> None:
    """Texts stand as they are, brackets included, for they are data and not markup."""
    text = _shown(REPORT)
    for part in (
        "runs/[red]x.gradtap",
        "2 of 2 steps",
        "1,234,567",
        "3.0 MiB",
        "1.50 to 1",
        "a = b",
        "gradtap: slow disk",
    ):
        assert part in text
    assert "check held" in text
    assert "2.0e-07 (a[0])" in text
    assert "gradtap info 'runs/[red]x.gradtap'" in text


@pytest.mark.parametrize(
    ("check", "part"),
    [
        ({"held": False, "steps": [], "problem": "the check ended with exit code 1:\nno such step"}, "no such step"),
        ({"held": False, "steps": [STEP | {"missing": ["c"]}]}, "missing: c"),
        ({"held": False, "steps": [STEP | {"largest_error": None, "parameters": 0}]}, "nothing to compare"),
    ],
)
def test_a_check_that_did_not_hold_says_why(check: dict[str, Any], part: str) -> None:
    """Never read as held, and the reason is there."""
    text = _shown(REPORT | {"check": check})
    assert "check did not hold" in text
    assert part in text


@pytest.mark.parametrize("ends", ["close", "kill"])
def test_the_proposed_zarr_command_prints_the_step(ends: str, tmp_path: Path) -> None:
    """The command names a capture that exists in a closed session and in one that nobody closed."""
    job = Job(run=tmp_path / "demo run.gradtap").steps(range(1, 6))
    job.flush()
    job.wait_published(5)
    getattr(job, ends)()
    command = next_commands(str(job.run), job.paths.root, 5)[-1]
    inner = shlex.split(command)[2]
    done = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True, check=True)
    assert "nan" not in done.stdout
    assert done.stdout.strip()
