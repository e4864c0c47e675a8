"""attach in one process on plain torch: what it accepts, what it refuses, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import gradtap
from gradtap.store.chunk_writer import ChunkWriter
from gradtap.store.lock import read_lock
from gradtap.store.runfile import read_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run crosses shard and growth boundaries."""
    for name, value in {"MAX_TIME": "4", "CAPACITY": "4", "FOLLOW_INTERVAL": "0.02"}.items():
        monkeypatch.setenv(f"GRADTAP_{name}", value)


class Training:
    """A linear model whose gradients are known: the loss is the sum of weight x step."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, width: int = 5) -> None:
        self.model = torch.nn.Linear(width, 3)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.done = 0

    @property
    def pair(self) -> tuple[Any, Any]:
        return self.model, self.optimizer

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.done += 1
            ((self.model.weight * self.done).sum() + self.model.bias.sum() * 2).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_one_line_records_every_step(tmp_path: Path) -> None:
    """The gradients of each step are in the store, and the loop needs nothing else."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(10)
    run = gradtap.open(tmp_path / "a.gradtap")
    assert list(run.steps) == list(range(1, 11))
    for step in run.steps:
        assert np.array_equal(np.asarray(run.grad("weight", step)), np.full((3, 5), step, np.float32))
    assert [run.ledger.row(step)["state"] for step in run.steps] == ["applied"] * 10


def test_close_leaves_nothing_behind(tmp_path: Path) -> None:
    """Hooks, patches and threads are those of before; closing twice is fine; training goes on unrecorded."""
    training = Training()
    training.steps(1)
    hooks = dict(training.optimizer._optimizer_step_pre_hooks), vars(training.optimizer).keys() - {"state"}
    threads = set(threading.enumerate())
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")
    training.steps(2)
    tap.close()
    tap.close()
    assert (dict(training.optimizer._optimizer_step_pre_hooks), vars(training.optimizer).keys() - {"state"}) == hooks
    assert set(threading.enumerate()) == threads
    training.steps(1)
    assert len(gradtap.open(tmp_path / "a.gradtap").steps) == 2
    assert read_lock(tmp_path / "a.gradtap") is None


SCRIPT = """
import torch, gradtap
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.AdamW(model.parameters())
tap = gradtap.attach((model, optimizer), {store!r})
for step in range(6):
    model.weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise ValueError('mine')", 1), ("raise SystemExit(3)", 3)])
def test_a_loop_that_forgets_close_ends_with_a_closed_run(tmp_path: Path, end: str, code: int) -> None:
    """Also where it ends with an error of its own, which stays the one that is seen."""
    script = SCRIPT.format(store=str(tmp_path / "a.gradtap"), end=end)
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "gradtap" in line.replace(str(tmp_path), "")]
    assert [line.split(",")[0].split(" into")[0] for line in said] == [
        "[gradtap] recording torch on 1 process",
        "[gradtap] 6 captures recorded",
    ]
    run = gradtap.open(tmp_path / "a.gradtap")
    assert list(run.steps) == [1, 2, 3, 4, 5, 6]
    assert run.sessions[0].state == "closed"


def test_a_finished_run_gets_a_new_session(tmp_path: Path) -> None:
    """The same command again adds a session; nothing is removed; the numbers start again where the optimizer does."""
    for _ in range(2):
        training = Training()
        with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
            training.steps(3)
    run = gradtap.open(tmp_path / "a.gradtap")
    assert read_run(tmp_path / "a.gradtap").sessions == ("0000", "0001")
    assert list(run.steps) == [1, 2, 3] and run.grad("weight", 1).attempts == (2,)
    assert run.grad("weight", 1, attempt=1).attempts == (1,)


def test_a_resumed_optimizer_goes_on_counting(tmp_path: Path) -> None:
    """A checkpoint loaded after attach is seen at the first boundary."""
    before = Training()
    before.steps(7)
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")
    training.optimizer.load_state_dict(before.optimizer.state_dict())
    training.steps(2)
    tap.close()
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [8, 9]


def test_first_step_names_the_step_of_an_optimizer_that_does_not_count(tmp_path: Path) -> None:
    """SGD keeps no count: 1, or what the user says."""
    for first, wanted in ((None, [1, 2]), (41, [41, 42])):
        training = Training(torch.optim.SGD)
        with gradtap.attach(training.pair, tmp_path / f"{first}.gradtap", first_step=first):
            training.steps(2)
        assert list(gradtap.open(tmp_path / f"{first}.gradtap").steps) == wanted


def test_every_and_select(tmp_path: Path) -> None:
    """Steps that are divisible by 3, weights only."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap", every=3, select=["*", "!bias"]):
        training.steps(10)
    run = gradtap.open(tmp_path / "a.gradtap")
    assert list(run.steps) == [3, 6, 9]
    assert np.array_equal(np.asarray(run.grad("weight", 6)), np.full((3, 5), 6, np.float32))
    with pytest.raises(gradtap.IncompleteError, match="bias"):
        run.grad("bias", 6)
    assert set(run.left_out()) == set(run.left_out(6)) == {"bias"}
    assert "weight" in repr(run.norms(["*", "!bias"])) and "10 steps" in repr(run.ledger)


