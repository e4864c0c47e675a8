"""Atomic writes, complete writes and named errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradtap.errors import DamagedError, StoreError
from gradtap.store import files


def names(folder: Path) -> list[str]:
    """Names in a folder, hidden ones too."""
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("sync", [False, True])
def test_write_atomic_replaces_and_leaves_no_temp(tmp_path: Path, sync: bool) -> None:
    """A second write replaces the first, and nothing else is left in the folder."""
    files.write_atomic(tmp_path / "a", b"one", sync=sync)
    files.write_atomic(tmp_path / "a", b"two", sync=sync)
    assert (tmp_path / "a").read_bytes() == b"two"
    assert names(tmp_path) == ["a"]


def test_write_atomic_failure_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write leaves the old bytes, removes its temp file, and says path, cause and errno."""
    files.write_atomic(tmp_path / "a", b"one")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StoreError, match=r"cannot write .*/a: No space left on device; free some space") as caught:
        files.write_atomic(tmp_path / "a", b"two")
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["a"]


def test_write_atomic_into_a_missing_folder_names_the_path(tmp_path: Path) -> None:
    """A missing folder is a StoreError with ENOENT."""
    with pytest.raises(StoreError, match="missing/a") as caught:
        files.write_atomic(tmp_path / "missing" / "a", b"")
    assert caught.value.errno == errno.ENOENT


def test_files_get_the_usual_permissions(tmp_path: Path) -> None:
    """A file is readable by others as far as the process's umask allows, which a private temp file would not be."""
    old = os.umask(0o022)
    try:
        files.write_atomic(tmp_path / "a", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_create_new_is_exclusive(tmp_path: Path) -> None:
    """The second creation returns False and changes nothing."""
    assert files.create_new(tmp_path / "a", b"one")
    assert not files.create_new(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["a"]


def test_create_new_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no hard links, creation is still exclusive and leaves nothing behind."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    assert files.create_new(tmp_path / "a", b"one")
    assert not files.create_new(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["a"]


def test_of_processes_that_create_at_once_one_wins(tmp_path: Path) -> None:
    """Two processes that race over 200 names: each name has one winner, and the winner's bytes."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gradtap.store.files import create_new\n"
        "folder, me = Path(sys.argv[1]), sys.argv[2].encode()\n"
        "(folder / f'ready{sys.argv[2]}').touch()\n"
        "while not (folder / 'ready0').exists() or not (folder / 'ready1').exists():\n"
        "    pass\n"
        "print(*[int(create_new(folder / f'n{i}', me * 100)) for i in range(200)])\n"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    results = [[int(word) for word in racer.communicate(timeout=60)[0].split()] for racer in racers]
    assert [a + b for a, b in zip(*results, strict=True)] == [1] * 200
    for i in range(200):
        assert (tmp_path / f"n{i}").read_bytes() == (b"0" if results[0][i] else b"1") * 100


def test_short_and_interrupted_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers arrive whole and in order where each call is interrupted first and then takes 3 bytes."""
    real, calls = os.pwritev, 0

    def stingy(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return real(fd, [b"".join(buffers)[:3]], offset)

    monkeypatch.setattr(os, "pwritev", stingy)
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    files.pwritev_all(fd, [b"abcd", b"", memoryview(b"efghij"), bytearray(b"k")], 2)
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"\0\0abcdefghijk"
    assert calls == 8


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    """3,000 buffers are more than the system takes in one call, and all arrive."""
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    parts = [bytes([i % 251]) * (i % 5) for i in range(3000)]
    files.pwritev_all(fd, parts, 0)
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"".join(parts)


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that accepts no bytes raises instead of looping for ever."""
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="accepted no bytes"):
        files.pwrite_all(fd, b"x", 0)
    os.close(fd)


def test_pread_all_joins_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short reads are joined, and the end of the file ends the read."""
    (tmp_path / "a").write_bytes(b"0123456789")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real(fd, min(size, 3), offset))
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    assert files.pread_all(fd, 8, 1) == b"12345678"
    assert files.pread_all(fd, 100, 4) == b"456789"
    os.close(fd)


def test_make_dirs_over_a_file_names_it(tmp_path: Path) -> None:
    """A file in the place of a folder is a StoreError naming it."""
    (tmp_path / "a").touch()
    with pytest.raises(StoreError, match=r"cannot create folder .*/a/b"):
        files.make_dirs(tmp_path / "a" / "b")
    files.make_dirs(tmp_path / "c" / "d")
    files.sync_dir(tmp_path / "c" / "d")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_read_object_refuses_what_is_no_object(tmp_path: Path, text: str) -> None:
    """Anything but a JSON object is damage, never an empty object."""
    (tmp_path / "a").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedError, match="/a "):
        files.read_object(tmp_path / "a")


def test_field_of_checks_the_type() -> None:
    """A field must be there and of its type; a whole number passes for a float, a bool for no number."""
    path, data = Path("f.json"), {"n": 3, "b": True, "s": "x"}
    assert files.field_of(data, "n", int, path) == 3
    assert isinstance(files.field_of(data, "n", float, path), float)
    for key, kind in (("b", int), ("b", float), ("s", int), ("n", str)):
        with pytest.raises(DamagedError, match=rf"f.json: '{key}' is .*, {kind.__name__} is expected"):
            files.field_of(data, key, kind, path)
    with pytest.raises(DamagedError, match="'gone' is missing"):
        files.field_of(data, "gone", str, path)
