"""The journal: its bytes, torn tails, holes, damage, and reading while it grows."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtap.encode.checksum import crc32c
from gradtap.errors import DamagedError, FormatVersionError, StoreError
from gradtap.store.journal import ClosedMark, JournalReader, JournalRecord, JournalWriter, RecordHead, record_size

NONCE = "00112233445566778899aabbccddeeff"
CHUNKS = 11
SIZE = record_size(CHUNKS)


def record(capture: int, **changes: Any) -> JournalRecord:
    """A record with checksums of its own, chunk 3 left out."""
    present = np.ones(CHUNKS, np.bool_)
    present[3] = False
    fields: dict[str, Any] = {
        "capture": capture,
        "step": 10 * capture + 1,
        "state": "committed",
        "raw_bytes": 2**40 + capture,
        "stored_bytes": 7,
        "time": 1.5,
        "crcs": np.arange(CHUNKS, dtype=np.uint32) + np.uint32(2**32 - 100) + np.uint32(capture),
        "present": present,
    }
    return JournalRecord(**(fields | changes))


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """A journal of rank 5 with no record."""
    made = JournalWriter(tmp_path / "r00005", 5, CHUNKS, NONCE, 77)
    yield made
    made.close()


def test_bytes_are_as_the_format_says(writer: JournalWriter) -> None:
    """Header, closed block and record lie byte for byte as format 1 fixes them."""
    writer.write(record(1, state="dropped"))
    data = writer.path.read_bytes()
    assert SIZE == 128 and len(data) == 128 + 2 * SIZE
    head = b"GTJOURN1" + struct.pack("<4I", 1, 5, SIZE, CHUNKS) + bytes.fromhex(NONCE) + struct.pack("<I", 77)
    head += bytes(16)
    assert data[:64] == head + struct.pack("<I", crc32c(head))
    assert not any(data[64 : 128 + SIZE])
    found = data[128 + SIZE :]
    kept = record(1)
    body = struct.pack("<IIqqQQdIIQ", 0x4C4A5447, 2, 1, 11, 2**40 + 1, 7, 1.5, CHUNKS, 0, 0)
    body += np.where(kept.present, kept.crcs, 0).astype("<u4").tobytes() + bytes([0b11110111, 0b00000111])
    assert found[:-4] == body.ljust(SIZE - 4, b"\0")
    assert found[-4:] == struct.pack("<I", crc32c(found[:-4]))


def test_records_come_back(writer: JournalWriter) -> None:
    """What was written is read, state, checksums and presence included."""
    for capture, state in enumerate(("committed", "dropped", "failed")):
        writer.write(record(capture, state=state))
    writer.sync()
    with JournalReader(writer.path) as reader:
        assert (reader.header.rank, reader.header.chunks, reader.header.nonce) == (5, CHUNKS, NONCE)
        assert reader.header == writer.header
        for capture, state in enumerate(("committed", "dropped", "failed")):
            found, wanted = reader.record(capture), record(capture)
            assert found is not None
            assert (found.state, found.step, found.raw_bytes, found.time) == (state, wanted.step, wanted.raw_bytes, 1.5)
            np.testing.assert_array_equal(found.present, wanted.present)
            np.testing.assert_array_equal(found.crcs, np.where(wanted.present, wanted.crcs, 0))
            assert reader.head(capture) == RecordHead(state, capture, wanted.step, 1.5)
        assert reader.record(3) is None and reader.head(3) is None and reader.record(-1) is None
        assert reader.last() == 2


def test_a_rank_without_chunks_journals_too(tmp_path: Path) -> None:
    """A rank that owns nothing has records without checksums."""
    writer = JournalWriter(tmp_path / "j", 0, 0, NONCE, 0)
    empty = np.zeros(0, np.uint32)
    writer.write(record(0, crcs=empty, present=empty.astype(np.bool_)))
    writer.close()
    with JournalReader(tmp_path / "j") as reader:
        found = reader.record(0)
        assert found is not None and found.crcs.shape == found.present.shape == (0,)


def test_holes_are_no_records(writer: JournalWriter) -> None:
    """A slot that was jumped over is None, neither torn nor damaged."""
    writer.write(record(4))
    with JournalReader(writer.path) as reader:
        assert [reader.record(k) is None for k in range(5)] == [True] * 4 + [False]
        assert not any(reader.torn(k) for k in range(5))
        assert reader.last() == 4 and reader.slots == 5


def test_an_open_reader_sees_the_file_grow(writer: JournalWriter) -> None:
    """A reader opened on an empty journal finds records and the closed mark as they come."""
    with JournalReader(writer.path) as reader:
        assert reader.last() == -1 and reader.record(0) is None and reader.closed is None
        writer.write(record(0))
        assert reader.last() == 0
        writer.write(record(1))
        assert reader.record(1) is not None
        writer.mark_closed(2, 30, 99.5)
        assert reader.closed == ClosedMark(captures=2, rows=30, time=99.5)


@pytest.mark.parametrize("kept", [1, 63, 64, 70, SIZE - 1])
def test_a_cut_last_record_is_torn(writer: JournalWriter, kept: int) -> None:
    """A last record of which only the first bytes arrived is no record, and says so."""
    writer.write(record(0))
    writer.write(record(1))
    os.truncate(writer.path, 128 + SIZE + kept)
    with JournalReader(writer.path) as reader:
        assert reader.record(1) is None and reader.head(1) is None
        assert reader.torn(1) and not reader.torn(0) and not reader.torn(2)
        assert reader.last() == 0 and reader.slots == 2


def test_a_mismatching_last_record_is_torn(writer: JournalWriter) -> None:
    """A last record with a wrong byte is taken as not written to the end."""
    writer.write(record(0))
    writer.write(record(1))
    flip(writer.path, 128 + SIZE + 70)
    with JournalReader(writer.path) as reader:
        assert reader.record(1) is None and reader.torn(1) and reader.last() == 0


@pytest.mark.parametrize("at", [0, 4, 8, 20, 70, 110, SIZE - 1])
def test_a_mismatching_record_in_the_middle_is_damage(writer: JournalWriter, at: int) -> None:
    """A wrong byte anywhere in an earlier record is an error naming file and capture, never absence."""
    for capture in range(3):
        writer.write(record(capture))
    flip(writer.path, 128 + SIZE + at)
    with JournalReader(writer.path) as reader:
        with pytest.raises(DamagedError, match=r"r00005: the record of capture 1 is not"):
            reader.record(1)
        assert not reader.torn(1)
        assert reader.record(0) is not None and reader.record(2) is not None


def test_a_record_in_the_wrong_slot_is_damage(writer: JournalWriter) -> None:
    """A whole and sound record that lies in another capture's slot is not served for it."""
    for capture in range(3):
        writer.write(record(capture))
    data = bytearray(writer.path.read_bytes())
    data[128 : 128 + SIZE] = data[128 + SIZE : 128 + 2 * SIZE]
    writer.path.write_bytes(data)
    with JournalReader(writer.path) as reader:
        for read in (reader.record, reader.head):
            with pytest.raises(DamagedError, match="capture 0"):
                read(0)