def test_tags_go_to_the_step_of_their_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Between a first backward and its step: the step to come; after the step: the last one."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap") as tap:
        tap.log(when="before the first")
        training.steps(1)
        tap.log(loss=0.5)
        training.model.weight.sum().backward()
        tap.log(ids=torch.tensor([1, 2]), norm=np.float32(0.25))
        training.optimizer.step()
        tap.log(loss=torch.tensor(float("nan")), worst=-float("inf"))
        tap.log(bad=object())
        tap.log(bad=object())
    tap.log(late=1)
    lines = (tmp_path / "a.gradtap/sessions/0000/tags/r00000").read_text().splitlines()
    found = [(line["step"], line["tags"]) for line in map(json.loads, lines)]
    assert found == [
        (1, {"when": "before the first"}),
        (1, {"loss": 0.5}),
        (2, {"ids": [1, 2], "norm": 0.25}),
        (2, {"loss": "NaN", "worst": "-Infinity"}),
    ]
    assert caplog.text.count("a tag is") == 1, "a tag that cannot be kept does not stop training, and is said once"


@pytest.mark.parametrize(
    ("every", "wanted"),
    [("first 3", [900, 901, 902]), ("first 2, then every 4", [900, 901, 904]), (3, [900, 903]), ([1, 902], [902])],
)
def test_a_rule_begins_at_the_first_step(tmp_path: Path, every: Any, wanted: list[int]) -> None:
    """After a resume `first N` counts from the session's first step, from its very first capture on."""
    training = Training(torch.optim.SGD)
    with gradtap.attach(training.pair, tmp_path / "a.gradtap", every=every, first_step=900):
        training.steps(5)
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == wanted


