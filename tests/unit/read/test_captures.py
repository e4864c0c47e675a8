from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtap
from gradtap.read import captures, open_run, verify
from gradtap.read.attempts import AttemptIndex
from gradtap.read.session import Session
from gradtap.store.journal import RECORDS_AT, JournalReader, encode_record
from gradtap.store.row_specs import STEP_PATH, by_path, merged_specs
from gradtap.store.rows import ReplaceRows
from gradtap.store.session import read_head
from tests.support.synthetic import MODEL, NEVER, SMALL, Job
from tests.support.wounds import flip, put


def reader_of(run: Any) -> captures.CaptureIndex:
    """The index of the newest session."""
    return run._sessions()[-1].captures


def test_steps_of_closed_and_unclosed(closed: Job, unclosed: Job) -> None:
    """A closed run lists its steps from what was published, a killed one from its journals alone."""
    assert open_run(closed.run).steps == open_run(unclosed.run).steps == tuple(range(1, 10))
    assert open_run(closed.run).sessions[0].state == "closed"
    assert open_run(unclosed.run).sessions[0].state == "unclosed"


def test_a_live_run_grows(tmp_path: Path) -> None:
    """Steps appear in an open run as they are committed, before and after rank 0 has published them."""
    for pace in (NEVER, SMALL):
        job = Job(run=tmp_path / f"{pace.follow_interval}", settings=pace)
        run = open_run(job.run)
        assert run.steps == ()
        assert run.sessions[0].state == "live"
        for step in range(1, 8):
            job.step(step)
            job.flush()
            assert run.steps == tuple(range(1, step + 1))
            np.testing.assert_array_equal(run.grad("mlp.bias", step).values, job.expected("mlp.bias", step))
        job.close()
        assert run.steps == tuple(range(1, 8))
        assert run.sessions[0].state == "closed"


def test_a_look_at_an_unchanged_run_is_cheap(unclosed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing changes, asking for the steps reads no journal and no row; the answer is the same object."""
    run = open_run(unclosed.run)
    steps = run.steps

    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing changed, so nothing is to be read")

    for look in ("last", "record", "head"):
        monkeypatch.setattr(JournalReader, look, refuse)
    monkeypatch.setattr(Session, "read", refuse)
    assert run.steps is steps
    assert run.params is run.params


def test_opening_looks_at_no_capture(unclosed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads metadata alone: no journal record, no row."""
    monkeypatch.setattr(JournalReader, "record", None)
    monkeypatch.setattr(JournalReader, "head", None)
    monkeypatch.setattr(Session, "read", None)
    assert len(open_run(unclosed.run).params) == len(MODEL)


def test_only_new_captures_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a live run has grown by one capture, only that one is looked up."""
    job = Job(run=tmp_path / "r", settings=NEVER).steps(range(1, 9))
    job.flush()
    run = open_run(job.run)
    assert len(run.steps) == 8
    asked: list[int] = []
    record = JournalReader.record

    def noted(self: JournalReader, capture: int) -> Any:
        asked.append(capture)
        return record(self, capture)

    monkeypatch.setattr(JournalReader, "record", noted)
    job.step(9)
    job.flush()
    assert run.steps[-1] == 9
    assert set(asked) == {8}
    job.kill()


def test_unpublished_captures_are_listed_by_their_heads(unclosed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole records, with the checksums of all chunks, are read for the last capture alone."""
    asked: list[int] = []
    record = JournalReader.record

    def noted(self: JournalReader, capture: int) -> Any:
        asked.append(capture)
        return record(self, capture)

    monkeypatch.setattr(JournalReader, "record", noted)
    assert len(open_run(unclosed.run).steps) == 9
    assert asked == [8] * 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 12), max_size=8), min_size=1, max_size=3), st.data())
