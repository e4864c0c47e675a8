"""Row arrays: layouts within their limits, writing, reading, and other readers."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from gradtap.errors import DamagedError, StoreError
from gradtap.store import files, rows
from gradtap.store.metadata import row_array
from gradtap.store.row_metadata import row_spec
from gradtap.store.rows import AppendRows, ReplaceRows, RowSpec, read_rows
from gradtap.store.shard import ShardSet, is_sealed


def spec(**changes: Any) -> RowSpec:
    """An append array of three float64 columns, eight rows in a shard."""
    fields: dict[str, Any] = {
        "path": "_ledger/x",
        "row_shape": (3,),
        "dtype": "float64",
        "fill": float("nan"),
        "mode": "append",
        "axis": "row",
        "time": 8,
        "dims": ("row", "param"),
    }
    return RowSpec(**(fields | changes))


SCALAR = spec(row_shape=(), dims=("row",))
HIST = spec(row_shape=(5, 193), dtype="int64", fill=-1, compress=True, dims=("row", "param", "bin"))
APPENDED = [spec(), SCALAR, HIST, spec(dtype="int32", fill=7), spec(dtype="uint8", fill=0)]
SMALL = spec(mode="replace", row_shape=(), dtype="int64", fill=-1, dims=("row",))
REPLACED = [SMALL, spec(mode="replace"), spec(mode="replace", row_shape=(), dtype="uint8", fill=0, dims=("row",))]


def describe(root: Path, made: RowSpec, length: int) -> Path:
    """Write the array's metadata; its folder."""
    folder = root / made.path
    files.make_dirs(folder)
    (folder / "zarr.json").write_text(json.dumps(row_array(made, length)))
    return folder


def row(made: RowSpec, number: int) -> np.ndarray:
    """A recognizable row."""
    count = np.prod(made.row_shape, dtype=int)
    return (np.arange(count) % 50 + number).astype(made.dtype).reshape(made.row_shape)


def check_everywhere(root: Path, made: RowSpec, wanted: np.ndarray) -> None:
    """zarr-python, tensorstore and our own reader agree on the whole array."""
    folder = root / made.path
    np.testing.assert_array_equal(zarr.open_array(folder, mode="r")[:], wanted)
    kv = {"driver": "file", "path": f"{folder}/"}
    opened = tensorstore.open({"driver": "zarr3", "kvstore": kv}, open=True, read=True).result()
    np.testing.assert_array_equal(opened.read().result(), wanted)
    ours = read_rows(root, made, 0, len(wanted))
    assert ours.dtype == wanted.dtype
    np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("made", APPENDED)
def test_appended_rows_are_read_everywhere(tmp_path: Path, made: RowSpec) -> None:
    """Rows in any order over several shards, holes as the fill, on open and on sealed shards."""
    describe(tmp_path, made, 20)
    shards = ShardSet(4)
    writer = AppendRows(tmp_path, made, shards)
    wanted = made.blank(20)
    for number in (0, 1, 2, 9, 8, 4, 19):
        assert writer.write(number, row(made, number)) > 0
        wanted[number] = row(made, number)
    check_everywhere(tmp_path, made, wanted)
    shards.close(seal=True)
    check_everywhere(tmp_path, made, wanted)
    np.testing.assert_array_equal(read_rows(tmp_path, made, 2, 10), wanted[2:10])
    assert read_rows(tmp_path, made, 5, 5).shape == (0, *made.row_shape)
    np.testing.assert_array_equal(read_rows(tmp_path, made, 18, 40)[2:], made.blank(20))


