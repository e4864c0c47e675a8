"""kill -9: whatever is killed, and when, the run opens, what is complete is right, and a new start goes on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from gradtap.read import verify
from tests.support import launch
from tests.support.kill_loop import saved_step
from tests.support.synthetic import MODEL, Job

SMALL_ENV = {"GRADTAP_MAX_TIME": "4", "GRADTAP_CAPACITY": "4", "GRADTAP_FOLLOW_INTERVAL": "0.05"}


def session_steps(store: Path, session: int) -> list[int]:
    """Complete steps of one session, in order; none where it is not there yet."""
    try:
        run = gradtap.open(store)
        return [step for step in run.steps if attempt_of(run, step, session)]
    except gradtap.NotARunError:
        return []


def attempt_of(run: Any, step: int, session: int) -> int | None:
    """The number of a session's attempt at a step; None where it made none."""
    return next((a.number for a in run.locate(step) if a.session == f"{session:04d}"), None)


def wait_for_steps(store: Path, session: int, count: int, job: Any) -> None:
    deadline = time.monotonic() + 120
    while len(session_steps(store, session)) < count:
        assert all(process.poll() is None for process in job), "a process ended before it was killed"
        assert time.monotonic() < deadline, "the steps never came"
        time.sleep(0.05)


def check_session(store: Path, session: int, folder: Path) -> list[int]:
    """Every complete step is what the engine held, bit for bit; `verify` finds no damage. The steps."""
    run = gradtap.open(store)
    steps = session_steps(store, session)
    compared = 0
    for step in steps:
        held = folder / f"held-{step}.npz"
        if not held.exists():
            continue  # killed between gradtap's capture and the spy's look
        arrays = np.load(held)
        attempt = attempt_of(run, step, session)
        for name in arrays.files:
            assert np.array_equal(np.asarray(run.grad(name, step, attempt=attempt)), arrays[name]), (step, name)
        compared += 1
    assert compared >= len(steps) - 1
    report = verify(store, deep=True)
    assert not report.findings, report.findings
    return steps


def test_training_that_is_killed_goes_on(tmp_path: Path) -> None:
    """One rank killed, then the whole job at once, then a start that ends by itself: three sessions, one run."""
    store, chance = tmp_path / "run.gradtap", random.Random(7)
    checkpoints, begun = tmp_path / "checkpoints", [1]
    args = {"store": str(store), "checkpoints": str(checkpoints)}
    # The first job's last checkpoint lies before the steps that are waited for: some are certainly recorded again.
    for session, (victims, last) in enumerate((([1], 6), ([0, 1], 10**6))):
        folder = tmp_path / f"job{session}"
        more = {"until": 10**6, "last_checkpoint": last}
        job = launch.start("tests.support.kill_loop:run", processes=2, folder=folder, args=args | more, env=SMALL_ENV)
        try:
            wait_for_steps(store, session, 8 if session == 0 else 5, job)
            time.sleep(chance.uniform(0, 0.3))
            for rank in victims:
                job[rank].send_signal(signal.SIGKILL)
        finally:
            time.sleep(0.2)
            launch.stop(job)
        steps = check_session(store, session, folder)
        assert len(steps) >= 5 and steps == list(range(begun[session], steps[-1] + 1))
        begun.append(saved_step(checkpoints) + 1)
        assert gradtap.open(store).sessions[session].state == "unclosed"
    reached = gradtap.open(store).steps[-1]
    folder = tmp_path / "job2"
    until = int(reached) + 4
    ended = launch.launch(
        "tests.support.kill_loop:run",
        processes=2,
        folder=folder,
        args=args | {"until": until, "last_checkpoint": until},
        env=SMALL_ENV,
    )
    assert ended == [until, until]
    steps = check_session(store, 2, folder)
    assert steps[0] == begun[2]
    run = gradtap.open(store)
    assert steps[-1] == until and run.sessions[2].state == "closed"
    assert list(run.steps) == list(range(1, until + 1)), "the sessions join to one run without a gap"
    assert all(len(run.attempts(step)) > 1 for step in (7, 8)), "steps after the checkpoint were recorded again"


WRITER = """
import sys
from pathlib import Path
from tests.support.synthetic import Job
job = Job(run=Path(sys.argv[1]), seed=int(sys.argv[2]))
for step in range(1, 10**6):
    job.step(step)
    if step % 4 == 0:
        job.flush()
"""


def test_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    """Ten kills of a process that writes as fast as it can: nothing complete is wrong, nothing half done shows."""
    store, chance = tmp_path / "run.gradtap", random.Random(11)
    for seed in range(10):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(store), str(seed)], cwd=launch.ROOT)
        try:
            wait_for_steps(store, seed, 2, [writer])
            time.sleep(chance.uniform(0, 0.15))
        finally:
            writer.kill()
            writer.wait()
        run = gradtap.open(store)
        steps = session_steps(store, seed)
        assert run.sessions[seed].state == "unclosed" and steps == list(range(1, len(steps) + 1))
        self_made = Job.__new__(Job)
        self_made.params, self_made.seed, self_made.k = MODEL, seed, 0
        for step in sorted({*steps[:2], *steps[-6:]}):
            for param in run.params:
                if param.stored:
                    found = np.asarray(run.grad(param.name, step, attempt=attempt_of(run, step, seed)))
                    assert np.array_equal(found, self_made.expected(param.name, step)), (seed, step, param.name)
        report = verify(store, deep=True)
        assert not report.findings, report.findings
        with pytest.raises(gradtap.NotFoundError):
            run.grad("mlp.bias", 10**6)