def test_an_index_that_grew_is_that_built_anew(sessions: list[list[int]], data: st.DataObject) -> None:
    """However the newest session grew, the index equals the one built from all captures at once."""
    readers: Any = [SimpleNamespace(captures=SimpleNamespace(steps=np.array(s, np.int64))) for s in sessions]
    grown = AttemptIndex()
    for turn, cut in enumerate(sorted(data.draw(st.lists(st.integers(0, len(sessions[-1])), max_size=4)))):
        readers[-1].captures.steps = np.array(sessions[-1][:cut], np.int64)
        grown = grown.grown(
            tuple((str(i), 1 if i < len(sessions) - 1 else turn) for i in range(len(sessions))), readers
        )
    readers[-1].captures.steps = np.array(sessions[-1], np.int64)
    versions = tuple((str(i), 1 if i < len(sessions) - 1 else 99) for i in range(len(sessions)))
    grown, fresh = grown.grown(versions, readers), AttemptIndex(versions, readers)
    assert grown.steps == fresh.steps
    assert [grown.places(step) for step in range(13)] == [fresh.places(step) for step in range(13)]
    assert [a.tolist() for a in grown.newest()] == [a.tolist() for a in fresh.newest()]


def test_in_flight(tmp_path: Path) -> None:
    """A step that some ranks have not committed yet is not served, and the ranks that are missing are named."""
    job = Job(run=tmp_path / "r", world=3, settings=NEVER)
    job.step(1)
    job.step(2, absent=[1])
    job.flush()
    run = open_run(job.run)
    assert run.steps == (1,)
    with pytest.raises(gradtap.IncompleteError, match=r"step 2 .*in flight, rank 1 of 3") as caught:
        run.grad("mlp.bias", 2)
    assert "partial=True" in str(caught.value)
    job.kill()
    with pytest.raises(gradtap.IncompleteError, match="rank 1 of 3 never committed it"):
        run.grad("mlp.bias", 2)


def test_partial_shows_what_is_there(tmp_path: Path) -> None:
    """`partial` gives the committed ranks' elements, NaN for the others, and says that it is not complete."""
    job = Job(run=tmp_path / "r", world=3, settings=NEVER)
    job.step(1)
    job.step(2, absent=[2])
    job.kill()
    run = open_run(job.run)
    parts = {
        name: run.grad(name, 2, partial=True) for name in ("embed.weight", "conv.weight", "mlp.weight", "mlp.bias")
    }
    assert not any(part.complete for part in parts.values())
    seen = np.concatenate([p.values.reshape(-1) for p in parts.values()])
    wanted = np.concatenate([job.expected(name, 2).reshape(-1) for name in parts])
    there = ~np.isnan(seen)
    assert 0 < there.sum() < there.size
    np.testing.assert_array_equal(seen[there], wanted[there])
    assert run.grad("mlp.bias", 1, partial=True).complete
    with pytest.raises(gradtap.StepNotFoundError):
        run.grad("mlp.bias", 3, partial=True)


def test_dropped(tmp_path: Path) -> None:
    """A step that one rank dropped is invisible and says so; its number stays empty, the steps after it are right."""
    job = Job(run=tmp_path / "r", world=2)
    job.step(1)
    job.step(2, dropped=[1])
    job.step(3)
    job.close()
    run = open_run(job.run)
    assert run.steps == (1, 3)
    assert run.sessions[0].incomplete == 1
    with pytest.raises(gradtap.IncompleteError, match="rank 1 dropped it"):
        run.grad("mlp.bias", 2)
    np.testing.assert_array_equal(run.grad("mlp.bias", 3).values, job.expected("mlp.bias", 3))


def test_ranks_that_disagree(tmp_path: Path) -> None:
    """A capture that ranks committed for different steps is void: under no number is it served."""
    job = Job(run=tmp_path / "r", world=2, settings=NEVER).steps([1, 2])
    job.kill()
    journal = job.paths.journal(1)
    with JournalReader(journal) as reader:
        record, size = reader.record(1), reader.header.record_size
    assert record is not None
    put(journal, RECORDS_AT + size, encode_record(replace(record, step=7), len(record.crcs)))
    run = open_run(job.run)
    assert run.steps == (1,)
    with pytest.raises(gradtap.IncompleteError, match="rank 1 recorded another step"):
        run.grad("mlp.bias", 2)
    with pytest.raises(gradtap.StepNotFoundError):
        run.grad("mlp.bias", 7)
    assert any("step 7 here, step 2 in the schedule" in f.what for f in verify(job.run).findings)


