"""Which elements of a gradient are asked for: one slice grammar for Python, the command line and HTTP.

The grammar is NumPy's basic indexing: integers, slices, one ellipsis. Nothing here knows chunks, files or steps; a
`Selection` is only asked which elements of a contiguous run of the parameter belong to the answer, and where.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradtap.boxes import Box, flat_boxes, strides_of
from gradtap.errors import SelectionError, UsageError

KeyPart: TypeAlias = int | slice | EllipsisType
Key: TypeAlias = tuple[KeyPart, ...]
Axis: TypeAlias = int | range

GRAMMAR = "integers and start:stop:step slices separated by commas, and at most one ..., such as '0:10, :, -1'"
# Nineteen digits are enough for any index, and keep a hostile text from costing time.
_INTEGER = re.compile(r"-?[0-9]{1,19}")


def parse_slice(text: str | None) -> Key:
    """The key that a text such as `"0:10, :, 3"`, `"..."` or `"[::2]"` names; `()`, everything, for `""` and None.

    Raises `SelectionError` for a text outside the grammar.
    """
    inner = (text or "").strip()
    if inner.startswith("[") and inner.endswith("]") and len(inner) > 1:
        inner = inner[1:-1].strip()
    if not inner:
        return ()
    parts = inner.split(",")
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    return _checked(tuple(_parse_part(part.strip(), inner) for part in parts))


def _parse_part(part: str, text: str) -> KeyPart:
    if part == "...":
        return ...
    numbers = [number.strip() for number in part.split(":")]
    if len(numbers) == 1:
        return _parse_integer(part, text)
    if len(numbers) > 3:
        raise _refused(part, text)
    return slice(*(_parse_integer(number, text) if number else None for number in numbers))


def _parse_integer(number: str, text: str) -> int:
    if not _INTEGER.fullmatch(number):
        raise _refused(number, text)
    return int(number)


def _refused(part: str, text: str) -> SelectionError:
    return SelectionError(f"{part[:40]!r} in slice {text[:80]!r} is not understood; allowed are {GRAMMAR}").noting(
        slice=text[:80], grammar=GRAMMAR
    )


def _checked(parts: Sequence[Any]) -> Key:
    key = tuple(_key_part(part) for part in parts)
    if sum(part is ... for part in key) > 1:
        raise SelectionError(f"the slice has more than one '...'; allowed are {GRAMMAR}")
    return key


def _key_part(part: Any) -> KeyPart:
    if part is ...:
        return ...
    if isinstance(part, slice):
        bounds = [None if bound is None else _integer(bound) for bound in (part.start, part.stop, part.step)]
        if bounds[2] == 0:
            raise SelectionError("the step of a slice is 0; use 1 or more, or -1 or less to go backwards")
        return slice(*bounds)
    return _integer(part)


def _integer(value: Any) -> int:
    # A bool is an integer to Python, but a mask to NumPy.
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    what = "None (a new axis)" if value is None else f"{type(value).__name__} {str(value)[:40]}"
    raise SelectionError(f"a slice holds {what}; allowed are {GRAMMAR}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A key that fits a parameter's shape. Two selections of the same elements in the same order are equal.

    `source` is the parameter's shape. `axes` has an int (the axis is dropped from the answer) or a `range` of
    indices for each of its axes, never negative. `str()` gives the canonical text, which parses back to it.
    """

    source: tuple[int, ...]
    axes: tuple[Axis, ...]
    shape: tuple[int, ...] = field(init=False, compare=False)
    hull: tuple[int, int] = field(init=False, compare=False, repr=False)

    # shape: of the answer
    # hull:  flat range of the parameter from the first selected element to the last; (0, 0) for none

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(len(axis) for axis in self.axes if isinstance(axis, range)))
        object.__setattr__(self, "hull", self._hull())

    @classmethod
    def of(cls, key: Any, shape: Sequence[int]) -> Selection:
        """The selection that `key` makes from an array of `shape`, by NumPy's rules of basic indexing.

        `key` is None (everything), a text (see `parse_slice`), an integer, a slice, an ellipsis, or a tuple of these.
        Raises `SelectionError` for any other key, too many axes, or an integer out of range; it names the shape.
        """
        shape = tuple(shape)
        if key is None or isinstance(key, str):
            parts = parse_slice(key)
        else:
            parts = _checked(key if isinstance(key, tuple) else (key,))
        full = _expanded(parts, shape)
        axes = tuple(_axis(part, axis, shape) for axis, part in enumerate(full))
        return cls(source=shape, axes=axes)

    @property
    def numel(self) -> int:
        """Number of selected elements."""
        return math.prod(self.shape)

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the answer at `itemsize` bytes an element."""
        return self.numel * itemsize

    @property
    def key(self) -> tuple[int | slice, ...]:
        """The NumPy key, one part for each axis: `array[selection.key]` has `shape`."""
        return tuple(axis if isinstance(axis, int) else _slice_of(axis) for axis in self.axes)

    def __str__(self) -> str:
        return ", ".join(_text(axis, length) for axis, length in zip(self.axes, self.source, strict=True)) or "..."

    def touches(self, flat_start: int, flat_stop: int) -> bool:
        """Whether any element of this flat range of the parameter is selected.

        Raises `UsageError` for a range that meets the selection but does not lie within the parameter.
        """
        low, high = self.hull
        if flat_start >= high or flat_stop <= low:
            return False
        return any(self._meet(box) is not None for box in flat_boxes(self.source, flat_start, flat_stop))

    def scatter(self, flat_start: int, flat_values: NDArray[Any], out: NDArray[Any]) -> None:
        """Writes into `out` those elements of a flat range of the parameter that are selected.

        `flat_values` is 1-D: elements `flat_start` on of the parameter in row-major order. `out` has the answer's
        `shape`, of any dtype that NumPy casts to. Other elements of `out` are left alone.
        Raises `UsageError` where `out` has another shape or the range does not lie within the parameter.
        """
        if out.shape != self.shape or flat_values.ndim != 1:
            raise UsageError(f"cannot scatter {flat_values.shape} values into {out.shape}; the slice has {self.shape}")
        for box in flat_boxes(self.source, flat_start, flat_start + flat_values.size):
            met = self._meet(box)
            if met is not None:
                source, target = met
                values = flat_values[box.offset : box.offset + box.numel].reshape(box.extent)
                # The ellipsis keeps a fully indexed side an array, so that 0-d answers need no case of their own.
                out[(*target, ...)] = values[(*source, ...)]

    def _meet(self, box: Box) -> tuple[list[Any], list[Any]] | None:
        """Selected part of the box, as NumPy keys into the box and into the answer; None where nothing is selected."""
        source: list[Any] = []
        target: list[Any] = []
        for axis, low, high in zip(self.axes, box.lows, box.highs, strict=True):
            if isinstance(axis, int):
                if not low <= axis < high:
                    return None
                source.append(axis - low)
                continue
            first, last = _positions(axis, low, high)
            if first >= last:
                return None
            source.append(_slice_of(range(axis[first] - low, axis[last - 1] - low + axis.step, axis.step)))
            target.append(slice(first, last))
        return source, target

    def _hull(self) -> tuple[int, int]:
        if not self.numel:
            return 0, 0
        low = high = 0
        for axis, stride in zip(self.axes, strides_of(self.source), strict=True):
            ends = (axis, axis) if isinstance(axis, int) else (axis[0], axis[-1])
            low += min(ends) * stride
            high += max(ends) * stride
        return low, high + 1


def _expanded(parts: Key, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    used = [part for part in parts if part is not ...]
    missing = len(shape) - len(used)
    if missing < 0:
        raise SelectionError(f"the slice has {len(used)} axes, but shape {shape} has {len(shape)}").noting(
            shape=list(shape)
        )
    at = next((place for place, part in enumerate(parts) if part is ...), len(used))
    return (*used[:at], *[slice(None)] * missing, *used[at:])


def _axis(part: int | slice, axis: int, shape: tuple[int, ...]) -> Axis:
    length = shape[axis]
    if isinstance(part, slice):
        return range(*part.indices(length))
    if not -length <= part < length:
        allowed = f"allowed are {-length} to {length - 1}" if length else "the axis is empty"
        raise SelectionError(f"index {part} is out of range for axis {axis} of shape {shape}; {allowed}").noting(
            shape=list(shape), axis=axis, index=part
        )
    return part % length


def _positions(axis: range, low: int, high: int) -> tuple[int, int]:
    """Positions within `axis`, first and beyond the last, of its indices from `low` to `high`."""
    if not axis:
        return 0, 0
    if axis.step > 0:
        first, last = -((axis.start - low) // axis.step), -((axis.start - high) // axis.step)
    else:
        first, last = -((high - 1 - axis.start) // -axis.step), (axis.start - low) // -axis.step + 1
    return max(first, 0), min(last, len(axis))


def _slice_of(axis: range) -> slice:
    if len(axis) < 2:
        # Backwards, a single index would need no stop where its neighbour below is -1: forwards is always plain.
        return slice(axis[0], axis[0] + 1, 1) if axis else slice(0, 0, 1)
    beyond = axis[-1] + (1 if axis.step > 0 else -1)
    return slice(axis[0], None if beyond < 0 else beyond, axis.step)


def _text(axis: Axis, length: int) -> str:
    if isinstance(axis, int):
        return str(axis)
    if axis == range(length):
        return ":"
    part = _slice_of(axis)
    stop = "" if part.stop is None else part.stop
    return f"{part.start}:{stop}" if part.step == 1 else f"{part.start}:{stop}:{part.step}"
