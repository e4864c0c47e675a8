"""CRC-32C against its published check value, and the four bytes at the end of a chunk."""

from __future__ import annotations

import pytest

from gradtap.encode.checksum import crc32c, split_crc, with_crc
from gradtap.errors import DamagedError

CHECK = 0xE3069283


def test_check_value() -> None:
    """The digits 1 to 9 have the check value of the CRC-32C catalogue entry."""
    assert crc32c(b"123456789") == CHECK


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda b: memoryview(bytearray(b))])
def test_any_buffer(kind: type) -> None:
    """Writable and read-only buffers have the checksum of the same bytes."""
    assert crc32c(kind(b"123456789")) == CHECK
    assert crc32c(kind(b"")) == crc32c(b"") == 0


def test_round_trip() -> None:
    """The checksum goes to the end in little endian, and comes off again."""
    data, crc = with_crc(b"123456789")
    assert data == b"123456789\x83\x92\x06\xe3"
    body, stored = split_crc(data)
    assert (bytes(body), stored, crc) == (b"123456789", CHECK, CHECK)


def test_too_short() -> None:
    """Three bytes cannot hold a checksum."""
    with pytest.raises(DamagedError, match="3 bytes"):
        split_crc(b"abc")
