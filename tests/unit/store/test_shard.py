"""Append-in-place shards: what lies in the file, what failures leave, and what other readers see."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from gradtap.encode.checksum import crc32c
from gradtap.encode.codecs import ChunkCodec
from gradtap.errors import DamagedError, StoreError
from gradtap.store import files, shard
from gradtap.store.metadata import gradient_array
from gradtap.store.shard import EMPTY, ShardFile, ShardSet
from gradtap.types import ArrayPlan, ParamSpec

T, ROWS, COLS = 4, 8, 6
ENTRIES = 4


@pytest.fixture
def array(tmp_path: Path) -> Iterator[Path]:
    """A gradient array of 8 captures of 8 x 6, two rows in an inner chunk, four captures in a shard."""
    plan = ArrayPlan(
        name="w",
        param=0,
        start=0,
        stop=48,
        shape=(ROWS, COLS),
        dtype="float32",
        time=T,
        shard=(ROWS, COLS),
        chunk=(2, COLS),
        owners=(0,),
    )
    folder = tmp_path / "w"
    folder.mkdir()
    document = gradient_array(
        plan,
        ParamSpec(name="w", shape=(ROWS, COLS), dtype="float32"),
        length=8,
        codecs=ChunkCodec("exact", 4).zarr_codecs(),
    )
    (folder / "zarr.json").write_text(json.dumps(document))
    yield folder


def gradient(k: int) -> np.ndarray:
    """A recognizable gradient of capture k."""
    return (np.arange(ROWS * COLS, dtype="<f4") + 1000 * k).reshape(ROWS, COLS)


def chunks(values: np.ndarray) -> dict[int, bytes]:
    """Stored chunks of one capture, by entry."""
    codec = ChunkCodec("exact", 4)
    return {e: codec.encode(values[2 * e : 2 * e + 2].reshape(-1)).data for e in range(ENTRIES)}


def read_everywhere(folder: Path) -> np.ndarray:
    """The whole array by zarr-python, after checking that tensorstore reads the same."""
    plain = np.asarray(zarr.open_array(folder, mode="r")[:])
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    other = tensorstore.open(spec, read=True, open=True).result().read().result()
    np.testing.assert_array_equal(plain, other)
    return plain


def expect(*captures: int, parts: dict[int, slice] | None = None) -> np.ndarray:
    """The array with these captures whole, and these row ranges of further ones."""
    out = np.full((8, ROWS, COLS), np.nan, "<f4")
    for k in captures:
        out[k] = gradient(k)
    for k, rows in (parts or {}).items():
        out[k, rows] = gradient(k)[rows]
    return out


def test_a_new_shard_is_complete_and_empty(array: Path) -> None:
    """Right after creation the file is a valid shard without a chunk, under its final name only."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    assert (array / "c.0.0.0").read_bytes() == b"\xff" * (T * ENTRIES * 16)
    assert sorted(os.listdir(array)) == ["c.0.0.0", "zarr.json"]
    np.testing.assert_array_equal(read_everywhere(array), expect())
    file.close()


def test_other_readers_see_each_append_of_a_partly_filled_shard(array: Path) -> None:
    """zarr-python and tensorstore read captures in any order and holes as NaN, on the open file."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    file.append(0, chunks(gradient(0)))
    np.testing.assert_array_equal(read_everywhere(array), expect(0))
    file.append(3, chunks(gradient(3)))
    part = chunks(gradient(1))
    written = file.append(1, {e: part[e] for e in (3, 0, 1)})
    assert written == sum(len(part[e]) for e in (0, 1, 3))
    whole = expect(0, 3, parts={1: slice(0, 4)})
    whole[1, 6:] = gradient(1)[6:]
    np.testing.assert_array_equal(read_everywhere(array), whole)
    file.append(1, {2: part[2]})
    np.testing.assert_array_equal(read_everywhere(array), expect(0, 1, 3))
    file.close()


def test_other_readers_read_a_sealed_shard(array: Path) -> None:
    """Sealing changes no value, and the file ends with a copy of its index."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    for t in (0, 2):
        file.append(t, chunks(gradient(t)))
    file.seal()
    file.seal()
    file.close()
    np.testing.assert_array_equal(read_everywhere(array), expect(0, 2))
    data = (array / "c.0.0.0").read_bytes()
    size = T * ENTRIES * 16
    index, mark = data[:size], data[-size - 16 : -size]
    assert data[-size:] == index
    assert (len(data) - size - 16) % 8 == 0
    assert mark == b"GTSEALED" + crc32c(index).to_bytes(4, "little") + (T * ENTRIES).to_bytes(4, "little")