def test_holes_are_settled_late(tmp_path: Path) -> None:
    """A slow rank's capture becomes visible when it comes, although the others were ahead."""
    job = Job(run=tmp_path / "r", world=2, settings=NEVER)
    job.step(1)
    job.step(2, absent=[1])
    job.step(3, absent=[1])
    job.flush()
    run = open_run(job.run)
    assert run.steps == (1,)
    for step in (2, 3):
        job.step(step, absent=[0])
    job.flush()
    assert run.steps == (1, 2, 3)
    np.testing.assert_array_equal(run.grad("embed.weight", 2).values, job.expected("embed.weight", 2))
    job.kill()


def test_a_damaged_last_record_hides_nothing(copy: Path) -> None:
    """The last record of a closed journal, damaged, looks like one cut off by a kill; its step does not vanish."""
    journal = copy / "sessions/0000/journal/r00001"
    flip(journal, journal.stat().st_size - 30)
    run = open_run(copy)
    assert run.steps == tuple(range(1, 10))
    with pytest.raises(gradtap.DamagedError, match="r00001"):
        run.grad("mlp.weight", 9)


def test_swapped_journals_are_refused(copy: Path) -> None:
    """A journal in another rank's place is not taken for that rank's."""
    one, two = (copy / "sessions/0000/journal" / name for name in ("r00000", "r00001"))
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    with pytest.raises(gradtap.DamagedError, match="not the journal of rank"):
        open_run(copy).grad("mlp.weight", 9)


def test_a_lost_journal_hides_nothing(copy: Path) -> None:
    """Where a rank's journal is lost, what was published stays listed, and reading it is an error, not an absence."""
    (copy / "sessions/0000/journal/r00001").unlink()
    run = open_run(copy)
    assert run.steps == tuple(range(1, 10))
    with pytest.raises(gradtap.DamagedError, match="r00001 has no record"):
        run.grad("mlp.weight", 3)


def test_a_damaged_journal_header_hides_nothing(copy: Path) -> None:
    """The same where a journal's header does not read."""
    flip(copy / "sessions/0000/journal/r00001", 20)
    run = open_run(copy)
    assert run.steps == tuple(range(1, 10))
    with pytest.raises(gradtap.DamagedError, match="r00001"):
        run.grad("mlp.weight", 3)


def test_damaged_step_rows_are_made_good(copy: Path) -> None:
    """`_step` is derived: where it is damaged the journals say which captures are complete."""
    flip(next((copy / "sessions/0000/gradients.zarr" / STEP_PATH).glob("c.*")), 9)
    assert open_run(copy).steps == tuple(range(1, 10))


def test_a_torn_record_is_no_capture(unclosed: Job, tmp_path: Path) -> None:
    """A last record that was written in part does not count; those before it do."""
    run = Path(shutil.copytree(unclosed.run, tmp_path / "torn"))
    journal = run / "sessions/0000/journal/r00002"
    with journal.open("r+b") as file:
        file.truncate(journal.stat().st_size - 5)
    assert open_run(run).steps == tuple(range(1, 9))
    with pytest.raises(gradtap.IncompleteError, match="rank 2 of 3"):
        open_run(run).grad("mlp.bias", 9)


def test_many_captures_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published captures are taken in bulk: ten thousand steps of two ranks are listed without their records."""
    count = 10_000
    job = Job(run=tmp_path / "r", world=2, settings=NEVER).steps([1])
    job.kill()
    rows = ReplaceRows(job.paths.zarr, by_path(merged_specs(read_head(job.paths).layout))[STEP_PATH])
    rows.write({k: np.int64(k + 1) for k in range(count)})
    rows.flush()
    for rank in range(2):
        with JournalReader(job.paths.journal(rank)) as journal:
            first, size = journal.record(0), journal.header.record_size
        assert first is not None
        newest = encode_record(replace(first, capture=count - 1, step=count), len(first.crcs))
        with job.paths.journal(rank).open("r+b") as file:
            file.seek(RECORDS_AT + (count - 1) * size)
            file.write(newest)
    monkeypatch.setattr(JournalReader, "record", None)
    begun = time.perf_counter()
    assert len(open_run(job.run).steps) == count
    assert time.perf_counter() - begun < 2.0
