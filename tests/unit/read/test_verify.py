from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradtap
from gradtap.encode.checksum import with_crc
from gradtap.read import open_run, verify, verify_session
from tests.support.synthetic import NEVER, Job
from tests.support.wounds import WOUNDS, flip, put, spot

GROUP = Path("sessions/0000/gradients.zarr")


def snapshot(run: Path) -> dict[str, tuple[int, bytes]]:
    """All files with their times and bytes."""
    return {
        str(f.relative_to(run)): (f.stat().st_mtime_ns, f.read_bytes()) for f in sorted(run.rglob("*")) if f.is_file()
    }


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_run(closed: Job, deep: bool) -> None:
    """A closed run has no finding and no note, and says how much was looked at."""
    report = verify(closed.run, deep)
    assert report.sound
    assert (report.findings, report.notes) == ((), ())
    assert report.checked["journals"] == 3
    assert report.checked["records"] == 27
    assert report.checked["chunks"] > 27
    assert report.deep is deep


def test_changes_nothing_and_repeats(copy: Path) -> None:
    """A check writes nothing, also on a damaged run, and gives the same answer twice."""
    WOUNDS["flip_body"](spot(copy, "mlp.bias", 3))
    before = snapshot(copy)
    first = verify(copy, deep=True)
    assert verify(copy, deep=True) == first
    assert not first.sound
    assert snapshot(copy) == before


def test_depth(copy: Path) -> None:
    """A rotten byte within a body is found by the deep check; the quick one reads ends of chunks alone."""
    place = spot(copy, "mlp.bias", 3)
    WOUNDS["flip_body"](place)
    assert verify(copy).sound
    (finding,) = verify(copy, deep=True).findings
    assert (finding.file, finding.param, finding.step) == (str(place.path.relative_to(copy)), "mlp.bias", 4)
    assert "crc32c" in finding.what
    assert "copy" in finding.cure