def test_old_shards_of_rows_are_sealed_and_rows_are_written_once(tmp_path: Path) -> None:
    """A shard is sealed once the second after it is begun; a row that is there already is left as it is."""
    made, shards = SCALAR, ShardSet(4)
    writer = AppendRows(tmp_path, made, shards)
    for number in (0, 8, 7):
        assert writer.write(number, number) > 0
    assert writer.write(8, 99.0) == 0
    assert shards.paths == (made.file(tmp_path, 0), made.file(tmp_path, 1))
    writer.write(16, 16)
    assert shards.paths == (made.file(tmp_path, 1), made.file(tmp_path, 2))
    fd = os.open(made.file(tmp_path, 0), os.O_RDONLY)
    assert is_sealed(fd, made.time, 1)
    os.close(fd)
    shards.close()
    found = read_rows(tmp_path, made, 0, 17)
    assert found[[0, 7, 8, 16]].tolist() == [0, 7, 8, 16]


@pytest.mark.parametrize("made", REPLACED)
def test_replaced_rows_are_read_everywhere(tmp_path: Path, made: RowSpec) -> None:
    """Rows flushed in several rounds over several chunks, and rewritten ones, hold their latest value."""
    describe(tmp_path, made, 20)
    writer = ReplaceRows(tmp_path, made)
    wanted = made.blank(20)
    check_everywhere(tmp_path, made, wanted)
    for batch in ((0, 1, 2), (3, 9), (17, 1), (2, 10)):
        values = {number: row(made, number + len(batch)) for number in batch}
        writer.write(values)
        for number, value in values.items():
            wanted[number] = value
        writer.flush()
        check_everywhere(tmp_path, made, wanted)
    assert not [name for name in os.listdir(tmp_path / made.path) if name.endswith(".tmp")]


def test_replaced_rows_are_visible_after_the_flush(tmp_path: Path) -> None:
    """Nothing is on disk before the flush."""
    writer = ReplaceRows(tmp_path, SMALL)
    writer.write({0: 5})
    assert read_rows(tmp_path, SMALL, 0, 1).tolist() == [-1]
    writer.flush()
    assert read_rows(tmp_path, SMALL, 0, 1).tolist() == [5]


def test_a_new_writer_keeps_the_rows_of_the_last_one(tmp_path: Path) -> None:
    """A chunk that is on disk is loaded before rows are set in it."""
    first = ReplaceRows(tmp_path, SMALL)
    first.write({0: 5, 9: 6})
    first.flush()
    second = ReplaceRows(tmp_path, SMALL)
    second.write({1: 7})
    second.flush()
    assert read_rows(tmp_path, SMALL, 0, 10).tolist() == [5, 7] + [-1] * 7 + [6]


def test_only_the_newest_chunk_stays_in_memory(tmp_path: Path) -> None:
    """Old chunks are dropped at the flush and loaded again when a late value comes."""
    writer = ReplaceRows(tmp_path, SMALL)
    for number in range(0, 80, 8):
        writer.write({number: number})
        writer.flush()
    assert len(writer._chunks) == 1
    writer.write({1: 1})
    writer.flush()
    assert read_rows(tmp_path, SMALL, 0, 9).tolist() == [0, 1, -1, -1, -1, -1, -1, -1, 8]