@pytest.mark.parametrize("jump", [9, 100_000])
def test_an_engine_that_jumps_ahead(tmp_path: Path, jump: int, caplog: pytest.LogCaptureFixture) -> None:
    """A small jump leaves a hole in the ledger and no more; a large one is a checkpoint of another training."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")
    training.steps(2)
    source: Any = tap._source
    source._made = jump
    numbers = iter(range(jump + 1, jump + 10))
    source.next_step = lambda: next(numbers)
    training.steps(2)
    tap.close()
    run = gradtap.open(tmp_path / "a.gradtap")
    assert list(run.steps) == ([1, 2, 10, 11] if jump == 9 else [1, 2])
    merged = zarr.open_group(str(tmp_path / "a.gradtap/sessions/0000/gradients.zarr"), mode="r")["_ledger/step"][:]
    assert [step for step in merged if step >= 0] == list(run.steps)
    assert ("checkpoint" in caplog.text) == (jump != 9)


def test_an_engine_that_goes_back_stops_the_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint loaded in the middle would overwrite steps: recording stops, says so, and a new attach goes on."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")
    training.steps(2)
    source: Any = tap._source
    source._made = 0
    training.steps(2)
    tap.close()
    assert "checkpoint" in caplog.text and caplog.text.count("attach again") == 1
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2]


def test_a_failing_disk_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default the failure is said once and training goes on."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap")

    def broken(*args: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(ChunkWriter, "write", broken)
    training.steps(4)
    tap.close()
    assert caplog.text.count("no space") == 1
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == []


def test_on_error_raise_stops_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With on_error="raise" the failure comes up in the loop, at the latest at close."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap", on_error="raise")

    def broken(*args: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(ChunkWriter, "write", broken)
    with pytest.raises(gradtap.CaptureError, match="no space"):
        training.steps(1)
        time.sleep(0.2)
        training.steps(1)
        tap.close()
    with contextlib.suppress(gradtap.CaptureError):
        tap.close()
    assert read_lock(tmp_path / "a.gradtap") is None


def test_a_full_buffer_drops_whole_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """on_full="drop": while the disk is slow captures are dropped whole, and the ledger says which."""
    monkeypatch.setenv("GRADTAP_SLAB_BYTES", "2048")
    monkeypatch.setenv("GRADTAP_BUFFER_BYTES", "4096")
    original = ChunkWriter.write

    def slow(self: Any, *args: Any) -> None:
        time.sleep(0.05)
        original(self, *args)

    monkeypatch.setattr(ChunkWriter, "write", slow)
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap", on_full="drop"):
        training.steps(12)
    run = gradtap.open(tmp_path / "a.gradtap")
    assert 1 in run.steps and 0 < len(run.steps) < 12
    for step in run.steps:
        assert np.array_equal(np.asarray(run.grad("weight", step)), np.full((3, 5), step, np.float32))
    assert "dropped" in caplog.text


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("broken", ["lock", "publish", "outcome", "seal"])
def test_a_failure_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str, on_error: str
) -> None:
    """Whatever fails at close: the rest is still done, the script lives unless it asked otherwise, the run reads."""
    training = Training()
    tap = gradtap.attach(training.pair, tmp_path / "a.gradtap", on_error=on_error)
    training.steps(6)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("out of order")

    if broken == "lock":
        (tmp_path / "a.gradtap" / "lock").unlink()
    elif broken == "publish":
        monkeypatch.setattr("gradtap.store.publisher.write_group", fail)
    elif broken == "seal":
        monkeypatch.setattr("gradtap.store.shard.ShardFile.seal", fail)
    else:
        monkeypatch.setattr(tap._source, "outcome", fail)
    raises = pytest.raises(gradtap.CaptureError) if on_error == "raise" and broken != "publish" else nullcontext()
    with raises:
        tap.close()
    tap.close()
    assert on_error == "raise" or caplog.text
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2, 3, 4, 5, 6]
    assert broken == "lock" or read_lock(tmp_path / "a.gradtap") is None
    assert not [t for t in threading.enumerate() if t.name.startswith("gradtap")]
    assert not training.optimizer._optimizer_step_pre_hooks


def test_an_attach_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that cannot be installed: no session, lock, thread or open file stays."""
    training = Training()
    open_files = len(os.listdir("/proc/self/fd"))

    def fail(*args: Any) -> None:
        raise gradtap.AttachError("no hook")

    with monkeypatch.context() as patch:
        patch.setattr("gradtap.capture.torch_optimizer.TorchSource.install", fail)
        with pytest.raises(gradtap.AttachError, match="no hook"):
            gradtap.attach(training.pair, tmp_path / "a.gradtap")
    assert not (tmp_path / "a.gradtap").exists()
    assert not [t for t in threading.enumerate() if t.name.startswith("gradtap")]
    assert len(os.listdir("/proc/self/fd")) == open_files
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(1)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_parameter_group_added_later_does_not_end_recording(tmp_path: Path) -> None:
    """The parameters that were there go on being recorded; the new ones are not, which is said."""
    training = Training()
    extra = torch.nn.Parameter(torch.ones(3))
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(2)
        training.optimizer.add_param_group({"params": [extra], "lr": 0.5})
        training.steps(3)
    run = gradtap.open(tmp_path / "a.gradtap")
    assert list(run.steps) == [1, 2, 3, 4, 5]
    assert run.ledger["learning_rate"].shape == (5, 1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"codec": "exakt"}, "exact"),
        ({"summary": "most"}, "basic"),
        ({"on_full": "block"}, "wait"),
        ({"on_error": "ignore"}, "warn"),
        ({"every": 0}, "every"),
        ({"every": "sometimes"}, "log-spaced"),
        ({"first_step": 0}, "first_step"),
        ({"keep": 3}, "keep"),
        ({"micro": True}, "micro"),
        ({"budget": "3%"}, "budget"),
        ({"select": 7}, "select"),
        ({"select": "no.such.*"}, "no.such"),
        ({"select": "wieght"}, "did you mean weight"),
        ({"select": ["*", "!bais"]}, "did you mean bias"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, wrong: dict[str, Any], named: str) -> None:
    """Each names the argument's value and what is allowed, and leaves no run behind."""
    with pytest.raises((gradtap.UsageError, gradtap.ParamNotFoundError), match=named.replace("*", r"\*")):
        gradtap.attach(Training().pair, tmp_path / "a.gradtap", **wrong)
    assert not (tmp_path / "a.gradtap").exists()


