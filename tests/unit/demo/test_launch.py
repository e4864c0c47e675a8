from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from gradtap.cli.app import main
from gradtap.demo import launch
from gradtap.demo.launch import Watcher, need, run_check, run_demo
from gradtap.demo.options import Options
from gradtap.errors import CaptureError, LockedError, MissingExtraError, NotARunError, StoreError, problem_of
from gradtap.store.lock import RunLock


def test_the_parent_imports_no_engine() -> None:
    """launch, report, options, data and processes load without torch, accelerate or deepspeed."""
    modules = ", ".join(f"gradtap.demo.{name}" for name in ("launch", "report", "options", "data", "processes"))
    code = f"import sys, {modules}; print(sorted({{'torch', 'accelerate', 'deepspeed'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 8, the package and the command; engines that do not need it are not refused."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name))
    with pytest.raises(MissingExtraError, match=r"deepspeed.*pip install 'gradtap\[demo\]'") as caught:
        run_demo(Options())
    assert problem_of(caught.value).exit_code == 8
    need("ddp")


def test_a_training_that_fails_leaves_with_code_10_and_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole verb, with a training that falls over at once."""
    (tmp_path / "fake_broken.py").write_text("raise SystemExit('no luck today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launch, "TRAIN", "fake_broken")
    with pytest.raises(CaptureError, match="no luck today") as caught:
        run_demo(Options(store=str(tmp_path / "run.gradtap")))
    assert problem_of(caught.value).exit_code == 10


def test_a_training_that_captures_nothing_leaves_with_code_10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending well without a new session is no success."""
    (tmp_path / "fake_idle.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launch, "TRAIN", "fake_idle")
    monkeypatch.setattr(launch, "run_check", lambda work: {"held": True, "steps": []})
    with pytest.raises(CaptureError, match="no new session") as caught:
        run_demo(Options(store=str(tmp_path / "run.gradtap")))
    assert problem_of(caught.value).exit_code == 10


def test_a_check_that_falls_over_does_not_hold_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the checking process is a failed check, with its last words."""
    (tmp_path / "fake_check.py").write_text("raise SystemExit('cannot read it')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    result = run_check(tmp_path, "fake_check")
    assert result["held"] is False
    assert "cannot read it" in result["problem"]


def test_events_are_followed_line_by_line(tmp_path: Path) -> None:
    """A line that is still being written is left for the next look."""
    path = tmp_path / "events.jsonl"
    with Progress(console=Console(file=io.StringIO())) as bar:
        watch = Watcher(path, bar, 2)
        watch.poll()
        lines = [{"event": "attached", "device": "cpu"}, {"event": "step", "step": 1, "loss": 5.0}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "st')
        watch.poll()
        assert watch.facts["step"] == 1
        with path.open("a") as file:
            file.write('ep", "step": 2, "loss": 4.0}\n')
        watch.poll()
        assert bar.tasks[0].completed == 2
    assert watch.facts == {"device": "cpu", "step": 2, "first_loss": 5.0, "loss": 4.0}


@pytest.mark.parametrize("store", ["/dev/full", "/dev/full/x"])
def test_a_store_that_cannot_be_a_folder(store: str) -> None:
    """Exit code 3 with the reason, before any process is started."""
    with pytest.raises(StoreError, match="is a file") as caught:
        run_demo(Options(store=store))
    assert problem_of(caught.value).exit_code == 3


def test_a_folder_of_other_things(tmp_path: Path) -> None:
    """A folder that holds no run but other files is refused and left as it is."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(NotARunError, match=r"thesis\.tex"):
        run_demo(Options(store=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_store_that_another_job_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A locked run is exit code 9, and the message names who holds it."""
    store = tmp_path / "run.gradtap"
    store.mkdir()
    lock = RunLock.acquire(store, "0" * 32, stale_after=60)
    assert main(["demo", "--store", str(store)]) == 9
    assert f"process {os.getpid()}" in capsys.readouterr().err
    with pytest.raises(LockedError) as caught:
        RunLock.acquire(store, "1" * 32, stale_after=60)
    assert problem_of(caught.value).exit_code == 9
    lock.release()