def test_seal_state_is_read_from_the_file(array: Path) -> None:
    """`is_sealed` holds for a whole mark and copy only; `seal_crc` tells damage of the index afterwards."""
    path = array / "c.0.0.0"
    file = ShardFile.create(path, time=T, entries=ENTRIES)
    file.append(0, chunks(gradient(0)))
    fd = os.open(path, os.O_RDWR)
    assert not shard.is_sealed(fd, T, ENTRIES)
    assert shard.seal_crc(fd, T, ENTRIES) is None
    file.seal()
    file.close()
    assert shard.is_sealed(fd, T, ENTRIES)
    assert shard.seal_crc(fd, T, ENTRIES) == crc32c(os.pread(fd, T * ENTRIES * 16, 0))
    os.pwrite(fd, b"x", os.fstat(fd).st_size - 1)
    assert not shard.is_sealed(fd, T, ENTRIES)
    os.close(fd)


def test_create_never_overwrites(array: Path) -> None:
    """A path that exists is refused and left as it was."""
    (array / "c.0.0.0").write_bytes(b"precious")
    with pytest.raises(StoreError, match=r"c\.0\.0\.0 exists already and is never overwritten"):
        ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    assert (array / "c.0.0.0").read_bytes() == b"precious"
    assert sorted(os.listdir(array)) == ["c.0.0.0", "zarr.json"]