def test_wrong_stores_are_named(tmp_path: Path) -> None:
    """An empty path, a URL, a file in the way, a folder that cannot be written."""
    training = Training()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "file-in-the-way.gradtap").write_text("mine")
    for store, named in [
        ("", "path"),
        ("s3://bucket/x.gradtap", "folder"),
        (tmp_path / "file" / "x.gradtap", "file"),
        (tmp_path / "file-in-the-way.gradtap", "file-in-the-way"),
        ("/proc/no/x.gradtap", "/proc"),
    ]:
        with pytest.raises((gradtap.UsageError, gradtap.StoreError), match=named):
            gradtap.attach(training.pair, store)
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "file-in-the-way.gradtap").read_text() == "mine"
    training.steps(1)


def test_a_folder_of_something_else_is_not_taken_over(tmp_path: Path) -> None:
    """A folder with other things in it and no run.json is not made a run."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    with pytest.raises(gradtap.StoreError, match="thesis"):
        gradtap.attach(Training().pair, tmp_path / "thesis")
    assert os.listdir(tmp_path / "thesis") == ["chapter1.tex"]


def test_attaching_twice_is_refused(tmp_path: Path) -> None:
    """The second attach is refused and the first goes on."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        with pytest.raises(gradtap.AttachError, match="already"):
            gradtap.attach(training.pair, tmp_path / "b.gradtap")
        training.steps(2)
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2]
    assert not (tmp_path / "b.gradtap").exists()


def test_a_live_run_is_locked(tmp_path: Path) -> None:
    """Another training into a run that a live job writes is refused, with who holds it."""
    first, second = Training(), Training()
    with gradtap.attach(first.pair, tmp_path / "a.gradtap"):
        with pytest.raises(gradtap.LockedError, match=str(os.getpid())):
            gradtap.attach(second.pair, tmp_path / "a.gradtap")
        first.steps(1)
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1]


def test_a_run_of_another_model_is_refused(tmp_path: Path) -> None:
    """The message names the parameter that differs; the run is as it was."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(2)
    with pytest.raises(gradtap.OtherModelError, match=r"weight.*\(3, 5\).*\(3, 6\)"):
        gradtap.attach(Training(width=6).pair, tmp_path / "a.gradtap")
    assert list(gradtap.open(tmp_path / "a.gradtap").steps) == [1, 2]
    assert read_lock(tmp_path / "a.gradtap") is None


def test_a_run_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """attach and open say which version to install, and change nothing."""
    training = Training()
    with gradtap.attach(training.pair, tmp_path / "a.gradtap"):
        training.steps(1)
    path = tmp_path / "a.gradtap" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    held = path.read_bytes()
    for attempt in (lambda: gradtap.open(path.parent), lambda: gradtap.attach(training.pair, path.parent)):
        with pytest.raises(gradtap.FormatVersionError, match="format 2"):
            attempt()
    assert path.read_bytes() == held
    assert stat.S_ISREG(path.stat().st_mode)
