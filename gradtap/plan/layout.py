"""A block of a parameter to chunk, shard column and captures per shard file. Arithmetic only: no names, no ranks.

Every chunk is 1 on the axes before one axis, cuts that axis, and is whole on the axes after it: so it covers one
contiguous flat range of the block, and its padding, if any, comes after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gradtap.config import Settings

MAX_COLUMN_CHUNKS = 256
MAX_SHARD_ENTRIES = 4096
_SLACK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes to aim at, in raw bytes; `max_time` in captures. With the defaults: chunks of 64 KiB to 2 MiB."""

    chunk: int
    shard: int
    max_time: int

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits that `settings` ask for."""
        return cls(chunk=max(settings.chunk_bytes, 64), shard=settings.shard_bytes, max_time=settings.max_time)

    @property
    def least_chunk(self) -> int:
        """Least bytes of a chunk of a block that is not smaller itself."""
        return self.chunk // 8

    @property
    def most_row(self) -> int:
        """Most bytes of one index of the axis that is cut, where the next axis could be cut instead."""
        return 2 * self.chunk

    @property
    def most_chunk(self) -> int:
        """Most bytes of a chunk."""
        return 4 * self.chunk

    def column_chunks(self, chunk_bytes: int, column_bytes: int | None = None) -> int:
        """Most chunks of one shard column, for chunks of `chunk_bytes`."""
        most = 2 * self.shard if column_bytes is None else min(column_bytes, 2 * self.shard)
        return max(1, min(MAX_COLUMN_CHUNKS, most // chunk_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Regular grid over an array of `shape`: `chunk` divides `shard` exactly; the last column may be padded."""

    shape: tuple[int, ...]
    shard: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """Shard columns along each axis."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shard, strict=True))

    @property
    def entries(self) -> int:
        """Chunks of one shard column."""
        return math.prod(s // c for s, c in zip(self.shard, self.chunk, strict=True))


@lru_cache(maxsize=4096)
def sole_grid(shape: tuple[int, ...], itemsize: int, limits: Limits, column_bytes: int | None = None) -> Grid:
    """Grid of a block that no boundary between owners cuts: the extent is padded up to whole chunks.

    `column_bytes`: most bytes of a shard column, where columns go to several owners.
    """
    chunk, counts = _sole_chunks(shape, itemsize, limits)
    most = limits.column_chunks(math.prod(chunk) * itemsize, column_bytes)
    return Grid(shape=shape, shard=_times(chunk, _split(counts, most)), chunk=chunk)


@lru_cache(maxsize=4096)
def shared_grid(shape: tuple[int, ...], extent: int, itemsize: int, limits: Limits) -> Grid | None:
    """Grid with an owner's boundary at each multiple of `extent` on axis 0: the shard divides the extent exactly.

    None where no chunk of an allowed size divides it, or where shard columns would become too many.
    """
    best: tuple[float, Grid] | None = None
    for chunk, counts in _shared_chunks(shape, extent, itemsize, limits):
        size = math.prod(chunk) * itemsize
        per_column = _split_shared(counts, limits.column_chunks(size))
        if per_column is None:
            continue
        grid = Grid(shape=shape, shard=_times(chunk, per_column), chunk=chunk)
        far = abs(math.log2(size / limits.chunk))
        if best is None or far < best[0]:
            best = (far, grid)
    return None if best is None else best[1]


def time_of(grid: Grid, itemsize: int, limits: Limits) -> int:
    """Captures of one shard file (T): the largest power of two within the settings' bytes and 4,096 entries."""
    entries = grid.entries
    raw = math.prod(grid.shard) * itemsize
    most = min(limits.max_time, MAX_SHARD_ENTRIES // entries, limits.shard // raw)
    return 1 << (max(1, most).bit_length() - 1)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number >= 1, ascending."""
    small = np.arange(1, math.isqrt(number) + 1, dtype=np.int64)
    low = [int(d) for d in small[number % small == 0]]
    return tuple(sorted({*low, *(number // d for d in low)}))


def _sole_chunks(shape: tuple[int, ...], itemsize: int, limits: Limits) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chunk, and number of chunks along each axis."""
    if not shape:
        return (), ()
    axis, trailing = 0, math.prod(shape[1:]) * itemsize
    while trailing > limits.most_row:
        axis += 1
        trailing //= shape[axis]
    extent = shape[axis]
    count = -(-extent // max(1, limits.chunk // trailing))
    # The same number of chunks, all of about one size: padding stays below one row for each chunk.
    rows = -(-extent // count)
    tail = shape[axis + 1 :]
    return (1,) * axis + (rows, *tail), (*shape[:axis], count, *(1 for _ in tail))


def _shared_chunks(
    shape: tuple[int, ...], extent: int, itemsize: int, limits: Limits
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Chunks that divide `extent` on axis 0, each with the number of chunks of one owner's block on each axis."""
    rest = shape[1:]
    row = math.prod(rest) * itemsize
    if row > limits.most_chunk:
        # Axes after the first have no owner's boundary, so they may be padded.
        chunk, counts = _sole_chunks(rest, itemsize, limits)
        return [((1, *chunk), (extent, *counts))]
    if extent * row < limits.least_chunk:
        fitting = [extent]
    else:
        fitting = [k for k in divisors(extent) if limits.least_chunk <= k * row <= limits.most_chunk]
    return [((k, *rest), (extent // k, *(1 for _ in rest))) for k in fitting]


def _split(counts: Sequence[int], most: int) -> tuple[int, ...]:
    """Chunks along each axis of one shard column, with at most `most` in all; columns are of about one size."""
    after = math.prod(counts)
    if after <= most:
        return tuple(counts)
    for axis, count in enumerate(counts):
        after //= count
        if after <= most:
            columns = -(-count // (most // after))
            return (1,) * axis + (-(-count // columns), *counts[axis + 1 :])
    raise AssertionError(f"no split of {tuple(counts)} chunks into columns of {most}")


def _split_shared(counts: tuple[int, ...], most: int) -> tuple[int, ...] | None:
    """As `_split`, but exact on axis 0; None where that takes far more columns than the sizes ask for."""
    first, rest = counts[0], counts[1:]
    options = []
    for rows in divisors(first):
        if rows <= most:
            per_column = (rows, *_split(rest, most // rows))
            options.append((_columns(counts, per_column), per_column))
    columns, per_column = min(options)
    return per_column if columns <= _SLACK * -(-math.prod(counts) // most) else None


def _columns(counts: Sequence[int], per_column: Sequence[int]) -> int:
    return math.prod(-(-n // m) for n, m in zip(counts, per_column, strict=True))


def _times(chunk: Sequence[int], factors: Sequence[int]) -> tuple[int, ...]:
    return tuple(c * f for c, f in zip(chunk, factors, strict=True))
