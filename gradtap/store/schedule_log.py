"""The schedule log of a session: append-only JSON lines that say which steps are captured. One rank writes it.

What an entry means is in `gradtap.plan.schedule`; here are only its bytes, and which of them count.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from gradtap.encode.checksum import crc32c
from gradtap.errors import DamagedError, StoreError
from gradtap.plan.schedule import Entry, Schedule, entry_from_json, entry_to_json
from gradtap.plan.serial import canonical_json
from gradtap.store import files


def append_entry(path: Path, entry: Entry) -> None:
    """Add one entry at the end, the file is created where it is missing. On the disk when it returns.

    Raises `StoreError` where it cannot be written in full; the log is then as it was. Raises `DamagedError` where the
    log ends in the middle of a line, after which nothing may be added.
    """
    fields = entry_to_json(entry)
    line = canonical_json({"entry": fields, "crc": crc32c(canonical_json(fields))}) + b"\n"
    fresh = not path.exists()
    with files.naming("append to", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _append_line(fd, path, line)
        finally:
            os.close(fd)
    if fresh:
        files.sync_dir(path.parent)


def _append_line(fd: int, path: Path, line: bytes) -> None:
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        raise DamagedError(f"{path} ends in the middle of a line, so nothing is added; run `gradtap repair`")
    try:
        if os.write(fd, line) != len(line):
            raise StoreError(f"cannot append to {path}: only a part of the line fitted; free some space there")
        files.sync_data(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def read_schedule(path: Path) -> Schedule | None:
    """The schedule so far, None where no entry has been written yet. A torn last line is not an entry yet.

    Raises `StoreError` for a log that cannot be read, `DamagedError` naming file and line for one that is not what
    was written.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise files.store_error("read", path, error) from error
    # What follows the last newline is nothing, or a line that is still being written.
    lines = data.split(b"\n")[:-1]
    entries = []
    for number, line in enumerate(lines, 1):
        fields = _checked(line)
        if fields is None:
            if number == len(lines) and data.endswith(b"\n"):
                break
            raise DamagedError(f"{path}: line {number} is not what was written; run `gradtap verify`")
        entries.append(_entry(path, number, fields))
    return _schedule(path, entries) if entries else None


def _checked(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
        fields = value["entry"]
        good = isinstance(fields, dict) and value["crc"] == crc32c(canonical_json(fields))
    except (ValueError, KeyError, TypeError):
        return None
    return fields if good else None


def _entry(path: Path, number: int, fields: dict[str, Any]) -> Entry:
    try:
        return entry_from_json(fields)
    except (DamagedError, ValueError) as error:
        raise DamagedError(f"{path}: line {number} is not an entry of a schedule: {error}") from error


def _schedule(path: Path, entries: list[Entry]) -> Schedule:
    try:
        return Schedule(tuple(entries))
    except ValueError as error:
        raise DamagedError(f"{path}: the entries make no schedule ({error}); run `gradtap verify`") from error
