from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.synthetic import SMALL, Job

WATCH = """
import sys, time, json
import numpy as np
import gradtap

run, last = gradtap.open(sys.argv[1]), int(sys.argv[2])
seen, deadline = [], time.monotonic() + 60
while (not seen or seen[-1] < last) and time.monotonic() < deadline:
    steps = run.steps
    assert list(steps[: len(seen)]) == seen, (seen, steps)
    for step in steps[len(seen):]:
        got = run.grad("mlp.weight", step)
        assert got.complete and not np.isnan(got.values).any()
        seen.append(step)
        print(json.dumps([step, float(got.values.sum(dtype="f8"))]), flush=True)
    time.sleep(0.005)
assert "torch" not in sys.modules
"""


def watcher(job: Job, last: int) -> subprocess.Popen[str]:
    """A process that reads every step as it appears."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WATCH, str(job.run), str(last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_other_processes_see_steps_arrive(tmp_path: Path) -> None:
    """Two readers in other processes see each step once, in order, complete and right, while it is being written."""
    job = Job(run=tmp_path / "r", settings=SMALL)
    job.step(1)
    readers = [watcher(job, 30) for _ in range(2)]
    # The first line shows that the reader is there before the other steps are written.
    firsts: list[Any] = [json.loads(reader.stdout.readline()) for reader in readers if reader.stdout]
    for step in range(2, 31):
        job.step(step)
        job.flush()
    for reader, first in zip(readers, firsts, strict=True):
        out, errors = reader.communicate(timeout=90)
        assert reader.returncode == 0, errors
        seen = [first, *map(json.loads, out.splitlines())]
        assert [step for step, _ in seen] == list(range(1, 31))
        assert [total for _, total in seen] == [
            float(job.expected("mlp.weight", step).sum(dtype="f8")) for step, _ in seen
        ]
    job.kill()
