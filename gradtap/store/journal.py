"""A rank's journal: one fixed-size record for each capture, which is what commits it.

    [static header, 64 bytes][closed block, 64 bytes, zero while open][record of capture 0][record of capture 1]...

A record says what became of the capture and holds the crc32c of every chunk written. A slot of zeros is a hole: the
rank has said nothing. Whether a capture is complete over all ranks is not known here.
"""

from __future__ import annotations

import os
import struct
import time as clock
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradtap.encode.checksum import crc32c
from gradtap.errors import DamagedError, FormatVersionError, StoreError
from gradtap.store import files

RecordState = Literal["committed", "dropped", "failed"]

VERSION = 1
HEADER = struct.Struct("<8s4I16sI16xI")
CLOSED = struct.Struct("<8sqqd28xI")
HEAD = struct.Struct("<IIqqQQdIIQ")
RECORDS_AT = HEADER.size + CLOSED.size

_HEADER_MAGIC = b"GTJOURN1"
_CLOSED_MAGIC = b"GTCLOSED"
_RECORD_MAGIC = 0x4C4A5447
_STATES: dict[RecordState, int] = {"committed": 1, "dropped": 2, "failed": 3}
_NAMES: dict[int, RecordState] = {number: name for name, number in _STATES.items()}
_CRC = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JournalRecord:
    """What one rank says of one capture.

    `raw_bytes` and `stored_bytes` count this rank's chunks before and after encoding; `time` is in Unix seconds.
    `crcs`: uint32 `[chunks]`, crc32c of each stored chunk body by `ChunkPlan.slot`, 0 where it is not present.
    `present`: bool `[chunks]`, False for a chunk that the selection left out.
    """

    capture: int
    step: int
    state: RecordState
    raw_bytes: int
    stored_bytes: int
    time: float
    crcs: NDArray[np.uint32]
    present: NDArray[np.bool_]


