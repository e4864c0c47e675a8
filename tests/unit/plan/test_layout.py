"""Chunk, shard and time arithmetic on known shapes."""

from __future__ import annotations

import pytest

from gradtap.config import Settings
from gradtap.plan.layout import Grid, Limits, divisors, shared_grid, sole_grid, time_of

LIMITS = Limits.of(Settings())
MIB = 2**20


@pytest.mark.parametrize(
    ("shape", "chunk", "shard"),
    [
        ((), (), ()),
        ((7,), (7,), (7,)),
        ((1024, 1024), (128, 1024), (1024, 1024)),
        ((1000, 1024), (125, 1024), (1000, 1024)),
        ((1009, 1024), (127, 1024), (1016, 1024)),
        ((50257, 768), (170, 768), (25160, 768)),
        ((4, 300_000), (1, 100_000), (4, 300_000)),
        ((3, 58_720_256), (1, 131_072), (1, 29_360_128)),
        ((2, 3, 300, 1024), (1, 1, 100, 1024), (2, 3, 300, 1024)),
    ],
)
def test_sole_grid(shape: tuple[int, ...], chunk: tuple[int, ...], shard: tuple[int, ...]) -> None:
    """The first axis small enough is cut into even chunks; over 256 chunks become even shard columns."""
    assert sole_grid(shape, 4, LIMITS) == Grid(shape=shape, shard=shard, chunk=chunk)


@pytest.mark.parametrize(
    ("shape", "extent", "chunk", "shard"),
    [
        ((1024, 1024), 256, (128, 1024), (256, 1024)),
        ((50257, 768), 6283, (103, 768), (6283, 768)),
        ((8, 4), 2, (2, 4), (2, 4)),
        ((10, 1_000_003), 5, (1, 125_001), (5, 1_000_008)),
        ((131 * 2, 1_000_000), 131, (1, 125_000), (131, 125_000)),
    ],
)
def test_shared_grid(shape: tuple[int, ...], extent: int, chunk: tuple[int, ...], shard: tuple[int, ...]) -> None:
    """The shard divides the extent between owners exactly; only axes that no owner shares are padded."""
    assert shared_grid(shape, extent, 4, LIMITS) == Grid(shape=shape, shard=shard, chunk=chunk)


def test_shared_grid_none() -> None:
    """A prime extent of small rows has no chunk of an allowed size."""
    assert shared_grid((32003, 4096), 4001, 4, LIMITS) is None


def test_shared_grid_too_many_columns() -> None:
    """A prime number of chunks would need a column for each: refused rather than thousands of files."""
    assert shared_grid((2 * 16384, 65_536), 16384, 4, LIMITS) is not None
    assert shared_grid((2 * 16411, 65_536), 16411, 4, LIMITS) is None


@pytest.mark.parametrize(
    ("shape", "time"),
    [((), 4096), ((1000,), 4096), ((1024, 1024), 32), ((8192, 8192), 1), ((16 * 2**18,), 8)],
)
def test_time(shape: tuple[int, ...], time: int) -> None:
    """A shard file holds a power of two captures within 128 MiB, and at most 4,096 entries."""
    assert time_of(sole_grid(shape, 4, LIMITS), 4, LIMITS) == time


def test_time_settings() -> None:
    """`max_time` and `shard_bytes` bound the captures of one file."""
    grid = sole_grid((1024, 1024), 4, LIMITS)
    assert time_of(grid, 4, Limits.of(Settings(max_time=4))) == 4
    assert time_of(grid, 4, Limits.of(Settings(shard_bytes=8 * MIB))) == 2
    assert time_of(grid, 4, Limits.of(Settings(shard_bytes=512 * 2**10))) == 1


def test_small_chunk_bytes() -> None:
    """All limits of a chunk follow `chunk_bytes`."""
    assert sole_grid((100, 4), 4, Limits.of(Settings(chunk_bytes=64))).chunk == (4, 4)


def test_divisors() -> None:
    """Divisors of a number, ascending, each once."""
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36) and divisors(1) == (1,)
