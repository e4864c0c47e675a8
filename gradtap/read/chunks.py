"""One stored chunk, read so that damage is never taken for data: place, length, both checksums, then the codec.

A chunk counts as read when its entry points inside the file, its own crc32c holds, and that crc32c is the one that the
owner's journal has for this very chunk of this capture. The last is what finds swapped files and misdirected entries.
Not here: which chunks an answer needs (`assemble`), and which captures are complete (`captures`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.encode.checksum import CRC_BYTES, crc32c, split_crc
from gradtap.encode.codecs import ChunkCodec
from gradtap.errors import DamagedError, GradtapError
from gradtap.read.session import Session
from gradtap.store.files import naming, pread_all
from gradtap.store.shard import read_entry
from gradtap.types import ChunkPlan

RETRY_SECONDS = 0.05
FRAME_OVERHEAD = 4096
"""Bytes that a stored chunk may have over its raw size: Blosc adds 16 and a table of block starts, never this much."""


class Handle:
    """An open file. Closed when the last user lets go, so that eviction never closes under a reading thread."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        with naming("read", path):
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


class FileCache:
    """At most `most` files held open for reading, the least recently used let go first. For any thread."""

    def __init__(self, most: int = 64) -> None:
        self._most = max(1, most)
        self._open: OrderedDict[Path, Handle] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, path: Path, *, fresh: bool = False) -> Handle:
        """The open file at `path`; `fresh` opens it anew. Raises `StoreError` (`errno` ENOENT where it is missing)."""
        with self._lock:
            found = None if fresh else self._open.pop(path, None)
            self._open.pop(path, None)
        handle = found or Handle(path)
        with self._lock:
            self._open[path] = handle
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return handle

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._open.clear()


class ChunkReader:
    """Reads the chunks of one session. `reads` counts the chunk bodies read, `last_bytes` has the size of the last."""

    def __init__(self, session: Session, files: FileCache) -> None:
        self.session = session
        self.files = files
        self.reads = 0
        self.last_bytes = 0

    def values(self, chunk: ChunkPlan, capture: int, step: int, crc: int) -> NDArray[Any]:
        """Elements `chunk.start` to `chunk.stop` of the parameter, 1-D, in the array's dtype.

        `crc` is the journal's crc32c of this chunk. Raises `DamagedError` naming file, parameter, step and cure.
        """
        body = self.body(chunk, capture, step, crc)
        array = self.session.plan.arrays[chunk.array]
        codec = ChunkCodec(self.session.head.codec, np.dtype(array.dtype).itemsize)
        try:
            return codec.decode(body, chunk.numel)[: chunk.stop - chunk.start]
        except DamagedError as error:
            raise self.damage(chunk, capture, step, f"its checksums hold, but {error}") from error

    def body(self, chunk: ChunkPlan, capture: int, step: int, crc: int) -> memoryview:
        """The codec's bytes of one chunk, without the 4 bytes of checksum, all checks done but decoding."""
        try:
            return self._body(chunk, capture, step, crc, deep=True, fresh=False)
        except DamagedError:
            # A file may have grown since it was opened; another client of a network file system may see an entry
            # before the bytes that it points at. Once, and only where somebody may be writing.
            if self.session.head.closed is None:
                time.sleep(RETRY_SECONDS)
        return self._body(chunk, capture, step, crc, deep=True, fresh=True)

    def probe(self, chunk: ChunkPlan, capture: int, step: int, crc: int) -> None:
        """As `body`, but reads the chunk's last 4 bytes alone: a damaged body with its old checksum passes."""
        self._body(chunk, capture, step, crc, deep=False, fresh=False)

    def path(self, chunk: ChunkPlan, capture: int) -> Path:
        """The shard file that holds a chunk of a capture."""
        array = self.session.plan.arrays[chunk.array]
        return self.session.paths.shard(array.name, capture // array.time, chunk.column)

    def damage(self, chunk: ChunkPlan, capture: int, step: int, what: str) -> DamagedError:
        """The error for a chunk that is not what was committed."""
        plan = self.session.plan
        name = plan.params[plan.arrays[chunk.array].param].name
        return DamagedError(
            f"{self.path(chunk, capture)} (chunk {chunk.entry} of capture {capture}): {what}; parameter {name!r}, step "
            f"{step}, elements {chunk.start} to {chunk.stop}, written by rank {chunk.owner}; nothing was read in its "
            f"place: run `gradtap verify --deep {self.session.run}` to see all that is damaged"
        )

    def _body(self, chunk: ChunkPlan, capture: int, step: int, crc: int, *, deep: bool, fresh: bool) -> memoryview:
        array = self.session.plan.arrays[chunk.array]
        path = self.path(chunk, capture)
        try:
            with naming("read", path):
                handle = self.files.get(path, fresh=fresh)
                found = read_entry(handle.fd, array.time, array.entries, capture % array.time, chunk.entry, name=path)
                size = os.fstat(handle.fd).st_size
        except DamagedError as error:
            raise self.damage(chunk, capture, step, str(error)) from error
        except GradtapError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self.damage(chunk, capture, step, "the file is missing") from error
            raise
        if found is None:
            raise self.damage(chunk, capture, step, f"the entry is empty, the journal has crc32c {crc:08x} for it")
        self._check_range(chunk, capture, step, found, size)
        offset, nbytes = found
        skip = 0 if deep else nbytes - CRC_BYTES
        with naming("read", path):
            data = pread_all(handle.fd, nbytes - skip, offset + skip)
        self.reads += 1
        self.last_bytes = nbytes
        if len(data) != nbytes - skip:
            raise self.damage(chunk, capture, step, f"{nbytes} bytes from {offset} on run past the end of the file")
        body, stored = split_crc(data)
        if stored != crc:
            raise self.damage(chunk, capture, step, f"the chunk ends with crc32c {stored:08x}, committed was {crc:08x}")
        if deep and (computed := crc32c(body)) != crc:
            raise self.damage(chunk, capture, step, f"the bytes have crc32c {computed:08x}, committed was {crc:08x}")
        return body

    def _check_range(self, chunk: ChunkPlan, capture: int, step: int, found: tuple[int, int], size: int) -> None:
        offset, nbytes = found
        array = self.session.plan.arrays[chunk.array]
        raw = chunk.numel * np.dtype(array.dtype).itemsize
        most = raw + raw // 8 + FRAME_OVERHEAD
        if offset + nbytes > size:
            what = f"the entry points at bytes {offset} to {offset + nbytes}, the file has {size}"
            raise self.damage(chunk, capture, step, what)
        if not CRC_BYTES < nbytes <= most:
            what = f"the entry says {nbytes} bytes for {raw} raw ones; {CRC_BYTES + 1} to {most} are possible"
            raise self.damage(chunk, capture, step, what)
