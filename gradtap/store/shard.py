"""Zarr v3 shards that grow in place: index at the start, chunk bodies appended, entries written last.

    [index: time x entries pairs <u8 offset, u8 bytes>][bodies in order of arrival]
    once sealed: [padding to 8][mark: b"GTSEALED", u32 crc32c of the index, u32 number of pairs][the index again]

A pair of 2^64-1 twice is an empty entry, which reads as the fill value. A file has one writer; readers may look at
any moment. What the bodies hold, and whether a capture counts, is not known here.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradtap.encode.checksum import crc32c
from gradtap.errors import DamagedError, StoreError
from gradtap.store import files

EMPTY = 2**64 - 1
PAIR = struct.Struct("<QQ")
MARK = struct.Struct("<8sII")
MAGIC = b"GTSEALED"


def read_index(
    source: int | files.Buffer, time: int, entries: int, *, name: Path | str = "shard"
) -> NDArray[np.uint64]:
    """The index of an open file or of its first bytes: uint64 `[time * entries, 2]`, offsets and sizes in bytes.

    Entry e of capture-in-shard t is row `t * entries + e`; empty entries are `EMPTY` twice.
    Raises `DamagedError` naming `name` where the bytes are too few.
    """
    size = time * entries * PAIR.size
    data = files.pread_all(source, size, 0) if isinstance(source, int) else source
    if len(data) < size:
        raise DamagedError(f"{name} is {len(data)} bytes long, its index alone takes {size}; run `gradtap verify`")
    return np.frombuffer(data, "<u8", count=size // 8).reshape(-1, 2)


def read_entry(
    fd: int, time: int, entries: int, t: int, e: int, *, name: Path | str = "shard"
) -> tuple[int, int] | None:
    """Offset and size in bytes of one chunk of an open shard file, None where the entry is empty.

    Raises `DamagedError` naming `name` for an entry that no writer makes; a caller on a live file may try again.
    Whether the range lies within the file shows when it is read.
    """
    data = files.pread_all(fd, PAIR.size, (t * entries + e) * PAIR.size)
    if len(data) < PAIR.size:
        raise DamagedError(f"{name} ends within its index; run `gradtap verify`")
    offset, nbytes = PAIR.unpack(data)
    if offset == EMPTY and nbytes == EMPTY:
        return None
    if offset < time * entries * PAIR.size or offset + nbytes >= 2**63:
        raise DamagedError(f"{name}: entry {e} of capture {t} points at {offset}+{nbytes}; run `gradtap verify`")
    return offset, nbytes


def seal_crc(fd: int, time: int, entries: int) -> int | None:
    """The crc32c of the index that the sealed mark of a file holds, None where there is no mark."""
    size = time * entries * PAIR.size
    at = os.fstat(fd).st_size - size - MARK.size
    if at < size:
        return None
    magic, crc, count = MARK.unpack(files.pread_all(fd, MARK.size, at))
    return int(crc) if magic == MAGIC and count == time * entries else None


def is_sealed(fd: int, time: int, entries: int) -> bool:
    """Whether a file carries a sealed mark and an intact copy of the index at its end.

    The index at the start may still have been damaged since: compare its crc32c with `seal_crc`.
    """
    crc = seal_crc(fd, time, entries)
    size = time * entries * PAIR.size
    return crc is not None and crc32c(files.pread_all(fd, size, os.fstat(fd).st_size - size)) == crc


class ShardFile:
    """One shard file and its only writer. Made by `create`; not for several threads at once.

    It may be closed and goes on where it was at the next append: the end and the entries set are kept here.
    """

    def __init__(self, path: Path, stat: os.stat_result, *, time: int, entries: int, order_sync: bool) -> None:
        """Stand for an empty shard that is already at `path`, the file of `stat`. Use `create`."""
        self.path = path
        self.time = time
        self.entries = entries
        self.end = time * entries * PAIR.size
        self.order_sync = order_sync
        self.dirty = True
        self.sealed = False
        self._fd: int | None = None
        self._identity = _identity(stat)
        self._set = bytearray(time * entries)

    @classmethod
    def create(cls, path: Path, *, time: int, entries: int, order_sync: bool = False) -> ShardFile:
        """A new shard of `time` captures with `entries` chunks each, all empty, complete from its first moment.

        `order_sync` brings bodies to the disk before entries that point at them, for other clients of a network
        file system. Raises `StoreError` for a path that exists (it is never overwritten) or cannot be written.
        """
        with files.naming("create shard", path):
            fd, temp = files.open_temp(path)
            try:
                files.pwrite_all(fd, b"\xff" * (time * entries * PAIR.size), 0)
                if not files.publish_new(temp, path):
                    raise StoreError(
                        f"shard {path} exists already and is never overwritten; each start of a run writes a session "
                        "of its own, so another program put it there: move it away"
                    )
                # Opened again under its own name at the first append: tools then do not list it as deleted.
                return cls(path, os.fstat(fd), time=time, entries=entries, order_sync=order_sync)
            finally:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)

    @property
    def is_open(self) -> bool:
        """Whether it holds a file descriptor."""
        return self._fd is not None

    def append(self, t: int, chunks: Mapping[int, bytes]) -> int:
        """Write stored chunk bytes, by entry, of capture-in-shard `t`; bytes written.

        Bodies go first. When they fail nothing points at them and the next append writes over them.
        Raises `StoreError` where writing fails, `DamagedError` when another file has taken this one's place.
        """
        assert not self.sealed, f"{self.path} is sealed"
        assert 0 <= t < self.time, f"capture {t} is outside of a shard of {self.time}"
        order = sorted(chunks)
        assert not order or (order[0] >= 0 and order[-1] < self.entries), f"{order} outside of {self.entries} entries"
        assert not any(self._set[t * self.entries + e] for e in order), f"capture {t} of {self.path} was written before"
        if not order:
            return 0
        fd = self._open()
        with files.naming("append to shard", self.path):
            start = self.end
            self.dirty = True
            files.pwritev_all(fd, [chunks[e] for e in order], start)
            if self.order_sync:
                files.sync_data(fd)
            # From here on entries may point at these bodies, even if writing the entries stops half-way.
            self.end = start + sum(len(chunks[e]) for e in order)
            self._write_entries(fd, t, order, chunks, start)
        return self.end - start

    def _write_entries(self, fd: int, t: int, order: list[int], chunks: Mapping[int, bytes], start: int) -> None:
        run: list[bytes] = []
        for i, e in enumerate(order):
            run.append(PAIR.pack(start, len(chunks[e])))
            start += len(chunks[e])
            if i + 1 == len(order) or order[i + 1] != e + 1:
                first = t * self.entries + e + 1 - len(run)
                files.pwrite_all(fd, b"".join(run), first * PAIR.size)
                self._set[first : first + len(run)] = b"\x01" * len(run)
                run = []

    def holds(self, t: int) -> bool:
        """Whether every entry of capture-in-shard `t` is set."""
        return all(self._set[t * self.entries : (t + 1) * self.entries])

    def sync(self) -> None:
        """Bring all appended so far to the disk. Raises `StoreError`, `DamagedError` as `append`."""
        fd = self._open()
        with files.naming("sync shard", self.path):
            files.sync_data(fd)
        self.dirty = False

    def is_ours(self) -> bool:
        """Whether the file at the path is still the one that this object writes."""
        try:
            return _identity(os.stat(self.path)) == self._identity
        except FileNotFoundError:
            return False

    def seal(self) -> None:
        """Finish the file: to the disk, the mark and a copy of the index at the end, to the disk again.

        Sealing twice changes nothing. Raises `DamagedError` where another program rewrote the file, `StoreError`
        where writing fails.
        """
        if self.sealed:
            return
        self.sync()
        self._refuse_foreign()
        fd = self._open()
        with files.naming("seal shard", self.path):
            index = files.pread_all(fd, self.time * self.entries * PAIR.size, 0)
            found = read_index(index, self.time, self.entries)[:, 0] != EMPTY
            if found.tobytes() != self._set:
                raise DamagedError(f"the index of {self.path} is not as written: another program changed the file")
            at = -(-self.end // 8) * 8
            mark = MARK.pack(MAGIC, crc32c(index), self.time * self.entries)
            # A failed append may have left bytes past the end; the copy must be the last thing in the file.
            os.ftruncate(fd, self.end)
            files.pwritev_all(fd, (mark, index), at)
            files.sync_data(fd)
        self.sealed = True

    def close(self) -> None:
        """Give the file descriptor back. Does not seal and does not sync."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with files.naming("close shard", self.path):
                os.close(fd)

    def _open(self) -> int:
        if self._fd is None:
            with files.naming("open shard", self.path):
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            if _identity(os.fstat(fd)) != self._identity:
                os.close(fd)
                self._refuse_foreign()
            self._fd = fd
        return self._fd

    def _refuse_foreign(self) -> None:
        if not self.is_ours():
            raise DamagedError(
                f"{self.path} is no longer the file that this job writes: another program rewrote it. Open a live "
                "store for reading only; run `gradtap verify` to see what is lost"
            )


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


