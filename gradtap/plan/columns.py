"""Counts over the shard columns of a grid, without listing chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class HasGrid(Protocol):
    """A regular grid: a `Grid` or an `ArrayPlan`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Array shape without the capture axis."""

    @property
    def shard(self) -> tuple[int, ...]:
        """Shard extent on each axis."""

    @property
    def chunk(self) -> tuple[int, ...]:
        """Chunk extent on each axis."""


def column_numels(grid: HasGrid) -> list[int]:
    """Elements of each shard column, padding left out; columns in C order."""
    return [int(n) for n in _product(grid, lambda extent, _: extent)]


def column_chunks(grid: HasGrid) -> NDArray[np.int64]:
    """Chunks of each shard column, those wholly in padding left out; columns in C order."""
    return _product(grid, lambda extent, chunk: -(-extent // chunk))


def all_chunks(grid: HasGrid) -> int:
    """Chunks of all columns, those wholly in padding left out."""
    return math.prod(-(-n // c) for n, c in zip(grid.shape, grid.chunk, strict=True))


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Position along each axis of item `index` in C order."""
    found: list[int] = []
    for extent in reversed(shape):
        index, here = divmod(index, extent)
        found.append(here)
    return tuple(reversed(found))


def _product(grid: HasGrid, of_axis: Callable[[NDArray[np.int64], int], NDArray[np.int64]]) -> NDArray[np.int64]:
    total = np.ones(1, np.int64)
    for extent, shard, chunk in zip(grid.shape, grid.shard, grid.chunk, strict=True):
        starts = np.arange(0, extent, shard, dtype=np.int64)
        total = np.multiply.outer(total, of_axis(np.minimum(shard, extent - starts), chunk)).ravel()
    return total
