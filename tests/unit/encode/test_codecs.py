"""Chunks go through Blosc and come back bit for bit; damage and hostile headers are refused; Zarr reads the same."""

from __future__ import annotations

import json
import struct
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

from gradtap.encode.checksum import crc32c, split_crc
from gradtap.encode.codecs import CODECS, ChunkCodec
from gradtap.errors import DamagedError, UsageError

RNG = np.random.default_rng(7)
VALUES = (RNG.standard_normal(70_001) * 1e-3).astype(np.float32)


@pytest.mark.parametrize("profile", CODECS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_round_trip(profile: str, dtype: type) -> None:
    """Decoding gives the encoded values, and the stored checksum is that of the body."""
    values = VALUES.astype(dtype)
    codec = ChunkCodec(profile, values.itemsize)
    chunk = codec.encode(values)
    body, stored = split_crc(chunk.data)
    assert stored == chunk.crc == crc32c(body)
    for kind in (bytes, bytearray, memoryview):
        decoded = codec.decode(kind(body), values.size)
        assert decoded.dtype == dtype
        assert decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize("profile", CODECS)
def test_zeros_cost_nothing(profile: str) -> None:
    """A chunk of zeros (a parameter without gradient) shrinks at least a hundredfold."""
    chunk = ChunkCodec(profile, 4).encode(np.zeros(131_072, np.float32))
    assert len(chunk.data) < 131_072 * 4 / 100


def test_exact_reaches_the_exponents() -> None:
    """The exact profile saves at least 14 % on normally distributed values: its block size is in force."""
    values = RNG.standard_normal(131_072).astype(np.float32)
    assert len(ChunkCodec("exact", 4).encode(values).data) < values.nbytes * 0.86


@pytest.mark.parametrize("profile", CODECS)
def test_zarr_reads_the_stored_bytes(profile: str, tmp_path: Path) -> None:
    """zarr-python, given the codec's metadata, decodes our bytes, and we decode zarr-python's."""
    codec = ChunkCodec(profile, 4)
    bytes_codec, *compressors = codec.zarr_codecs()
    array = zarr.create_array(
        store=str(tmp_path / "a.zarr"),
        shape=(2, 500),
        chunks=(1, 500),
        dtype="float32",
        fill_value=np.nan,
        serializer=bytes_codec,
        compressors=compressors,
        zarr_format=3,
    )
    ours, theirs = VALUES[:500], VALUES[500:1000]
    array[1] = theirs
    (tmp_path / "a.zarr" / "c" / "0").mkdir(parents=True)
    (tmp_path / "a.zarr" / "c" / "0" / "0").write_bytes(codec.encode(ours).data)
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "a.zarr"), mode="r")[0], ours)
    body, stored = split_crc((tmp_path / "a.zarr" / "c" / "1" / "0").read_bytes())
    assert crc32c(body) == stored
    np.testing.assert_array_equal(codec.decode(body, 500), theirs)


def test_tensorstore_reads_a_shard_of_stored_bytes(tmp_path: Path) -> None:
    """Two captures that lie in one shard file whose index comes first are read by tensorstore and zarr-python."""
    codec = ChunkCodec("exact", 8)
    captures = [VALUES[:300].astype(np.float64), VALUES[300:600].astype(np.float64) * 1e-9]
    sharding = {
        "chunk_shape": [1, 300],
        "codecs": codec.zarr_codecs(),
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_location": "start",
    }
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [2, 300],
        "data_type": "float64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 300]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN",
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    bodies = [codec.encode(values).data for values in captures]
    index = struct.pack("<4Q", 32, len(bodies[0]), 32 + len(bodies[0]), len(bodies[1]))
    (tmp_path / "c.0.0").write_bytes(index + b"".join(bodies))
    (tmp_path / "zarr.json").write_text(json.dumps(metadata))
    opened = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/"}}).result()
    np.testing.assert_array_equal(opened.read().result(), np.stack(captures))
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path), mode="r")[:], np.stack(captures))


@pytest.mark.parametrize("itemsize", [4, 8])
def test_metadata_is_that_of_the_format(itemsize: int) -> None:
    """The exact profile's metadata is, to the letter, what format 1 says."""
    assert ChunkCodec("exact", itemsize).zarr_codecs() == [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {
            "name": "blosc",
            "configuration": {
                "cname": "zstd",
                "clevel": 1,
                "shuffle": "shuffle",
                "typesize": itemsize,
                "blocksize": 524288,
            },
        },
        {"name": "crc32c"},
    ]


def test_threads_share_a_codec() -> None:
    """Four threads that encode and decode with one codec at the same time all get their own values back."""
    codec = ChunkCodec("exact", 4)
    wrong: list[int] = []

    def work(seed: int) -> None:
        values = np.random.default_rng(seed).standard_normal(20_000).astype(np.float32)
        for _ in range(20):
            body = codec.encode(values).data[:-4]
            if codec.decode(body, values.size).tobytes() != values.tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_small_frame_that_claims_much_is_refused_before_memory_is_taken() -> None:
    """A header of 32 bytes that claims a gigabyte costs no memory."""
    frame = struct.pack("<BBBBIII", 2, 1, 0x22, 4, 2**30, 2**19, 32) + bytes(16)
    tracemalloc.start()
    with pytest.raises(DamagedError, match="1073741824 bytes; 1000 elements need 4000"):
        ChunkCodec("exact", 4).decode(frame, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body[:10], "less than a Blosc header"),
        (lambda body: body[:-1], "header says"),
        (lambda body: body + b"\0", "header says"),
        (lambda body: b"\x07" + body[1:], "no Blosc frame"),
        (lambda body: body[:16] + b"\xff" * (len(body) - 16), "does not decode"),
        (lambda body: b"", "0 bytes"),
    ],
)
def test_damage(change, message: str) -> None:
    """A frame that is cut, grown, foreign or full of nonsense is damage, never values."""
    codec = ChunkCodec("exact", 4)
    body = codec.encode(VALUES[:5000]).data[:-4]
    with pytest.raises(DamagedError, match=message):
        codec.decode(change(body), 5000)


def test_another_number_of_elements() -> None:
    """A good frame of another chunk's size is damage."""
    codec = ChunkCodec("fast", 4)
    with pytest.raises(DamagedError, match="decodes to 400 bytes; 99 elements need 396"):
        codec.decode(codec.encode(VALUES[:100]).data[:-4], 99)


def test_unknown_profile() -> None:
    """An unknown profile is refused with those that there are."""
    with pytest.raises(UsageError, match=r"'best'.*exact, fast"):
        ChunkCodec("best", 4)


def test_unknown_item_size() -> None:
    """Only float32 and float64 are stored."""
    with pytest.raises(UsageError, match=r"item size is 2; allowed are 4 \(float32\)"):
        ChunkCodec("exact", 2)


@pytest.mark.parametrize(
    "values",
    [VALUES.astype(np.float64), VALUES[:10].reshape(2, 5), VALUES[::2], VALUES[:0], VALUES.astype(">f4")],
)
def test_arrays_that_are_not_chunks(values: np.ndarray) -> None:
    """Another dtype, more axes, gaps, another byte order or no elements are refused."""
    with pytest.raises(UsageError, match="cannot be encoded"):
        ChunkCodec("exact", 4).encode(values)