def test_progress(closed: Job) -> None:
    """Progress counts journal records up to the whole."""
    seen: list[tuple[int, int]] = []
    verify(closed.run, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (27, 27)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_unclosed_run_is_explained(unclosed: Job) -> None:
    """A killed job's run is sound: a note says that it was not closed, how much is readable, and whose lock is left."""
    report = verify(unclosed.run, deep=True)
    assert report.sound
    notes = {note.file: note.what for note in report.notes}
    assert "9 complete captures are readable" in notes["sessions/0000/session.json"]
    assert "gone" in notes["lock"]


def test_a_live_run_is_sound(tmp_path: Path) -> None:
    """A run that is being written has no finding, also with a capture in flight."""
    job = Job(run=tmp_path / "r").steps([1, 2])
    job.step(3, absent=[1])
    job.flush()
    job.wait_published(2)
    report = verify(job.run, deep=True)
    assert report.sound, report.findings
    assert any("a job is writing" in note.what for note in report.notes)
    job.kill()


@pytest.mark.parametrize("slow", ["_check_schedule", "check_chunks", "check_rows", "check_session_files"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_run_that_goes_on_meanwhile_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, ends: bool
) -> None:
    """Captures that are published, and a session that is closed, while a slow check is at work are no damage."""
    job = Job(run=tmp_path / "r").steps([1, 2])
    job.step(3, absent=[1])
    job.flush()
    job.wait_published(2)
    original = getattr(verify_session, slow)

    def meanwhile(*args: Any, **more: Any) -> Any:
        job.step(3, absent=[0, 2])
        job.steps(range(4, 12))
        job.wait_published(11)
        if ends:
            job.close()
        return original(*args, **more)

    monkeypatch.setattr(verify_session, slow, meanwhile)
    report = verify(job.run, deep=True)
    assert report.sound, report.findings
    if not ends:
        job.kill()
    monkeypatch.undo()
    assert verify(job.run).sound


def test_a_session_that_closes_before_its_lock_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends between the two looks of `state` leaves a closed session, not one that nobody closed."""
    from gradtap.read import session as module

    job = Job(run=tmp_path / "r").steps([1])
    own = module.Session(job.run, "0000")

    def late(path: Path) -> None:
        job.close()

    monkeypatch.setattr(module, "read_lock", late)
    assert own.state == "closed"


def test_a_merged_ledger_row_that_is_missing(copy: Path) -> None:
    """A row that every rank has and the merged ledger lacks is damage with a cure; gradtap serves it all the same."""
    file = copy / GROUP / "_ledger/step/c.0"
    body = bytearray(file.read_bytes()[:-4])
    body[16:24] = b"\xff" * 8
    file.write_bytes(with_crc(bytes(body))[0])
    (finding,) = verify(copy).findings
    assert (finding.file, finding.step) == (str(GROUP / "_ledger/step/c.0"), 3)
    assert "ledger row 2 is missing" in finding.what
    assert "ranks' own rows" in finding.cure
    assert open_run(copy).ledger.steps == tuple(range(1, 10))


def test_a_ledger_row_that_a_rank_lacks(tmp_path: Path) -> None:
    """A row that some rank never wrote is a note that names rank and step."""
    job = Job(run=tmp_path / "r", world=2).steps([1, 2])
    job.step(3, absent=[1])
    job.steps([4])
    job.close()
    report = verify(job.run)
    assert report.sound, report.findings
    assert "rank 1 wrote no ledger row for steps 3" in [note.what for note in report.notes]


def test_incomplete_captures_are_explained(tmp_path: Path) -> None:
    """Captures that are not complete are no damage: notes say which steps, and what which rank did."""
    job = Job(run=tmp_path / "r", world=3, settings=NEVER)
    job.step(1)
    job.step(2, dropped=[1])
    job.step(3, absent=[2])
    job.step(4, absent=[2])
    job.kill()
    report = verify(job.run)
    assert report.sound, report.findings
    said = [note.what for note in report.notes]
    assert any("steps 2: rank 1 dropped it" in what for what in said), said
    assert any("steps 3, 4: rank 2 did not commit it" in what for what in said), said


def test_findings_of_one_file_are_limited(tmp_path: Path) -> None:
    """A lost index is not reported once for each of a thousand chunks; the rest is counted."""
    job = Job(run=tmp_path / "r", world=1, kind="whole").steps(range(1, 31))
    job.close()
    journal = job.paths.journal(0)
    data = bytearray(journal.read_bytes())
    # All but one of the 30 records as such, the last one as cut off.
    size = int.from_bytes(data[16:20], "little")
    for capture in range(30):
        data[128 + capture * size + 70] ^= 1
    journal.write_bytes(data)
    report = verify(job.run)
    mine = [f for f in report.findings if f.file == "sessions/0000/journal/r00000"]
    assert len(mine) == 21
    assert "10 more findings" in mine[-1].what


@pytest.mark.parametrize("reader", ["r00000", "r00001", "r00002"])
def test_a_lost_journal(copy: Path, reader: str) -> None:
    """A journal that is missing from a closed session is damage."""
    (copy / "sessions/0000/journal" / reader).unlink()
    report = verify(copy)
    assert [f.file for f in report.findings] == [f"sessions/0000/journal/{reader}"]


def test_swapped_journals(copy: Path) -> None:
    """Journals in each other's place are found by their headers."""
    one, two = (copy / "sessions/0000/journal" / name for name in ("r00000", "r00001"))
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    found = {f.file: f.what for f in verify(copy).findings}
    assert set(found) == {"sessions/0000/journal/r00000", "sessions/0000/journal/r00001"}
    assert "another rank" in found["sessions/0000/journal/r00000"]


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON file."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("mlp.bias/zarr.json", lambda d: d.update(fill_value=0.0)),
        ("mlp.bias/zarr.json", lambda d: d["shape"].__setitem__(0, 3)),
        ("mlp.bias/zarr.json", lambda d: d["shape"].__setitem__(1, 3)),
        ("mlp.bias/zarr.json", lambda d: d.clear()),
        ("_step/zarr.json", lambda d: d["codecs"].pop()),
        ("_summary/r00001/l2/zarr.json", lambda d: d.update(data_type="float32")),
        ("zarr.json", lambda d: d["attributes"]["pieces"].clear()),
        ("zarr.json", lambda d: d["consolidated_metadata"]["metadata"].pop("mlp.bias")),
        ("zarr.json", lambda d: d["consolidated_metadata"]["metadata"]["mlp.bias"]["shape"].__setitem__(0, 1)),
    ],
)
def test_metadata_is_compared_with_the_plan(copy: Path, file: str, change: Callable[[dict], object]) -> None:
    """Metadata that says something else than the plan is found, in its own file."""
    edit(copy / GROUP / file, change)
    assert [f.file for f in verify(copy).findings] == [str(GROUP / file)]


