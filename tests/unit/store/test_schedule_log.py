"""The schedule log: appended lines, torn tails, damage."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from gradtap.encode.checksum import crc32c
from gradtap.errors import DamagedError, StoreError
from gradtap.plan.rules import parse_rule
from gradtap.plan.schedule import ChangeEntry, PromoteEntry
from gradtap.plan.serial import canonical_json
from gradtap.store.schedule_log import append_entry, read_schedule

FIRST = ChangeEntry(from_step=1, rule=parse_rule(50))
SECOND = ChangeEntry(from_step=100, rule=parse_rule(10))
THIRD = PromoteEntry(at_step=120, steps=(113,))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of three entries."""
    for entry in (FIRST, SECOND, THIRD):
        append_entry(tmp_path / "schedule.log", entry)
    return tmp_path / "schedule.log"


def test_entries_come_back_in_order(log: Path) -> None:
    """The schedule read is the one of the entries written."""
    schedule = read_schedule(log)
    assert schedule is not None and schedule.entries == (FIRST, SECOND, THIRD)
    assert schedule.number(50) == 0


def test_lines_are_as_the_format_says(log: Path) -> None:
    """Each line holds an entry and the crc32c of its canonical JSON."""
    lines = log.read_bytes().splitlines()
    assert len(lines) == 3
    for line in lines:
        fields = json.loads(line)
        assert set(fields) == {"entry", "crc"}
        assert fields["crc"] == crc32c(canonical_json(fields["entry"]))


def test_no_log_and_an_empty_log_have_no_schedule(tmp_path: Path) -> None:
    """Before the first entry there is no schedule."""
    assert read_schedule(tmp_path / "schedule.log") is None
    (tmp_path / "schedule.log").touch()
    assert read_schedule(tmp_path / "schedule.log") is None


def test_every_cut_of_the_last_line_is_ignored(log: Path) -> None:
    """However few bytes of the last line arrived, the entries before it hold and it does not."""
    data = log.read_bytes()
    start = data[:-1].rindex(b"\n") + 1
    for size in range(start, len(data)):
        log.write_bytes(data[:size])
        schedule = read_schedule(log)
        assert schedule is not None and len(schedule.entries) == 2


def test_a_torn_first_line_is_no_schedule_yet(log: Path) -> None:
    """A log that holds only a part of its first line reads as not begun."""
    log.write_bytes(log.read_bytes()[:20])
    assert read_schedule(log) is None


def test_a_wrong_last_line_is_ignored_and_an_earlier_one_is_damage(log: Path) -> None:
    """A wrong byte counts as torn in the last line only; before it, file and line are named."""
    lines = log.read_bytes().splitlines(keepends=True)
    wrong = [line.replace(b'"crc":', b'"crc":1') for line in lines]
    log.write_bytes(lines[0] + lines[1] + wrong[2])
    schedule = read_schedule(log)
    assert schedule is not None and len(schedule.entries) == 2
    log.write_bytes(lines[0] + wrong[1] + lines[2])
    with pytest.raises(DamagedError, match=r"schedule\.log: line 2 is not what was written"):
        read_schedule(log)
    log.write_bytes(lines[0] + wrong[1] + lines[2][:10])
    with pytest.raises(DamagedError, match="line 2"):
        read_schedule(log)


def test_a_sound_line_that_is_no_entry_is_damage(log: Path) -> None:
    """A checksum that holds does not make an unknown kind of entry pass unseen, even as the last line."""
    fields = {"kind": "unheard-of"}
    line = canonical_json({"entry": fields, "crc": crc32c(canonical_json(fields))}) + b"\n"
    log.write_bytes(log.read_bytes() + line)
    with pytest.raises(DamagedError, match=r"schedule\.log: line 4"):
        read_schedule(log)


def test_entries_that_make_no_schedule_are_damage(log: Path) -> None:
    """A log that lost its first line is refused."""
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[2:]))
    with pytest.raises(DamagedError, match=r"schedule\.log: the entries make no schedule"):
        read_schedule(log)


def test_a_failed_append_leaves_the_log_as_it_was(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that stops half-way is cut off again and reported."""
    before, real = log.read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        with pytest.raises(StoreError, match="only a part of the line fitted"):
            append_entry(log, ChangeEntry(from_step=200, rule=parse_rule(5)))
    assert log.read_bytes() == before

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="No space left"):
            append_entry(log, ChangeEntry(from_step=200, rule=parse_rule(5)))
    assert log.read_bytes() == before


def test_nothing_is_added_after_a_torn_line(log: Path) -> None:
    """An append would make a torn line part of the middle, so it is refused."""
    log.write_bytes(log.read_bytes()[:-5])
    before = log.read_bytes()
    with pytest.raises(DamagedError, match="middle of a line"):
        append_entry(log, ChangeEntry(from_step=200, rule=parse_rule(5)))
    assert log.read_bytes() == before


def test_an_unreadable_log_is_not_an_empty_one(tmp_path: Path) -> None:
    """A folder in its place is an error, not the absence of a schedule."""
    (tmp_path / "schedule.log").mkdir()
    with pytest.raises(StoreError, match=r"schedule\.log"):
        read_schedule(tmp_path / "schedule.log")
