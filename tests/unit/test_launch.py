"""The launcher that the tests of engines rest on: results, failures and hangs are told, and nobody outlives it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import LaunchError, launch, outputs


def ranks(args: dict[str, Any], folder: Path) -> list[int]:
    """What a launched process is told."""
    return [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args["number"]]


def fail_one(args: dict[str, Any], folder: Path) -> None:
    """Rank 1 fails, rank 0 would wait."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has failed")
    time.sleep(60)


def hang(args: dict[str, Any], folder: Path) -> None:
    """Nobody ends."""
    (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(60)


def test_results_come_by_rank(tmp_path: Path) -> None:
    """Each process knows its rank and the arguments, and its result comes back in rank's place."""
    assert launch(f"{__name__}:ranks", processes=3, folder=tmp_path, args={"number": 7}) == [
        [0, 3, 7],
        [1, 3, 7],
        [2, 3, 7],
    ]


def test_a_failure_is_told_with_its_output(tmp_path: Path) -> None:
    """One failing process ends the launch, with its traceback, without waiting for the others' own end."""
    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 has failed"):
        launch(f"{__name__}:fail_one", processes=2, folder=tmp_path)
    assert time.monotonic() - start < 30


def test_a_hang_is_ended_with_stacks(tmp_path: Path) -> None:
    """When time is up every process leaves its stack in its log and is gone."""
    with pytest.raises(LaunchError, match=r"not ended after 4 s: processes \[0, 1\]"):
        launch(f"{__name__}:hang", processes=2, folder=tmp_path, timeout=4)
    assert "in hang" in outputs(tmp_path, 2)
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
