"""Row arrays: ledger columns, summaries, `_step` and `_time`. One row for each capture or step on axis 0.

"append" arrays are shards whose inner chunks are single rows, never rewritten. "replace" arrays have plain chunks of
many small rows; the chunk is written anew by rename. What the columns mean is not known here.
"""

from __future__ import annotations

import contextlib
import math
import os
import time as clock
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numcodecs import Blosc
from numpy.typing import ArrayLike, NDArray

from gradtap.encode.checksum import crc32c, split_crc, with_crc
from gradtap.errors import DamagedError, StoreError
from gradtap.store import files
from gradtap.store.shard import EMPTY, PAIR, ShardSet

INNER_BYTES = 4 * 2**20
"""Most raw bytes of one chunk of an append array."""

REPLACE_BYTES = 64 * 2**10
"""Most raw bytes of one chunk of a replace array: it is written whole each time."""

RETRY_SECONDS = 0.05
"""After this a row that did not read is read once more: another client of a network file system may see an entry
before the bytes that it points at, or a half of an entry."""

_SPAN_SLACK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """One row array.

    `path` within the group, such as "_ledger/r00000/step". `dtype` is a NumPy and Zarr name. `fill` is what an
    unwritten row reads as. `axis` says what axis 0 counts. `time` is the most rows in one chunk file, a power of
    two. `dims` are the names of all axes, axis 0 included. `compress`: chunks go through Blosc.

    A writer leaves `chunk` out and gets today's sizes; a reader has it from the array's own metadata (see
    `gradtap.store.metadata.row_spec`), so that a store written with other sizes reads as well.
    """

    path: str
    row_shape: tuple[int, ...]
    dtype: str
    fill: float | int
    mode: Literal["append", "replace"]
    axis: Literal["capture", "row"]
    time: int
    dims: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    compress: bool = False
    chunk: tuple[int, ...] | None = None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype on disk: little endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def row_bytes(self) -> int:
        """Raw bytes of one row."""
        return math.prod(self.row_shape) * self.stored_dtype.itemsize

    @property
    def rows(self) -> int:
        """Rows in one chunk file: `time`, for a replace array no more than fit its limit."""
        if self.mode == "append" or self.chunk is not None:
            return self.time
        most = max(1, REPLACE_BYTES // max(self.row_bytes, 1))
        return min(self.time, 1 << (most.bit_length() - 1))

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of the part of a row that one chunk holds: whole trailing axes, at most `INNER_BYTES`."""
        if self.chunk is not None:
            return self.chunk
        if self.mode == "replace":
            return self.row_shape
        inner = list(self.row_shape)
        for axis, size in enumerate(inner):
            if math.prod(inner) * self.stored_dtype.itemsize <= INNER_BYTES:
                break
            below = math.prod(inner[axis + 1 :]) * self.stored_dtype.itemsize
            pieces = -(-size // max(1, INNER_BYTES // below))
            inner[axis] = -(-size // pieces)
        return tuple(inner)

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis of a row."""
        return tuple(-(-n // c) for n, c in zip(self.row_shape, self.inner, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """Shape of a row padded to whole chunks."""
        return tuple(g * c for g, c in zip(self.grid, self.inner, strict=True))

    @property
    def entries(self) -> int:
        """Chunks of one row."""
        return math.prod(self.grid)

    def file(self, zarr_root: Path, number: int) -> Path:
        """The chunk file with rows `number * rows` on."""
        return zarr_root / self.path / ".".join(["c", str(number), *("0" for _ in self.row_shape)])

    def blank(self, rows: int) -> NDArray[Any]:
        """`rows` rows of the fill value, `[rows, *row_shape]`."""
        return np.full((rows, *self.row_shape), self.fill, self.stored_dtype)

    def boxes(self) -> Iterator[tuple[slice, ...]]:
        """For each chunk of a row, in order of its entry, the part of the row that it holds."""
        for place in np.ndindex(*self.grid):
            yield tuple(
                slice(p * c, min((p + 1) * c, n)) for p, c, n in zip(place, self.inner, self.row_shape, strict=True)
            )


def row_blosc() -> Blosc:
    """The compressor of compressed rows (histograms): counts are small numbers in wide integers."""
    return Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=0)


class AppendRows:
    """Writes one append array. Each row once, in about ascending order. Not for several threads at once.

    A file is sealed when the second file after it is begun: late rows of the one before still find it open.
    """

    def __init__(self, zarr_root: Path, spec: RowSpec, shards: ShardSet) -> None:
        """Files are created in and owned by `shards` as rows come."""
        assert spec.mode == "append"
        self.spec = spec
        self._root = zarr_root
        self._shards = shards
        self._boxes = tuple(spec.boxes())
        self._entries = spec.entries
        self._blosc = row_blosc() if spec.compress else None
        self._number = -1

    def write(self, row: int, values: ArrayLike) -> int:
        """Append one row, `[*row_shape]`; bytes written, 0 where the row is written already.

        Raises `StoreError` where it cannot be written.
        """
        spec = self.spec
        number, t = divmod(row, spec.time)
        array = np.asarray(values, spec.stored_dtype)
        assert array.shape == spec.row_shape, f"{spec.path}: a row of {array.shape}, {spec.row_shape} expected"
        if number > self._number:
            self._number = number
            self._seal(number - 2)
        shard = self._shards.get(spec.file(self._root, number), spec.time, self._entries)
        if shard.holds(t):
            return 0
        return shard.append(t, {e: self._encode(array[box]) for e, box in enumerate(self._boxes)})

    def _seal(self, number: int) -> None:
        path = self.spec.file(self._root, number)
        if number >= 0 and path in self._shards.paths:
            # The file stays in the set, and closing the set tries again and reports: a row must not be lost for it.
            with contextlib.suppress(StoreError):
                self._shards.seal(path)

    def _encode(self, part: NDArray[Any]) -> bytes:
        spec = self.spec
        if part.shape != spec.inner:
            padded = np.full(spec.inner, spec.fill, spec.stored_dtype)
            padded[tuple(slice(n) for n in part.shape)] = part
            part = padded
        body = self._blosc.encode(np.ascontiguousarray(part).reshape(-1)) if self._blosc else part.tobytes()
        return with_crc(body)[0]


class ReplaceRows:
    """Writes one replace array, the chunk in work kept in memory. Not for several threads at once."""

    def __init__(self, zarr_root: Path, spec: RowSpec) -> None:
        """Nothing is read or written before the first `write`."""
        assert spec.mode == "replace"
        self.spec = spec
        self._root = zarr_root
        self._rows = spec.rows
        self._chunks: dict[int, NDArray[Any]] = {}
        self._dirty: set[int] = set()

    def write(self, rows: Mapping[int, ArrayLike]) -> None:
        """Set rows in memory; `flush` brings them to the file.

        Raises `DamagedError` or `StoreError` where a chunk written before cannot be read.
        """
        for row, value in rows.items():
            number, t = divmod(row, self._rows)
            if number not in self._chunks:
                self._chunks[number] = _load(self._root, self.spec, number)
            self._chunks[number][t] = value
            self._dirty.add(number)

    def flush(self, *, sync: bool = False) -> None:
        """Write the changed chunks, lowest rows first. Raises `StoreError`; what is unwritten stays for the next."""
        for number in sorted(self._dirty):
            path = self.spec.file(self._root, number)
            if not path.parent.is_dir():
                files.make_dirs(path.parent)
            files.write_atomic(path, with_crc(self._chunks[number].tobytes())[0], sync=sync)
            self._dirty.discard(number)
        newest = max(self._chunks, default=0)
        self._chunks = {n: c for n, c in self._chunks.items() if n == newest}


def _load(root: Path, spec: RowSpec, number: int) -> NDArray[Any]:
    path = spec.file(root, number)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return spec.blank(spec.rows)
    except OSError as error:
        raise files.store_error("read", path, error) from error
    what = f"rows {number * spec.rows} on"
    blosc = row_blosc() if spec.compress else None
    body = _unpacked(_checked(data, path, what), blosc, spec.rows * spec.row_bytes, path, what)
    return np.frombuffer(body, spec.stored_dtype).reshape(spec.rows, *spec.row_shape).copy()


def read_rows(zarr_root: Path, spec: RowSpec, start: int, stop: int, *, retry: bool = True) -> NDArray[Any]:
    """Rows `start` to `stop`, `[stop - start, *row_shape]` of the spec's dtype; the fill where none is stored.

    `retry`: what does not read is tried once more, as somebody may be writing; of use in an open session only.
    Raises `DamagedError` naming the file for bytes that are not what was written, `StoreError` for a file that cannot
    be read.
    """
    out = spec.blank(max(stop - start, 0))
    read = _read_shard if spec.mode == "append" else _read_chunk
    size = spec.rows
    for number in range(start // size, -(-stop // size)) if stop > start else ():
        first, last = max(start, number * size), min(stop, (number + 1) * size)
        part = out[first - start : last - start]
        try:
            read(zarr_root, spec, number, first - number * size, part)
        except DamagedError:
            if not retry:
                raise
            clock.sleep(RETRY_SECONDS)
            read(zarr_root, spec, number, first - number * size, part)
    return out


def held_rows(zarr_root: Path, spec: RowSpec, start: int, stop: int) -> NDArray[np.bool_]:
    """Which of the rows `start` to `stop` are stored at all, whatever they hold. Reads no more than indexes.

    A row of a replace array counts as stored where its chunk is: that one does not tell. Raises as `read_rows`.
    """
    held = np.zeros(max(stop - start, 0), bool)
    size = spec.rows
    for number in range(start // size, -(-stop // size)) if stop > start else ():
        first, last = max(start, number * size), min(stop, (number + 1) * size)
        path = spec.file(zarr_root, number)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise files.store_error("read", path, error) from error
        try:
            if spec.mode == "replace":
                held[first - start : last - start] = True
            else:
                with files.naming("read", path):
                    index = _index_rows(fd, path, spec, first - number * size, last - first)
                held[first - start : last - start] = (index != EMPTY).any(axis=1).reshape(last - first, -1).any(axis=1)
        finally:
            os.close(fd)
    return held


def _read_chunk(root: Path, spec: RowSpec, number: int, first: int, out: NDArray[Any]) -> None:
    out[...] = _load(root, spec, number)[first : first + len(out)]


def _read_shard(root: Path, spec: RowSpec, number: int, first: int, out: NDArray[Any]) -> None:
    path = spec.file(root, number)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise files.store_error("read", path, error) from error
    try:
        with files.naming("read", path):
            _read_entries(fd, path, spec, number, first, out)
    finally:
        os.close(fd)


def _read_entries(fd: int, path: Path, spec: RowSpec, number: int, first: int, out: NDArray[Any]) -> None:
    entries = spec.entries
    boxes = tuple(spec.boxes())
    index = _index_rows(fd, path, spec, first, len(out))
    # An entry of which one half is there is torn, or damaged: either way no absence.
    held = np.flatnonzero((index != EMPTY).any(axis=1))
    if not held.size:
        return
    pairs = index[held].tolist()
    low, high = min(o for o, _ in pairs), max(o + n for o, n in pairs)
    if low < spec.time * entries * PAIR.size or high > os.fstat(fd).st_size:
        raise DamagedError(f"{path}: its index points outside of the file; run `gradtap verify`")
    # Rows mostly lie in order, so one read serves all of them.
    together = high - low <= 2 * sum(n for _, n in pairs) + _SPAN_SLACK
    span = memoryview(files.pread_all(fd, high - low, low)) if together else None
    blosc = row_blosc() if spec.compress else None
    for place, (offset, nbytes) in zip(held.tolist(), pairs, strict=True):
        at, e = divmod(place, entries)
        data = span[offset - low : offset - low + nbytes] if span else files.pread_all(fd, nbytes, offset)
        what = f"row {number * spec.time + first + at}"
        part = _decode(spec, _checked(data, path, what), blosc, path, what)
        box = boxes[e]
        out[at, ...][box] = part[tuple(slice(s.stop - s.start) for s in box)]


def _index_rows(fd: int, path: Path, spec: RowSpec, first: int, rows: int) -> NDArray[np.uint64]:
    # Only the entries of these rows: for one row of a file of 4,096 the whole index would be most of what is read.
    row = spec.entries * PAIR.size
    data = files.pread_all(fd, rows * row, first * row)
    if len(data) < rows * row or os.fstat(fd).st_size < spec.time * row:
        raise DamagedError(f"{path} is shorter than its index of {spec.time * row} bytes; run `gradtap verify`")
    return np.frombuffer(data, "<u8").reshape(-1, 2)


def _decode(spec: RowSpec, body: memoryview, blosc: Blosc | None, path: Path, what: str) -> NDArray[Any]:
    raw = _unpacked(body, blosc, math.prod(spec.inner) * spec.stored_dtype.itemsize, path, what)
    return np.frombuffer(raw, spec.stored_dtype).reshape(spec.inner)


def _unpacked(body: memoryview, blosc: Blosc | None, size: int, path: Path, what: str) -> Any:
    # Blosc allocates what its header says: looked at first.
    found = len(body) if blosc is None else int.from_bytes(body[4:8], "little")
    if found != size:
        raise DamagedError(f"{path}: {what} holds {found} bytes, {size} expected; run `gradtap verify`")
    if blosc is None:
        return body
    try:
        return blosc.decode(np.frombuffer(body, np.uint8))
    except (RuntimeError, ValueError) as error:
        raise DamagedError(f"{path}: {what} does not decode ({error}); run `gradtap verify`") from error


def _checked(data: bytes | memoryview, path: Path, what: str) -> memoryview:
    try:
        body, crc = split_crc(data)
    except DamagedError as error:
        raise DamagedError(f"{path}: {what} is cut short; run `gradtap verify`") from error
    if crc32c(body) != crc:
        raise DamagedError(f"{path}: {what} has a wrong checksum; run `gradtap verify`")
    return body
