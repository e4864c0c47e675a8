"""Stores that several tests read; whoever changes one takes a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.synthetic import NEVER, Job

STEPS = range(1, 10)
"""Nine steps: with four captures a shard, two full ones and one begun."""


@pytest.fixture(scope="package")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A closed run of three ranks whose parameters are cut inside rows."""
    job = Job(run=tmp_path_factory.mktemp("closed") / "run.gradtap").steps(STEPS)
    job.close()
    return job


@pytest.fixture(scope="package")
def unclosed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same, killed before anything was published."""
    job = Job(run=tmp_path_factory.mktemp("unclosed") / "run.gradtap", settings=NEVER).steps(STEPS)
    job.kill()
    return job


@pytest.fixture
def copy(closed: Job, tmp_path: Path) -> Path:
    """A copy of the closed run, to be harmed."""
    return Path(shutil.copytree(closed.run, tmp_path / "copy.gradtap"))
