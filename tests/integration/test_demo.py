"""The whole demo: its training, capture, check and report, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import gradtap
from gradtap.demo.check import check
from gradtap.demo.model import ByteTransformer
from gradtap.demo.options import Options
from gradtap.demo.processes import CAPACITY

STEPS = 5


@dataclass(frozen=True)
class Finished:
    """A demo that has ended, and the steps that a reader in this process saw before that."""

    store: Path
    code: int
    report: dict[str, Any]
    words: str
    seen: tuple[int, ...]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One run of the demo as it comes (DeepSpeed ZeRO-2, two processes), shared by the tests below."""
    return _demo(tmp_path_factory.mktemp("demo") / "runs" / "demo run.gradtap")


def _demo(store: Path, *more: str, steps: int = STEPS) -> Finished:
    command = [sys.executable, "-m", "gradtap", "demo", "--store", str(store), "--steps", str(steps), "--json", *more]
    seen: set[int] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        while True:
            try:
                out, err = child.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                seen |= _complete_steps(store)
    assert out, err
    return Finished(store, child.returncode, json.loads(out), err, tuple(sorted(seen)))


def _complete_steps(store: Path) -> set[int]:
    try:
        run = gradtap.open(store)
    except gradtap.StoreError:
        return set()
    steps = list(run.steps)
    for step in steps:
        assert run.grad("tokens.weight", step).complete
    return set(steps)


def test_the_check_of_the_demo_holds(finished: Finished) -> None:
    """Exit code 0: the first, middle and last step equal an independent computation, all 43 parameters of them."""
    assert finished.code == 0, finished.words
    result = finished.report["check"]
    assert [step["step"] for step in result["steps"]] == [1, 3, 5]
    assert all(step["held"] and step["parameters"] == 43 for step in result["steps"])


def test_the_demo_says_what_was_captured(finished: Finished) -> None:
    """Steps, parameters, bytes, files and norms, as one JSON object on standard output."""
    report = finished.report
    assert report["schema"] == "gradtap.demo/1"
    assert report["warnings"] == []
    assert report["steps"] == {"asked": STEPS, "captured": STEPS, "first": 1, "last": STEPS}
    assert report["parameters"]["frozen"] == ["positions.weight"]
    assert report["parameters"]["tied"] == {"tokens.weight": ["head.weight"]}
    assert report["bytes"]["raw"] == STEPS * 4 * report["parameters"]["elements"]
    assert 0 < report["bytes"]["stored"] < 2 * report["bytes"]["raw"]
    assert np.shape(report["norms"]["l2"]) == (43, STEPS)
    run = gradtap.open(finished.store)
    row = report["norms"]["params"].index("norm.weight")
    assert report["norms"]["l2"][row][2] == pytest.approx(np.linalg.norm(run.grad("norm.weight", 3)), rel=1e-6)


def test_a_reader_in_the_meantime_sees_complete_steps_only(finished: Finished) -> None:
    """Whatever another process saw on the way could be read whole, and is part of what there is at the end."""
    assert finished.seen
    assert set(finished.seen) <= set(range(1, STEPS + 1))


def test_every_command_that_the_demo_proposes_runs(finished: Finished) -> None:
    """With the real path, which here has a space in it."""
    commands = finished.report["next"]
    assert len(commands) == 7
    for command in commands:
        line = command.replace("gradtap ", f"{sys.executable} -m gradtap ", 1) if command[0] == "g" else command
        line = line.replace("python -c", f"{sys.executable} -c", 1)
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout.strip()


def test_the_check_finds_gradients_that_are_not_those_of_the_model(finished: Finished, tmp_path: Path) -> None:
    """Against parameters of another seed no step holds."""
    for step in (1, 3, 5):
        torch.save(ByteTransformer(1).state_dict(), tmp_path / f"before-{step}.pt")
    result = check(Options(store=str(finished.store), steps=STEPS), tmp_path)
    assert not result["held"]
    assert not any(step["held"] for step in result["steps"])


def test_a_second_demo_into_the_same_store_is_a_new_session(finished: Finished) -> None:
    """Another engine, the same model: steps 1 on become attempt 2, and nothing of the first is touched."""
    first = finished.store / "sessions" / "0000" / "gradients.zarr"
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    again = _demo(finished.store, "--engine", "ddp")
    assert again.code == 0, again.words
    assert again.report["session"] == "0001"
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert gradtap.open(finished.store).grad("norm.weight", 3).attempts == (2,)
    kept: Any = zarr.open_group(first, mode="r")["norm.weight"]
    assert kept.shape == (STEPS, 256)


def test_a_demo_longer_than_one_shard_window(tmp_path: Path) -> None:
    """70 steps, more than axis 0 and a shard file hold at first: it grows, is trimmed at close, and the check holds."""
    steps, store = CAPACITY + 6, tmp_path / "long.gradtap"
    done = _demo(store, "--engine", "torch", "--processes", "1", steps=steps)
    assert done.code == 0, done.words
    assert done.report["warnings"] == []
    assert done.report["steps"] == {"asked": steps, "captured": steps, "first": 1, "last": steps}
    checked = done.report["check"]["steps"]
    assert [step["step"] for step in checked] == [1, (steps + 1) // 2, steps] and all(step["held"] for step in checked)
    folder = store / "sessions" / "0000" / "gradients.zarr"
    array: Any = zarr.open_group(folder, mode="r")["norm.weight"]
    assert array.shape == (steps, 256) and array.shards == (CAPACITY, 256)
    assert sorted(path.name for path in (folder / "norm.weight").iterdir() if path.name != "zarr.json") == [
        "c.0.0",
        "c.1.0",
    ]
    stacked = np.asarray(gradtap.open(store).grad("norm.weight", steps=range(1, steps + 1)))
    assert np.array_equal(stacked, array[:]) and stacked.any(axis=1).all()