def test_failed_bodies_are_written_over_by_the_next_append(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills half-way through the bodies leaves `end` and index alone; the next append goes on there."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    file.append(0, chunks(gradient(0)))
    end, real, calls = file.end, os.pwritev, 0

    def full(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, [b"".join(buffers)[:200]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StoreError, match=r"c\.0\.0\.0: No space left") as caught:
            file.append(1, chunks(gradient(1)))
    assert caught.value.errno == errno.ENOSPC
    assert file.end == end
    np.testing.assert_array_equal(read_everywhere(array), expect(0))
    file.append(1, chunks(gradient(1)))
    file.append(2, chunks(gradient(2)))
    np.testing.assert_array_equal(read_everywhere(array), expect(0, 1, 2))
    file.close()


def test_failed_entries_never_point_at_other_bytes(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing the entries stops half-way, later appends leave the bodies that some entries point at alone."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    real = os.pwritev

    def half(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset < T * ENTRIES * 16:
            if offset % (ENTRIES * 16):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, [b"".join(buffers)[:32]], offset)
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        with pytest.raises(StoreError, match="Input/output error"):
            file.append(0, chunks(gradient(0)))
    file.append(1, chunks(gradient(1)))
    np.testing.assert_array_equal(read_everywhere(array), expect(1, parts={0: slice(0, 4)}))
    file.append(0, chunks(gradient(0)))
    np.testing.assert_array_equal(read_everywhere(array), expect(0, 1))
    file.close()


def test_seal_after_a_failed_append_ends_with_the_index(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a failed append left beyond the end are cut off, so that the copy of the index is last."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    file.append(0, chunks(gradient(0)))
    real, calls = os.pwritev, 0

    def fail_late(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(fd, [b"z" * 5000], offset) and 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_late)
        with pytest.raises(StoreError):
            file.append(1, chunks(gradient(1)))
    file.seal()
    file.close()
    fd = os.open(array / "c.0.0.0", os.O_RDONLY)
    assert shard.is_sealed(fd, T, ENTRIES)
    assert os.fstat(fd).st_size < 5000
    os.close(fd)
    np.testing.assert_array_equal(read_everywhere(array), expect(0))


def test_one_entry_write_for_a_run(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are written in place, one aligned write for each run of neighbours, after the bodies."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    seen: list[tuple[int, int]] = []
    real = os.pwritev

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((offset, sum(len(b) for b in buffers)))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", spy)
    file.append(2, {0: b"aaaa", 1: b"bb", 3: b"c"})
    head = T * ENTRIES * 16
    assert seen == [(head, 7), (2 * 64, 32), (2 * 64 + 48, 16)]
    file.close()


@pytest.mark.parametrize("order", [False, True])
def test_order_sync_puts_bodies_on_the_disk_first(array: Path, monkeypatch: pytest.MonkeyPatch, order: bool) -> None:
    """With `order_sync` one sync comes between bodies and entries, without it none."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES, order_sync=order)
    events: list[str] = []
    real_write, real_sync = os.pwritev, files.sync_data
    monkeypatch.setattr(os, "pwritev", lambda *a: events.append("write") or real_write(*a))
    monkeypatch.setattr(files, "sync_data", lambda fd: events.append("sync") or real_sync(fd))
    file.append(0, {0: b"x"})
    assert events == (["write", "sync", "write"] if order else ["write", "write"])
    file.close()


def test_entries_may_be_set_once(array: Path) -> None:
    """A chunk that was written, a capture or an entry outside of the shard, and an append after sealing are defects."""
    file = ShardFile.create(array / "c.0.0.0", time=T, entries=ENTRIES)
    assert file.append(0, {}) == 0
    file.append(0, {1: b"x"})
    end = file.end
    for t, e in ((0, 1), (T, 0), (-1, 0), (0, ENTRIES), (0, -1)):
        with pytest.raises(AssertionError):
            file.append(t, {e: b"y"})
    assert file.end == end
    file.seal()
    with pytest.raises(AssertionError, match="sealed"):
        file.append(1, {0: b"y"})
    file.close()


def test_pure_readers_of_the_index(array: Path) -> None:
    """`read_index` and `read_entry` agree; an empty entry is None; a cut or nonsensical index is damage."""
    path = array / "c.0.0.0"
    file = ShardFile.create(path, time=T, entries=ENTRIES)
    file.append(2, {0: b"abc", 1: b"defgh"})
    file.close()
    head = T * ENTRIES * 16
    fd = os.open(path, os.O_RDWR)
    index = shard.read_index(fd, T, ENTRIES)
    np.testing.assert_array_equal(index, shard.read_index(path.read_bytes(), T, ENTRIES))
    assert index.shape == (T * ENTRIES, 2)
    assert index[2 * ENTRIES + 1].tolist() == [head + 3, 5]
    assert (index[:, 0] != EMPTY).sum() == 2
    assert shard.read_entry(fd, T, ENTRIES, 2, 1) == (head + 3, 5)
    assert shard.read_entry(fd, T, ENTRIES, 2, 2) is None
    os.pwrite(fd, (5).to_bytes(8, "little"), 0)
    with pytest.raises(DamagedError, match=r"c\.0: entry 0 of capture 0 points at 5\+"):
        shard.read_entry(fd, T, ENTRIES, 0, 0, name="c.0")
    os.ftruncate(fd, 20)
    with pytest.raises(DamagedError, match=r"c\.0 ends within its index"):
        shard.read_entry(fd, T, ENTRIES, 1, 0, name="c.0")
    with pytest.raises(DamagedError, match="20 bytes long, its index alone takes 256"):
        shard.read_index(fd, T, ENTRIES)
    os.close(fd)


def test_a_foreign_rewrite_is_found_at_the_seal(array: Path) -> None:
    """A file put in the shard's place by rename is reported, and is not changed."""
    path = array / "c.0.0.0"
    file = ShardFile.create(path, time=T, entries=ENTRIES)
    file.append(0, chunks(gradient(0)))
    assert file.is_ours()
    files.write_atomic(path, path.read_bytes())
    before = path.read_bytes()
    assert not file.is_ours()
    with pytest.raises(DamagedError, match="another program rewrote it"):
        file.seal()
    file.close()
    with pytest.raises(DamagedError, match="another program rewrote it"):
        file.append(1, chunks(gradient(1)))
    assert path.read_bytes() == before
    path.unlink()
    assert not file.is_ours()


def test_a_foreign_write_into_the_index_is_found_at_the_seal(array: Path) -> None:
    """An entry that this writer did not set is reported instead of being sealed."""
    path = array / "c.0.0.0"
    file = ShardFile.create(path, time=T, entries=ENTRIES)
    with open(path, "r+b") as other:
        other.write(bytes(16))
    with pytest.raises(DamagedError, match="not as written"):
        file.seal()
    file.close()


def test_set_keeps_few_files_open_and_goes_on_where_they_were(tmp_path: Path) -> None:
    """With room for two of five files, appends in turn land in the right places, without more files open."""
    held = ShardSet(2)
    paths = [tmp_path / f"a{i}" / "c.0" for i in range(5)]
    for t in range(T):
        for i, path in enumerate(paths):
            held.get(path, T, 1).append(t, {0: bytes([16 * i + t]) * (i + t + 1)})
            assert open_files_under(tmp_path) <= 2
    assert held.paths == tuple(paths)
    held.close()
    assert open_files_under(tmp_path) == 0
    for i, path in enumerate(paths):
        data = path.read_bytes()
        for t, (offset, size) in enumerate(shard.read_index(data, T, 1).tolist()):
            assert data[offset : offset + size] == bytes([16 * i + t]) * (i + t + 1)


def open_files_under(folder: Path) -> int:
    """How many files below a folder this process holds open."""
    held = 0
    for link in os.listdir("/proc/self/fd"):
        try:
            held += os.readlink(f"/proc/self/fd/{link}").startswith(str(folder))
        except OSError:
            continue
    return held


def test_set_syncs_what_changed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sync_all` reaches each changed file once, those closed in between too, and new names once."""
    held = ShardSet(1)
    for i in range(3):
        held.get(tmp_path / "a" / f"c.{i}", T, 1).append(0, {0: b"x"})
    synced: list[str] = []
    monkeypatch.setattr(files, "sync_data", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")[-3:]))
    monkeypatch.setattr(files, "sync_dir", lambda path: synced.append(path.name))
    held.sync_all()
    assert sorted(synced) == ["a", "c.0", "c.1", "c.2"]
    assert open_files_under(tmp_path) <= 1
    synced.clear()
    held.get(tmp_path / "a" / "c.1", T, 1).append(1, {0: b"x"})
    held.sync_all()
    assert synced == ["c.1"]
    held.close()


def test_set_seals_and_forgets(tmp_path: Path) -> None:
    """A sealed file leaves the set and is not made again; closing with `seal` seals the rest."""
    held = ShardSet(8)
    paths = [tmp_path / f"c.{i}" for i in range(3)]
    for path in paths:
        held.get(path, T, 1).append(0, {0: b"x"})
    held.seal(paths[0])
    assert held.paths == tuple(paths[1:])
    with pytest.raises(StoreError, match="never overwritten"):
        held.get(paths[0], T, 1)
    held.close(seal=True)
    assert held.paths == ()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        assert shard.is_sealed(fd, T, 1)
        os.close(fd)


def test_set_seals_the_others_when_one_fails(tmp_path: Path) -> None:
    """A file that cannot be sealed is reported after all others were."""
    held = ShardSet(8)
    paths: list[Any] = [tmp_path / f"c.{i}" for i in range(3)]
    for path in paths:
        held.get(path, T, 1).append(0, {0: b"x"})
    files.write_atomic(paths[0], b"foreign")
    with pytest.raises(DamagedError, match=r"c\.0 is no longer the file"):
        held.close(seal=True)
    assert held.paths == (paths[0],)
    assert open_files_under(tmp_path) == 0
