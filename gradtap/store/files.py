"""Writing and reading whole files so that no failure goes unseen: atomic writes, complete writes, named errors.

What the bytes mean is the business of the other modules of this package.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gradtap.errors import DamagedError, GradtapError, StoreError

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

_IOV_MAX = 1024
"""Buffers that one vectored write takes: the limit of Linux and of macOS."""

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def store_error(action: str, path: Path | str, error: OSError) -> StoreError:
    """A `StoreError` that names the action, the path and the cause, with the cause's `errno` kept."""
    cause = error.strerror or str(error) or type(error).__name__
    made = StoreError(f"cannot {action} {path}: {cause}{_advice(error.errno)}")
    made.errno = error.errno
    return made


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "; free some space there, or point the run at another disk"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "; check who owns the folder and that it is mounted writable"
    if number == errno.EMFILE:
        return "; lower GRADTAP_OPEN_FILES or raise `ulimit -n`"
    return ""


@contextlib.contextmanager
def naming(action: str, path: Path | str) -> Iterator[None]:
    """Within the block, an `OSError` becomes a `StoreError`: "cannot <action> <path>: <cause>"."""
    try:
        yield
    except GradtapError:
        raise
    except OSError as error:
        raise store_error(action, path, error) from error


def make_dirs(path: Path) -> None:
    """Create a folder and its parents where they are missing.

    Raises `StoreError` naming the path and the cause.
    """
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise StoreError(
                f"cannot create folder {path}: {place} is a link to nothing; remove it or give another path"
            )
        if place.exists() and not place.is_dir():
            raise StoreError(f"cannot create folder {path}: {place} is a file; give another path")
    with naming("create folder", path):
        path.mkdir(parents=True, exist_ok=True)


def open_temp(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, open to read and write, with its name `.<name>.<random>.tmp`.

    Raises `OSError`.
    """
    temp = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    return os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temp


def write_atomic(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Replace the file at `path` by `data`: a reader sees the old bytes or the new ones, never a part.

    With `sync` the bytes and the new name survive a power loss once this returns.
    Raises `StoreError` naming the path and the cause; the old file is then untouched.
    """
    with naming("write", path), _written_temp(path, data, sync=sync) as temp:
        os.replace(temp, path)
        if sync:
            sync_dir(path.parent)


def create_new(path: Path, data: bytes, *, sync: bool = False) -> bool:
    """Create `path` with `data`, complete from its first moment; False when it exists already.

    Of several processes that try at once, exactly one gets True. Raises `StoreError` naming the path and the cause.
    """
    with naming("create", path), _written_temp(path, data, sync=sync) as temp:
        made = publish_new(temp, path)
        if made and sync:
            sync_dir(path.parent)
        return made


@contextlib.contextmanager
def _written_temp(path: Path, data: bytes, *, sync: bool) -> Iterator[Path]:
    fd, temp = open_temp(path)
    try:
        try:
            pwrite_all(fd, data, 0)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        yield temp
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)


def publish_new(temp: Path, path: Path) -> bool:
    """Give the file `temp` the name `path` unless that name is taken (then False). `temp` may be left behind.

    Raises `OSError`.
    """
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _claim_and_replace(temp, path)
    return True


def _claim_and_replace(temp: Path, path: Path) -> bool:
    # Without hard links the exclusive create still picks one winner; a reader may see an empty file for a moment.
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    os.replace(temp, path)
    return True


def pwrite_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data` at `offset`, however many calls it takes. Raises `OSError`."""
    pwritev_all(fd, (data,), offset)


def pwritev_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write the buffers one after another from `offset` on, however many calls it takes. Raises `OSError`."""
    views = [memoryview(b).cast("B") for b in buffers if len(b)]
    first = 0
    while first < len(views):
        try:
            written = os.pwritev(fd, views[first : first + _IOV_MAX], offset)
        except InterruptedError:
            continue
        if written <= 0:
            raise OSError(errno.EIO, "the file system accepted no bytes")
        offset += written
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]


def pread_all(fd: int, size: int, offset: int) -> bytes:
    """Up to `size` bytes from `offset`; fewer only where the file ends. Raises `OSError`."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    got = len(data)
    while got < size and (data := os.pread(fd, size - got, offset + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def sync_data(fd: int) -> None:
    """Bring the file's bytes, and what is needed to find them, to the disk. Raises `OSError`."""
    getattr(os, "fdatasync", os.fsync)(fd)


def sync_dir(path: Path) -> None:
    """Bring the names in a folder to the disk.

    Raises `StoreError` naming the path and the cause.
    """
    with naming("sync folder", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises `StoreError` (with `errno` ENOENT for a missing file), `DamagedError` for anything but a JSON object.
    """
    with naming("read", path):
        data = path.read_bytes()
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"{path} is not valid JSON ({error}); run `gradtap verify`") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{path} holds a JSON {type(value).__name__}, an object is expected; run `gradtap verify`")
    return value


def field_of(data: Mapping[str, Any], key: str, kind: type[T], path: Path) -> T:
    """The value of `key` in a JSON object read from `path`, when it is of type `kind`. A bool is no number.

    Raises `DamagedError` naming the file, the key and what is there.
    """
    value = data.get(key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        there = f"is {value!r}" if key in data else "is missing"
        raise DamagedError(f"{path}: {key!r} {there}, {kind.__name__} is expected; run `gradtap verify`")
    return value