@pytest.mark.parametrize("file", ["mlp.bias/zarr.json", "zarr.json"])
def test_metadata_that_is_no_json(copy: Path, file: str) -> None:
    """Metadata that does not parse, or is missing, is found."""
    (copy / GROUP / file).write_text("{")
    assert [f.file for f in verify(copy).findings] == [str(GROUP / file)]
    (copy / GROUP / file).unlink()
    assert [f.file for f in verify(copy).findings] == [str(GROUP / file)]


def test_rows_are_checked(copy: Path) -> None:
    """Damaged rows of `_step`, the ledger and the summaries are found, merged ones and a rank's own."""
    hurt = [GROUP / "_step/c.0", GROUP / "_ledger/factor/c.0", GROUP / "_summary/l2/c.0.0"]
    hurt += [GROUP / "_ledger/r00001/flags/c.1", GROUP / "_summary/r00002/hist/c.0.0.0"]
    for file in hurt:
        # The last row before a seal, or the middle of a plain chunk.
        size = (copy / file).stat().st_size
        flip(copy / file, size // 2 if "r0000" not in str(file) and "l2" not in str(file) else 70)
    assert {f.file for f in verify(copy).findings} == {str(file) for file in hurt}


def test_unpublished_and_wrongly_published(copy: Path) -> None:
    """`_step` that disagrees with the journals is found: a step that is hidden, one that is not there."""
    file = copy / GROUP / "_step/c.0"
    body = bytearray(file.read_bytes()[:-4])
    body[16:24] = (77).to_bytes(8, "little")
    body[32:40] = b"\xff" * 8
    file.write_bytes(with_crc(bytes(body))[0])
    said = [f.what for f in verify(copy).findings]
    assert said == [
        "capture 2 is published as step 77, the journals say step 3",
        "capture 4 (step 5) is complete and not published",
    ]


def test_seals(copy: Path) -> None:
    """A sealed file whose mark or copy of the index is gone is found: other readers look there."""
    place = spot(copy, "mlp.bias", 0)
    put(place.path, place.path.stat().st_size - 3, b"xxx")
    (finding,) = verify(copy).findings
    assert "sealed mark" in finding.what


def test_strangers_are_listed(copy: Path) -> None:
    """Files and sessions that do not belong are notes, not damage."""
    (copy / GROUP / "notes.txt").write_text("hello")
    (copy / GROUP / "mlp.bias" / ".c.0.123.tmp").write_text("")
    temporary = (".run.json.1.tmp", "sessions/0000/.session.json.1.tmp", "sessions/0000/journal/.r00000.1.tmp")
    for name in temporary:
        (copy / name).write_text("")
    (copy / "sessions/0000/tags/notes").write_text("")
    (copy / "sessions/0000/journal/r00000.micro").write_text("what a later version keeps there")
    (copy / "sessions/0007/journal").mkdir(parents=True)
    report = verify(copy)
    assert report.sound, report.findings
    assert {note.file for note in report.notes} == {
        str(GROUP / "notes.txt"),
        str(GROUP / "mlp.bias/.c.0.123.tmp"),
        "sessions/0007",
        "sessions/0000/tags/notes",
        *temporary,
    }


def test_schedule_log(copy: Path) -> None:
    """A damaged schedule log is found; a torn last line is not an entry yet."""
    log = copy / "sessions/0000/schedule.log"
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"entry": {"ki')
    assert verify(copy).sound
    log.write_bytes(b"x" + whole + whole)
    assert "sessions/0000/schedule.log" in {f.file for f in verify(copy).findings}


@pytest.mark.parametrize("name", ["run.json", "sessions/0000/session.json", "lock"])
def test_head_files(copy: Path, name: str) -> None:
    """Head files that do not read are findings; the check goes on with what it can find."""
    (copy / name).write_text("nonsense")
    report = verify(copy)
    assert [f.file for f in report.findings] == [name]
    assert report.checked["chunks"] > 0 or name.endswith("session.json")


def test_not_a_run(tmp_path: Path) -> None:
    """What holds no run, or a newer format, is an error and not a finding."""
    with pytest.raises(gradtap.NotARunError):
        verify(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 2, "gradtap": "9.0"}')
    with pytest.raises(gradtap.FormatVersionError, match="9.0"):
        verify(tmp_path)
