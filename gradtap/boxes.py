"""A contiguous run of elements in row-major order, as a few N-d boxes. Plain arithmetic on integers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradtap.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Indices `lows[a]` to `highs[a]` on each axis; row-major, its elements follow each other from `offset` on.

    `offset` is counted from the start of the run that the box is part of.
    """

    lows: tuple[int, ...]
    highs: tuple[int, ...]
    offset: int

    @property
    def extent(self) -> tuple[int, ...]:
        """Number of indices on each axis."""
        return tuple(high - low for low, high in zip(self.lows, self.highs, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.extent)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements: how far apart two neighbours along each axis lie."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes that hold elements `start` to `stop` of an array of `shape`, in order: at most `2 * ndim - 1`.

    Raises `UsageError` where the run does not lie within the array.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise UsageError(f"elements {start} to {stop} do not lie within shape {tuple(shape)}")
    strides = strides_of(shape)
    position = start
    while position < stop:
        box = _largest_box(shape, strides, position, stop, position - start)
        yield box
        position += box.numel


def _largest_box(shape: Sequence[int], strides: Sequence[int], position: int, stop: int, offset: int) -> Box:
    lows = [position // stride % length for stride, length in zip(strides, shape, strict=True)]
    highs = [low + 1 for low in lows]
    for axis, stride in enumerate(strides):
        if position % stride == 0 and stride <= stop - position:
            highs[axis] = lows[axis] + min(shape[axis] - lows[axis], (stop - position) // stride)
            highs[axis + 1 :] = shape[axis + 1 :]
            break
    return Box(lows=tuple(lows), highs=tuple(highs), offset=offset)
