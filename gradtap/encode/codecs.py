"""One inner chunk to its stored bytes and back, and the same codec as Zarr v3 metadata. Knows no file and no grid."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numcodecs import Blosc
from numpy.typing import NDArray

from gradtap.encode.checksum import BytesLike, with_crc
from gradtap.errors import DamagedError, UsageError
from gradtap.types import EncodedChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Arguments of Blosc. `shuffle` is the name in Zarr metadata; `blocksize` is in bytes, 0 for Blosc's own choice."""

    cname: str
    clevel: int
    shuffle: str
    blocksize: int


PROFILES: dict[str, Profile] = {
    # A block of 512 KiB has byte planes of 128 KiB, enough for zstd to find the exponents' skew: 1.19x, not 1.10x.
    "exact": Profile(cname="zstd", clevel=1, shuffle="shuffle", blocksize=512 * 1024),
    "fast": Profile(cname="lz4", clevel=5, shuffle="bitshuffle", blocksize=0),
}
"""Codec profiles by name; both lossless."""

CODECS: tuple[str, ...] = tuple(PROFILES)

_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
# version, version of the inner codec, flags, typesize, then bytes decoded, bytes of a block, bytes of the frame.
_HEADER = struct.Struct("<BBBBIII")
_FRAME_VERSION = 2


class ChunkCodec:
    """Encodes chunks of float32 (`itemsize` 4) or float64 (8). Has no state: any thread may use it at any time.

    Off the main thread Blosc works within the calling thread alone; on it, with numcodecs' own pool.
    """

    __slots__ = ("_blosc", "dtype", "itemsize", "profile")

    def __init__(self, profile: str, itemsize: int) -> None:
        """Raises `UsageError` for an unknown profile or item size."""
        if profile not in PROFILES:
            raise UsageError(f"codec is {profile!r}; allowed are {', '.join(CODECS)}")
        if itemsize not in (4, 8):
            raise UsageError(f"item size is {itemsize}; allowed are 4 (float32) and 8 (float64)")
        chosen = PROFILES[profile]
        self.profile = profile
        self.itemsize = itemsize
        self.dtype: np.dtype[Any] = np.dtype(f"<f{itemsize}")
        self._blosc = Blosc(
            cname=chosen.cname, clevel=chosen.clevel, shuffle=_SHUFFLES[chosen.shuffle], blocksize=chosen.blocksize
        )

    def encode(self, values: NDArray[Any]) -> EncodedChunk:
        """Stored bytes of one chunk: a Blosc frame, then its CRC-32C.

        `values` is 1-D, contiguous, of the codec's dtype: all elements of the chunk, padding included.
        Raises `UsageError` for any other array.
        """
        if values.ndim != 1 or values.dtype != self.dtype or not values.flags.c_contiguous or not values.size:
            raise UsageError(
                f"a chunk of {values.dtype} {values.shape} cannot be encoded; it must be a contiguous, non-empty, "
                f"1-D array of {self.dtype}"
            )
        data, crc = with_crc(self._blosc.encode(values))
        return EncodedChunk(data=data, crc=crc)

    def decode(self, body: BytesLike, numel: int) -> NDArray[Any]:
        """Values of one chunk, 1-D, `numel` elements. `body` is the stored chunk less the 4 bytes of its CRC-32C.

        Compares no checksum. Raises `DamagedError` where the frame is not one of exactly `numel` elements, before any
        memory is set aside for it, or where Blosc cannot decode it.
        """
        self._check_header(body, numel)
        out = np.empty(numel, self.dtype)
        try:
            self._blosc.decode(np.frombuffer(body, np.uint8), out)
        except (RuntimeError, ValueError) as error:
            raise DamagedError(f"a stored chunk of {len(body)} bytes does not decode; run gradtap verify") from error
        return out

    def zarr_codecs(self) -> list[dict[str, Any]]:
        """The codec chain of an inner chunk as Zarr v3 metadata: bytes, blosc, crc32c."""
        chosen = PROFILES[self.profile]
        blosc = {
            "cname": chosen.cname,
            "clevel": chosen.clevel,
            "shuffle": chosen.shuffle,
            "typesize": self.itemsize,
            "blocksize": chosen.blocksize,
        }
        return [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "blosc", "configuration": blosc},
            {"name": "crc32c"},
        ]

    def _check_header(self, body: BytesLike, numel: int) -> None:
        if len(body) < _HEADER.size:
            raise DamagedError(f"a stored chunk has {len(body)} bytes, less than a Blosc header; run gradtap verify")
        version, _, _, _, decoded, _, framed = _HEADER.unpack_from(body)
        if version != _FRAME_VERSION:
            raise DamagedError(f"a stored chunk begins with {version}, which is no Blosc frame; run gradtap verify")
        if framed != len(body):
            raise DamagedError(f"a stored chunk has {len(body)} bytes, its header says {framed}; run gradtap verify")
        if decoded != numel * self.itemsize:
            raise DamagedError(
                f"a stored chunk decodes to {decoded} bytes; {numel} elements need {numel * self.itemsize}; "
                "run gradtap verify"
            )
