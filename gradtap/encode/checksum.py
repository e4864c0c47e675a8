"""CRC-32C, and the four bytes of it that end every stored chunk. What a mismatch means is the reader's business."""

from __future__ import annotations

from typing import TypeAlias

import google_crc32c
import numpy as np

from gradtap.errors import DamagedError

BytesLike: TypeAlias = bytes | bytearray | memoryview
CRC_BYTES = 4


def crc32c(data: BytesLike) -> int:
    """CRC-32C (Castagnoli) of the bytes, from 0 to 2**32 - 1. Takes no copy of a contiguous buffer."""
    # The C extension refuses bytearray and memoryview; a NumPy view of them it takes.
    buffer = data if isinstance(data, bytes) else np.frombuffer(data, dtype=np.uint8)
    return int(google_crc32c.value(buffer))


def with_crc(body: bytes) -> tuple[bytes, int]:
    """`body` followed by its CRC-32C as 4 bytes little endian, and that CRC-32C."""
    crc = crc32c(body)
    return body + crc.to_bytes(CRC_BYTES, "little"), crc


def split_crc(data: BytesLike) -> tuple[memoryview, int]:
    """Body of a stored chunk (no copy), and the CRC-32C at its end. Does not compare the two.

    Raises `DamagedError` for fewer than 4 bytes.
    """
    view = memoryview(data).cast("B")
    if len(view) < CRC_BYTES:
        raise DamagedError(f"a stored chunk has {len(view)} bytes; at least {CRC_BYTES} are needed; run gradtap verify")
    return view[:-CRC_BYTES], int.from_bytes(view[-CRC_BYTES:], "little")