class ShardSet:
    """The shard files that one rank writes, at most `max_open` of them open. Not for several threads at once."""

    def __init__(self, max_open: int, *, order_sync: bool = False) -> None:
        """An empty set; `order_sync` as in `ShardFile.create`."""
        self._max_open = max(1, max_open)
        self._order_sync = order_sync
        self._files: dict[Path, ShardFile] = {}
        self._open: dict[Path, None] = {}
        self._new_names: set[Path] = set()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files created and not sealed yet, in order of creation."""
        return tuple(self._files)

    def get(self, path: Path, time: int, entries: int) -> ShardFile:
        """The file at `path`, created where this set has not had it; its folder too.

        Raises `StoreError` for a path that exists but is not of this set, or cannot be written.
        """
        file = self._files.get(path)
        if file is None:
            if not path.parent.is_dir():
                files.make_dirs(path.parent)
            self._make_room()
            file = ShardFile.create(path, time=time, entries=entries, order_sync=self._order_sync)
            self._files[path] = file
            self._new_names.add(path.parent)
        assert (file.time, file.entries) == (time, entries), f"{path} was created as {file.time} x {file.entries}"
        self._touch(path)
        return file

    def sync_all(self) -> None:
        """Bring every file appended to since the last call, and the names of new ones, to the disk.

        Raises `StoreError`, `DamagedError` as `ShardFile.sync`.
        """
        for file in self._files.values():
            if file.dirty:
                was_open = file.is_open
                file.sync()
                if not was_open:
                    file.close()
        for folder in tuple(self._new_names):
            files.sync_dir(folder)
            self._new_names.discard(folder)

    def seal(self, path: Path | str) -> None:
        """Seal the file at `path`, close it and forget it. Raises as `ShardFile.seal`; it is then kept."""
        path = Path(path)
        self._files[path].seal()
        self._files.pop(path).close()
        self._open.pop(path, None)

    def close(self, *, seal: bool = False) -> None:
        """Give all file descriptors back; with `seal`, seal every file first.

        All are tried. Raises the first failure, as `ShardFile.seal`.
        """
        failure: StoreError | None = None
        for path in self.paths if seal else ():
            try:
                self.seal(path)
            except StoreError as error:
                failure = failure or error
                self._files[path].close()
        for file in self._files.values():
            file.close()
        self._open.clear()
        if failure is not None:
            raise failure

    def _touch(self, path: Path) -> None:
        if path in self._open:
            del self._open[path]
        else:
            self._make_room()
        self._open[path] = None

    def _make_room(self) -> None:
        while len(self._open) >= self._max_open:
            oldest = next(iter(self._open))
            self._files[oldest].close()
            del self._open[oldest]