def test_damage_before_a_torn_tail_still_counts(writer: JournalWriter) -> None:
    """`last` passes over the torn record only, so that the damaged one before it gets reported."""
    for capture in range(3):
        writer.write(record(capture))
    flip(writer.path, 128 + SIZE + 20)
    flip(writer.path, 128 + 2 * SIZE + 20)
    with JournalReader(writer.path) as reader:
        assert reader.last() == 1
        with pytest.raises(DamagedError):
            reader.record(1)


def test_last_reads_the_end_only(writer: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the last record of many takes a few reads."""
    for capture in range(200):
        writer.write(record(capture))
    with JournalReader(writer.path) as reader:
        reads, real = [], os.pread
        monkeypatch.setattr(os, "pread", lambda *a: reads.append(a) or real(*a))
        assert reader.last() == 199
        assert len(reads) <= 3


def test_a_journal_is_created_once(writer: JournalWriter) -> None:
    """A second writer of the same rank is refused and the first one's records stay."""
    writer.write(record(0))
    with pytest.raises(StoreError, match=r"r00005 exists already .* rank 5"):
        JournalWriter(writer.path, 5, CHUNKS, NONCE, 77)
    with JournalReader(writer.path) as reader:
        assert reader.last() == 0


def test_a_missing_journal_says_so(tmp_path: Path) -> None:
    """No file is a StoreError with ENOENT naming it."""
    with pytest.raises(StoreError, match=r"r00000: No such file") as caught:
        JournalReader(tmp_path / "r00000")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("data", [b"", b"GTJOURN1", b"x" * 300])
def test_what_is_no_journal_is_damage(tmp_path: Path, data: bytes) -> None:
    """An empty, cut or foreign file is refused when opened."""
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(DamagedError, match="not a gradtap journal"):
        JournalReader(tmp_path / "j")


def test_a_damaged_header_or_closed_mark_is_damage(writer: JournalWriter) -> None:
    """A wrong byte in the header or in the closed mark is an error."""
    writer.mark_closed(0, 0, 1.0)
    flip(writer.path, 70)
    with JournalReader(writer.path) as reader, pytest.raises(DamagedError, match="closed mark"):
        _ = reader.closed
    flip(writer.path, 20)
    with pytest.raises(DamagedError, match="header"):
        JournalReader(writer.path)


def test_a_newer_journal_is_refused_by_version(writer: JournalWriter) -> None:
    """A sound header of version 2 asks for a newer gradtap."""
    data = bytearray(writer.path.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    data[60:64] = struct.pack("<I", crc32c(bytes(data[:60])))
    writer.path.write_bytes(data)
    with pytest.raises(FormatVersionError, match=r"version 2.*pip install --upgrade gradtap"):
        JournalReader(writer.path)


def test_a_failed_record_write_is_reported(writer: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full is a StoreError naming the journal."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StoreError, match="r00005: No space left"):
        writer.write(record(0))


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 0x5A]))
