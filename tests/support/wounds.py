"""Ways to harm a store, for tests of what readers say to it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradtap.encode.checksum import crc32c
from gradtap.plan.chunks import array_chunks, param_arrays
from gradtap.store.paths import SessionPaths
from gradtap.store.session import read_head

PAIR = struct.Struct("<QQ")


@dataclass(frozen=True)
class Spot:
    """One stored chunk: the shard file, where its entry is, and what the entry says."""

    path: Path
    entry_at: int
    offset: int
    nbytes: int
    index_bytes: int

    def body(self) -> bytes:
        """The stored bytes, checksum included."""
        return self.path.read_bytes()[self.offset : self.offset + self.nbytes]


def spot(run: Path, name: str, capture: int, *, session: str = "0000", chunk: int = 0, piece: int = 0) -> Spot:
    """Where a chunk of a parameter lies."""
    paths = SessionPaths(run, session)
    plan = read_head(paths).plan
    param = [p.name for p in plan.params].index(name)
    number = param_arrays(plan, param)[piece]
    array, wanted = plan.arrays[number], array_chunks(plan, number)[chunk]
    path = paths.shard(array.name, capture // array.time, wanted.column)
    at = (capture % array.time * array.entries + wanted.entry) * PAIR.size
    offset, nbytes = PAIR.unpack(path.read_bytes()[at : at + PAIR.size])
    return Spot(path, at, offset, nbytes, array.time * array.entries * PAIR.size)


def put(path: Path, at: int, data: bytes) -> None:
    """Overwrite bytes in place."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    """Change one byte."""
    put(path, at, bytes([path.read_bytes()[at] ^ 0x5A]))


def flip_body(s: Spot) -> None:
    """A bit rots in the middle of a body."""
    flip(s.path, s.offset + s.nbytes // 2)


def flip_crc(s: Spot) -> None:
    """A bit rots in the stored checksum."""
    flip(s.path, s.offset + s.nbytes - 1)


def other_values(s: Spot) -> None:
    """Another body with a checksum of its own that holds: only the journal knows better."""
    body = bytearray(s.body()[:-4])
    body[-1] ^= 1
    put(s.path, s.offset, bytes(body) + crc32c(bytes(body)).to_bytes(4, "little"))


def empty_entry(s: Spot) -> None:
    """The entry is lost."""
    put(s.path, s.entry_at, b"\xff" * 16)


def entry_outside(s: Spot) -> None:
    """The entry points beyond the end."""
    put(s.path, s.entry_at, PAIR.pack(s.path.stat().st_size - 4, s.nbytes))


def entry_far_outside(s: Spot) -> None:
    """The entry points beyond any file."""
    put(s.path, s.entry_at, PAIR.pack(2**62, 2**62))


def entry_into_index(s: Spot) -> None:
    """The entry points at the index."""
    put(s.path, s.entry_at, PAIR.pack(0, s.nbytes))


def entry_huge(s: Spot) -> None:
    """The entry claims more bytes than such a chunk can have, all of them in the file."""
    with s.path.open("ab") as file:
        file.truncate(2**24)
    put(s.path, s.entry_at, PAIR.pack(s.offset, 2**23))


def entry_tiny(s: Spot) -> None:
    """The entry claims less than a checksum."""
    put(s.path, s.entry_at, PAIR.pack(s.offset, 3))


def cut_file(s: Spot) -> None:
    """The file ends within the body."""
    with s.path.open("r+b") as file:
        file.truncate(s.offset + 2)


def cut_index(s: Spot) -> None:
    """The file ends within the index."""
    with s.path.open("r+b") as file:
        file.truncate(s.entry_at + 3)


def lose_file(s: Spot) -> None:
    """The file is gone."""
    s.path.unlink()


def garble_file(s: Spot) -> None:
    """The file is overwritten with something else of the same length."""
    s.path.write_bytes(b"\x00\x11\x22\x33" * (s.path.stat().st_size // 4))


WOUNDS: dict[str, Callable[[Spot], None]] = {
    wound.__name__: wound
    for wound in (
        flip_body,
        flip_crc,
        other_values,
        empty_entry,
        entry_outside,
        entry_far_outside,
        entry_into_index,
        entry_huge,
        entry_tiny,
        cut_file,
        cut_index,
        lose_file,
        garble_file,
    )
}
"""All ways to harm one chunk."""