def test_a_failed_flush_is_made_up_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose chunk could not be written are written by the next flush."""
    writer = ReplaceRows(tmp_path, SMALL)
    writer.write({0: 5})
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(StoreError, match=r"c\.0"):
            writer.flush()
    writer.write({1: 6})
    writer.flush()
    assert read_rows(tmp_path, SMALL, 0, 2).tolist() == [5, 6]


@pytest.mark.parametrize("made", [spec(), HIST, SMALL])
def test_a_wrong_byte_is_damage(tmp_path: Path, made: RowSpec) -> None:
    """A changed byte in a stored row is an error naming the file, never a value or the fill."""
    if made.mode == "append":
        shards = ShardSet(4)
        AppendRows(tmp_path, made, shards).write(1, row(made, 1))
        shards.close()
    else:
        writer = ReplaceRows(tmp_path, made)
        writer.write({1: 3})
        writer.flush()
    path = made.file(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=rf"{made.path}/c\.0.* has a wrong checksum"):
        read_rows(tmp_path, made, 0, 8)
    if made.mode == "replace":
        with pytest.raises(DamagedError):
            ReplaceRows(tmp_path, made).write({0: 1})


@pytest.mark.parametrize("size", [0, 100, 8 * 16, 8 * 16 + 10])
def test_a_cut_shard_is_damage(tmp_path: Path, size: int) -> None:
    """A file that ends within its index or before its rows is an error."""
    shards = ShardSet(4)
    AppendRows(tmp_path, spec(), shards).write(0, row(spec(), 0))
    shards.close()
    os.truncate(spec().file(tmp_path, 0), size)
    with pytest.raises(DamagedError, match=r"c\.0\.0"):
        read_rows(tmp_path, spec(), 0, 8)


def test_a_cut_replace_chunk_is_damage(tmp_path: Path) -> None:
    """An empty chunk file, and a sound one of the wrong size, are errors."""
    path = SMALL.file(tmp_path, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    with pytest.raises(DamagedError, match="cut short"):
        read_rows(tmp_path, SMALL, 0, 1)
    path.write_bytes(rows.with_crc(bytes(8))[0])
    with pytest.raises(DamagedError, match="holds 8 bytes, 64 expected"):
        read_rows(tmp_path, SMALL, 0, 1)


def test_wide_rows_are_cut_into_chunks_of_4_mib(tmp_path: Path) -> None:
    """A row above the limit is cut along its first axis, padded evenly, and read back by all readers."""
    made = spec(row_shape=(6001, 193), dtype="int64", fill=-1, time=2, dims=("row", "param", "bin"), compress=True)
    assert made.inner == (2001, 193) and made.grid == (3, 1) and made.padded == (6003, 193) and made.entries == 3
    describe(tmp_path, made, 2)
    shards = ShardSet(4)
    AppendRows(tmp_path, made, shards).write(1, row(made, 3))
    shards.close()
    wanted = made.blank(2)
    wanted[1] = row(made, 3)
    check_everywhere(tmp_path, made, wanted)


@pytest.mark.parametrize(
    "shape", [(), (1,), (524288,), (524289,), (10**7,), (3, 10**6), (1, 1, 600_000), (7, 11, 100_003), (2**20, 2)]
)
def test_chunks_of_a_row_keep_the_limit_and_cover_it(shape: tuple[int, ...]) -> None:
    """No chunk is above 4 MiB, chunks cover the row, and the padding stays below one chunk for each axis."""
    made = spec(row_shape=shape, dims=("row", *map(str, range(len(shape)))))
    assert np.prod(made.inner, dtype=int) * 8 <= rows.INNER_BYTES
    for size, whole, step in zip(shape, made.padded, made.inner, strict=True):
        assert whole % step == 0 and size <= whole < size + step
    assert len(list(made.boxes())) == made.entries
    assert sum(np.prod([s.stop - s.start for s in box], dtype=int) for box in made.boxes()) == np.prod(shape, dtype=int)


@pytest.mark.parametrize("width", [1, 3, 8, 1000, 8192, 20_000])
def test_replace_chunks_keep_64_kib(width: int) -> None:
    """Rows of a replace chunk are a power of two within the limit, one at least."""
    made = spec(mode="replace", row_shape=(width,), time=4096)
    assert made.rows & (made.rows - 1) == 0
    assert made.rows == 1 or made.rows * made.row_bytes <= rows.REPLACE_BYTES
    assert made.rows == 4096 or 2 * made.rows * made.row_bytes > rows.REPLACE_BYTES


def test_a_row_of_another_shape_is_a_defect(tmp_path: Path) -> None:
    """A row that would be broadcast is refused."""
    with pytest.raises(AssertionError, match="expected"):
        AppendRows(tmp_path, spec(), ShardSet(1)).write(0, 5.0)


def test_scattered_rows_are_read_one_by_one(tmp_path: Path) -> None:
    """Rows that lie far apart in the file are read alone, with the same result."""
    made = spec(row_shape=(100_000,), time=4)
    shards = ShardSet(1)
    writer = AppendRows(tmp_path, made, shards)
    for number in (0, 2, 3, 1):
        writer.write(number, row(made, number))
    shards.close()
    found = read_rows(tmp_path, made, 0, 2)
    np.testing.assert_array_equal(found, np.stack([row(made, 0), row(made, 1)]))


def test_reading_many_rows_is_quick(tmp_path: Path) -> None:
    """A full shard of 4,096 scalar rows reads in well under a second."""
    made = spec(row_shape=(), time=4096, dims=("row",))
    shards = ShardSet(1)
    writer = AppendRows(tmp_path, made, shards)
    for number in range(4096):
        writer.write(number, float(number))
    shards.close()
    start = time.perf_counter()
    found = read_rows(tmp_path, made, 0, 4096)
    assert time.perf_counter() - start < 1
    np.testing.assert_array_equal(found, np.arange(4096.0))


def test_one_row_costs_its_own_index_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one row of a file of 4,096 reads its entry and its body, not the whole index."""
    made = spec(row_shape=(), time=4096, dims=("row",))
    shards = ShardSet(1)
    AppendRows(tmp_path, made, shards).write(4000, 5.0)
    shards.close()
    read: list[int] = []
    pread = files.pread_all

    def counted(fd: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(files, "pread_all", counted)
    assert read_rows(tmp_path, made, 4000, 4001).tolist() == [5.0]
    assert sum(read) == 16 + 8 + 4


@pytest.mark.parametrize("torn", [b"\xff" * 8, bytes(8)])
def test_a_torn_entry_is_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes) -> None:
    """An entry of which one half is there is tried again, where somebody may be writing; then it is damage."""
    shards = ShardSet(1)
    AppendRows(tmp_path, SCALAR, shards).write(1, 5.0)
    shards.close()
    path = SCALAR.file(tmp_path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:24] + torn + whole[32:])
    with pytest.raises(DamagedError):
        read_rows(tmp_path, SCALAR, 1, 2, retry=False)
    waited: list[float] = []
    monkeypatch.setattr(rows.clock, "sleep", waited.append)
    with pytest.raises(DamagedError):
        read_rows(tmp_path, SCALAR, 1, 2)
    monkeypatch.setattr(rows.clock, "sleep", lambda _: path.write_bytes(whole))
    assert read_rows(tmp_path, SCALAR, 1, 2).tolist() == [5.0]
    assert waited == [rows.RETRY_SECONDS]


@pytest.mark.parametrize("made", APPENDED + REPLACED)
def test_a_row_array_is_what_its_metadata_says(tmp_path: Path, made: RowSpec) -> None:
    """What a reader takes from the metadata reads as what the writer worked with, whatever today's sizes are."""
    read = row_spec(made.path, json.loads(json.dumps(row_array(made, 7))), tmp_path)
    names = ("path", "row_shape", "dtype", "mode", "axis", "dims", "compress", "rows", "inner", "grid", "padded")
    assert [getattr(read, name) for name in names] == [getattr(made, name) for name in names]
    np.testing.assert_equal(read.fill, made.fill)
    assert read.file(tmp_path, 3) == made.file(tmp_path, 3)


def test_a_compressed_row_of_another_size_is_damage(tmp_path: Path) -> None:
    """What a frame says to unpack to is looked at before it is unpacked."""
    shards = ShardSet(1)
    AppendRows(tmp_path, HIST, shards).write(0, row(HIST, 0))
    shards.close()
    narrow = replace(HIST, row_shape=(5, 9))
    with pytest.raises(DamagedError, match="360 expected"):
        read_rows(tmp_path, narrow, 0, 1, retry=False)