class RecordHead(NamedTuple):
    """The part of a record that needs no checksums; `time` in Unix seconds."""

    state: RecordState
    capture: int
    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHeader:
    """Whose journal it is. `nonce` is hex; `plan_crc` is the crc32c of the plan's canonical JSON."""

    rank: int
    chunks: int
    nonce: str
    plan_crc: int

    @property
    def record_size(self) -> int:
        """Bytes of one record."""
        return record_size(self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedMark:
    """How far a rank came: highest capture number + 1, ledger rows, and when it closed (Unix seconds)."""

    captures: int
    rows: int
    time: float


def record_size(chunks: int) -> int:
    """Bytes of a record with the checksums of `chunks` chunks: a multiple of 16."""
    return -(-(HEAD.size + 4 * chunks + -(-chunks // 8) + _CRC) // 16) * 16


class JournalWriter:
    """Writes one rank's journal. Not for several threads at once."""

    def __init__(self, path: Path, rank: int, chunks: int, nonce: str, plan_crc: int, *, sync: bool = False) -> None:
        """Create the journal with no record in it; with `sync` the new file survives a power loss.

        `nonce` is the session's, 32 hex digits. Raises `StoreError` for a path that exists or cannot be written.
        """
        self.path = path
        self.header = JournalHeader(rank=rank, chunks=chunks, nonce=nonce, plan_crc=plan_crc)
        data = _encode_header(self.header) + bytes(CLOSED.size)
        if not files.create_new(path, data, sync=sync):
            raise StoreError(
                f"journal {path} exists already and is never overwritten; two processes claim to be rank {rank}: check "
                "that every rank has its own RANK"
            )
        with files.naming("open journal", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, record: JournalRecord) -> None:
        """Write the record of one capture in its slot. Raises `StoreError`; the capture is then not committed."""
        assert record.capture >= 0
        offset = RECORDS_AT + record.capture * self.header.record_size
        with files.naming("write journal", self.path):
            files.pwrite_all(self._fd, encode_record(record, self.header.chunks), offset)

    def sync(self) -> None:
        """Bring all records to the disk. Raises `StoreError`."""
        with files.naming("sync journal", self.path):
            files.sync_data(self._fd)

    def mark_closed(self, captures: int, rows: int, time: float) -> None:
        """Say that nothing more comes: see `ClosedMark`. On the disk when it returns. Raises `StoreError`."""
        body = CLOSED.pack(_CLOSED_MAGIC, captures, rows, time, 0)[:-_CRC]
        # The mark must not be there before the records that it vouches for.
        self.sync()
        with files.naming("close journal", self.path):
            files.pwrite_all(self._fd, _with_crc(body), HEADER.size)
        self.sync()

    def close(self) -> None:
        """Give the file back, without a closed mark. May be called again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with files.naming("close journal", self.path):
                os.close(fd)


class JournalReader:
    """Reads one rank's journal, also while it grows: every call looks at the file anew."""

    def __init__(self, path: Path) -> None:
        """Open the journal.

        Raises `StoreError` (with `errno` ENOENT where there is none), `DamagedError` for a header that is not what
        was written, `FormatVersionError` for one of a newer gradtap.
        """
        self.path = path
        with files.naming("open journal", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with files.naming("read journal", path):
                self.header = _decode_header(path, files.pread_all(self._fd, RECORDS_AT, 0))
        except BaseException:
            self.close()
            raise
        self._size = self.header.record_size

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back. May be called again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    @property
    def closed(self) -> ClosedMark | None:
        """The closed mark, None while the rank writes or if it never came to an end.

        Raises `DamagedError` for a mark that is not what was written.
        """
        for wait in (0.001, 0.01, None):
            data = self._read(CLOSED.size, HEADER.size)
            if not any(data):
                return None
            magic, captures, rows, time, crc = CLOSED.unpack(data)
            if magic == _CLOSED_MAGIC and crc == crc32c(data[:-_CRC]):
                return ClosedMark(captures=captures, rows=rows, time=time)
            # The rank may be writing the mark at this very moment.
            if wait is not None:
                clock.sleep(wait)
        raise DamagedError(f"{self.path}: the closed mark has a wrong checksum; run `gradtap verify`")

    @property
    def slots(self) -> int:
        """Records that the file has room for, holes, torn and damaged ones included."""
        return -(-max(self._file_size() - RECORDS_AT, 0) // self._size)

    def record(self, capture: int) -> JournalRecord | None:
        """The record of a capture; None for a hole, beyond the end, and for a torn last record (see `torn`).

        Raises `DamagedError` naming the file and the capture for a record that is not what was written.
        """
        last, data = self._slot(capture)
        if not any(data):
            return None
        record = _decode_record(data, capture, self.header.chunks)
        if record is None and not last:
            raise DamagedError(
                f"{self.path}: the record of capture {capture} is not what was written; run `gradtap verify`"
            )
        return record

    def torn(self, capture: int) -> bool:
        """Whether the capture's record is the last of the file and only a part of it was written."""
        last, data = self._slot(capture)
        return last and any(data) and _decode_record(data, capture, self.header.chunks) is None

    def head(self, capture: int) -> RecordHead | None:
        """State, capture, step and time of a record; None as for `record`.

        Compares no checksum, except for the last record of the file. Raises `DamagedError` as `record`.
        """
        if 0 <= capture < self.slots - 1:
            data = self._read(HEAD.size, RECORDS_AT + capture * self._size)
            head = _decode_head(data, capture, self.header.chunks)
            if head is not None:
                return head
        record = self.record(capture)
        if record is None:
            return None
        return RecordHead(record.state, record.capture, record.step, record.time)

    def last(self) -> int:
        """Highest capture that has a record, -1 for none. Holes and a torn last record at the end do not count.

        A damaged record counts, so that `record` gets to report it.
        """
        for capture in reversed(range(self.slots)):
            _, data = self._slot(capture)
            if any(data) and not self.torn(capture):
                return capture
        return -1

    def _slot(self, capture: int) -> tuple[bool, bytes]:
        # The size first: a slot that is not the last by then was written in full before its successor was begun.
        size = self._file_size()
        at = RECORDS_AT + capture * self._size
        if capture < 0 or at >= size:
            return False, b""
        return at + self._size >= size, self._read(self._size, at)

    def _file_size(self) -> int:
        with files.naming("read journal", self.path):
            return os.fstat(self._fd).st_size

    def _read(self, size: int, offset: int) -> bytes:
        with files.naming("read journal", self.path):
            return files.pread_all(self._fd, size, offset)


def _with_crc(body: bytes) -> bytes:
    return body + crc32c(body).to_bytes(_CRC, "little")


def _encode_header(header: JournalHeader) -> bytes:
    nonce = bytes.fromhex(header.nonce)
    assert len(nonce) == 16, f"a nonce is 32 hex digits, not {header.nonce!r}"
    fields = (VERSION, header.rank, header.record_size, header.chunks, nonce, header.plan_crc, 0)
    return _with_crc(HEADER.pack(_HEADER_MAGIC, *fields)[:-_CRC])


def _decode_header(path: Path, data: bytes) -> JournalHeader:
    if len(data) < RECORDS_AT or not data.startswith(_HEADER_MAGIC[:-1]):
        raise DamagedError(f"{path} is not a gradtap journal, or its first bytes are lost; run `gradtap verify`")
    magic, version, rank, size, chunks, nonce, plan_crc, crc = HEADER.unpack(data[: HEADER.size])
    if crc != crc32c(data[: HEADER.size - _CRC]):
        raise DamagedError(f"{path}: the header has a wrong checksum; run `gradtap verify`")
    if magic != _HEADER_MAGIC or version != VERSION:
        raise FormatVersionError(
            f"{path} is a journal of version {version}, this gradtap reads version {VERSION}; "
            "install a newer one: pip install --upgrade gradtap"
        )
    if size != record_size(chunks):
        raise DamagedError(f"{path}: records of {size} bytes do not fit {chunks} chunks; run `gradtap verify`")
    return JournalHeader(rank=rank, chunks=chunks, nonce=nonce.hex(), plan_crc=plan_crc)


def encode_record(record: JournalRecord, chunks: int) -> bytes:
    """The bytes of a record, `record_size(chunks)` of them. `crcs` and `present` must be `chunks` long."""
    assert len(record.crcs) == len(record.present) == chunks, f"{len(record.crcs)} checksums for {chunks} chunks"
    head = HEAD.pack(
        _RECORD_MAGIC,
        _STATES[record.state],
        record.capture,
        record.step,
        record.raw_bytes,
        record.stored_bytes,
        record.time,
        chunks,
        0,
        0,
    )
    crcs = np.where(record.present, record.crcs, 0).astype("<u4").tobytes()
    present = np.packbits(np.asarray(record.present, np.bool_), bitorder="little").tobytes()
    body = head + crcs + present
    return _with_crc(body.ljust(record_size(chunks) - _CRC, b"\0"))


def _decode_head(data: bytes, capture: int, chunks: int) -> RecordHead | None:
    if len(data) < HEAD.size:
        return None
    magic, state, number, step, _, _, time, count, _, _ = HEAD.unpack_from(data)
    if magic != _RECORD_MAGIC or number != capture or state not in _NAMES or count != chunks:
        return None
    return RecordHead(_NAMES[state], number, step, time)


def _decode_record(data: bytes, capture: int, chunks: int) -> JournalRecord | None:
    head = _decode_head(data, capture, chunks)
    whole = len(data) == record_size(chunks)
    if head is None or not whole or int.from_bytes(data[-_CRC:], "little") != crc32c(data[:-_CRC]):
        return None
    fields = HEAD.unpack_from(data)
    bits = np.frombuffer(data, np.uint8, offset=HEAD.size + 4 * chunks, count=-(-chunks // 8))
    return JournalRecord(
        capture=capture,
        step=head.step,
        state=head.state,
        raw_bytes=fields[4],
        stored_bytes=fields[5],
        time=head.time,
        crcs=np.frombuffer(data, "<u4", offset=HEAD.size, count=chunks),
        present=cast("NDArray[np.bool_]", np.unpackbits(bits, count=chunks, bitorder="little").astype(np.bool_)),
    )
