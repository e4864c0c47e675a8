from __future__ import annotations

import math
import time
from pathlib import Path

from gradtap.read import open_run
from gradtap.read.verify import verify
from tests.support.synthetic import MODEL, NEVER, Job


def test_facts(closed: Job) -> None:
    """Facts of a closed run: counts of steps and parameters, elements of a gradient, bytes on disk."""
    run = open_run(closed.run)
    info = run.info()
    elements = sum(p.numel for p in MODEL if p.stored)
    assert (info.name, info.id, info.state) == ("run", run.id, "closed")
    assert (info.steps, info.first_step, info.last_step) == (9, 1, 9)
    assert (info.params, info.frozen, info.unoptimized, info.elements) == (6, 1, 1, elements)
    assert info.raw_bytes == 9 * 4 * elements
    arrays = [f for a in closed.plan.arrays for f in (closed.paths.zarr / a.name).iterdir()]
    assert info.stored_bytes + info.index_bytes == sum(f.stat().st_size for f in arrays)
    assert info.stored_bytes == verify(closed.run).checked["bytes"]
    everything = sum(f.stat().st_size for f in closed.paths.root.rglob("*") if f.is_file())
    assert info.stored_bytes + info.index_bytes + info.other_bytes == everything
    assert info.ratio == info.raw_bytes / info.stored_bytes


def test_sessions(closed: Job) -> None:
    """A session says its engine, world, codec, times and captures."""
    (session,) = open_run(closed.run).sessions
    assert (session.name, session.engine, session.world, session.groups) == ("0000", "synthetic", 3, 2)
    assert (session.codec, session.summary, session.captures, session.incomplete) == ("exact", "full", 9, 0)
    assert session.settings == {"kind": "cuts"}
    assert session.first_step == 1
    assert session.closed is not None
    assert 0 < session.created <= session.closed <= time.time()
    assert "numpy" in session.versions


def test_states(tmp_path: Path) -> None:
    """A run is live while its job holds the lock; a dead job's is unclosed; a new job does not revive an old one."""
    first = Job(run=tmp_path / "r", world=1, settings=NEVER).steps([1])
    run = open_run(first.run)
    assert run.info().state == "live"
    first.kill()
    assert run.info().state == "unclosed"
    second = Job(run=tmp_path / "r", world=1, settings=NEVER).steps([2])
    assert [s.state for s in run.sessions] == ["unclosed", "live"]
    second.close()
    assert [s.state for s in run.sessions] == ["unclosed", "closed"]


def test_a_run_without_sessions(tmp_path: Path) -> None:
    """A run in which no session has begun is empty and says so."""
    from gradtap.store.runfile import create_run

    create_run(tmp_path / "empty.gradtap")
    run = open_run(tmp_path / "empty.gradtap")
    assert (run.steps, run.params, run.sessions, run.plan) == ((), (), (), None)
    info = run.info()
    assert (info.state, info.steps, info.first_step, info.elements) == ("empty", 0, None, 0)
    assert math.isnan(info.ratio)
    assert "empty" in repr(run)
