from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.synthetic import Job


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A closed run of six steps, of which one rank dropped step 4; step 6 has flags and a factor."""
    job = Job(run=tmp_path_factory.mktemp("recorded") / "demo.gradtap")
    job.steps([1, 2, 3])
    job.step(4, dropped=[1])
    job.step(5)
    job.step(6, untouched=["mlp.bias"], factor=0.25)
    job.close()
    return job


@pytest.fixture(scope="session")
def store(recorded: Job) -> Path:
    """Its folder."""
    return recorded.run
