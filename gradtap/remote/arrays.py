"""Gradients out of HTTP answers: the facts in `X-Gradtap-*` headers, and an array over the body.

Not here: whether they are those of what was asked for (`identity`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np

from gradtap.errors import StoreError
from gradtap.query.cast import SIZES
from gradtap.remote.client import Reply
from gradtap.remote.problems import stranger
from gradtap.types import GradSlice

T = TypeVar("T")

HEADER = 2**20
"""Bytes that the head of a file may take beside its values and what it lists for each step."""

PER_STEP = 128
"""Bytes that a file may take to list a step, its attempt and its factor."""

PER_NUMBER = 32
"""Bytes of one number as text, and what stands between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFacts:
    """What the headers of an array say. `dtype` is that of the elements in the body.

    `steps`, `attempts` and `factor` are None where the list was too long for a header; `count` is their number, and
    `span` the first and last step. `consumed` is None there too, and where `as_consumed` is False.
    """

    run: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    dtype_captured: str
    flags: tuple[str, ...]
    complete: bool
    rounded: int
    stacked: bool
    count: int
    span: tuple[int, int]
    steps: tuple[int, ...] | None
    attempts: tuple[int, ...] | None
    factor: tuple[float, ...] | None
    as_consumed: bool
    consumed: tuple[float, ...] | None

    @property
    def whole(self) -> bool:
        """Whether nothing was left out."""
        listed = self.steps is not None and self.attempts is not None and self.factor is not None
        return listed and (self.consumed is not None or not self.as_consumed)


def array_facts(url: str, headers: Mapping[str, str], *, partial: bool) -> ArrayFacts:
    """The facts in the headers of an answer; `partial` is whether an incomplete capture was asked for.

    Raises `StoreError` where they are missing or make no sense.
    """
    try:
        return _facts(headers, partial)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise stranger(url, f"its answer lacks the headers of an array ({error})") from error


def most_bytes(facts: ArrayFacts, format: str) -> int:
    """The most bytes that a body in a format may have; just as many as that of `raw` has."""
    values = math.prod(facts.shape) * SIZES[facts.dtype]
    if format == "raw":
        return values
    if format == "json":
        # Brackets around nothing take room too.
        cells = math.prod(max(length, 1) for length in facts.shape)
        values = cells * (PER_NUMBER + 4 * len(facts.shape))
    return values + HEADER + PER_STEP * facts.count


def array_of(facts: ArrayFacts, reply: Reply) -> np.ndarray[Any, np.dtype[Any]]:
    """The values in a raw body, in the machine's byte order, writable; no copy where that is little endian.

    Raises `StoreError` for a body of another length than the headers say, and for values of a dtype that no store has.
    """
    if facts.dtype not in ("float32", "float64"):
        raise stranger(reply.url, f"it sent {facts.dtype} where the values as they are stored were asked for")
    dtype = np.dtype(facts.dtype)
    wanted = math.prod(facts.shape) * dtype.itemsize
    if len(reply.body) != wanted:
        raise StoreError(f"the answer of {reply.url} has {len(reply.body)} bytes where {wanted} belong; ask again")
    values = np.frombuffer(reply.body, dtype.newbyteorder("<")) if wanted else np.empty(0, dtype)
    return values.astype(dtype, copy=False).reshape(facts.shape)


def grad_of(facts: ArrayFacts, values: np.ndarray[Any, np.dtype[Any]]) -> GradSlice:
    """The gradient, of facts from which nothing is left out."""
    assert facts.steps is not None and facts.attempts is not None and facts.factor is not None
    return GradSlice(
        values=values,
        name=facts.name,
        steps=facts.steps,
        attempts=facts.attempts,
        dtype_captured=facts.dtype_captured,
        complete=facts.complete,
        flags=facts.flags,
        factor=facts.factor,
        consumed=facts.consumed,
    )


def _facts(headers: Mapping[str, str], partial: bool) -> ArrayFacts:
    def said(name: str) -> str:
        return headers[f"X-Gradtap-{name}"]

    if said("Byteorder") != "little":
        raise ValueError(f"Byteorder is {said('Byteorder')!r}")
    if said("Dtype") not in SIZES:
        raise ValueError(f"Dtype is {said('Dtype')[:40]!r}")
    stacked = "X-Gradtap-Steps" in headers
    listed = said("Steps") if stacked else said("Step")
    first, dots, last = listed.partition("..")
    steps = None if dots else _listed(listed, int)
    if steps == () or (dots and not stacked):
        raise ValueError(f"Step is {listed!r}")
    span = (int(first), int(last)) if steps is None else (steps[0], steps[-1])
    count = int(said("Count")) if stacked else 1
    if steps is not None and len(steps) != count:
        raise ValueError(f"Steps names {len(steps)} steps and Count {count}")
    return ArrayFacts(
        run=said("Run"),
        name=unquote(said("Name"), errors="surrogateescape"),
        shape=_shape(said("Shape"), count if stacked else None),
        dtype=said("Dtype"),
        dtype_captured=said("Source-Dtype"),
        flags=_listed(headers.get("X-Gradtap-Flags", ""), str),
        # An incomplete one of which nothing is said must not pass for complete.
        complete=_flag(headers.get("X-Gradtap-Complete", "false" if partial else "true")),
        rounded=int(headers.get("X-Gradtap-Rounded", "0")),
        stacked=stacked,
        count=count,
        span=span,
        steps=steps,
        attempts=_each(headers.get("X-Gradtap-Attempt"), int, count),
        factor=_each(headers.get("X-Gradtap-Factor"), float, count),
        as_consumed="X-Gradtap-Consumed" in headers,
        # Empty where the list is too long for a header.
        consumed=_each(headers.get("X-Gradtap-Consumed") or None, float, count),
    )


def _shape(text: str, count: int | None) -> tuple[int, ...]:
    shape = _listed(text, int)
    # What no array can have: NumPy counts bytes in 63 bits.
    if any(length < 0 for length in shape) or math.prod(max(length, 1) for length in shape) >= 2**60:
        raise ValueError(f"Shape is {text[:80]!r}")
    if len(shape) > 64:
        raise ValueError(f"Shape has {len(shape)} axes")
    if count is not None and shape[:1] != (count,):
        raise ValueError(f"Shape is {text[:80]!r} for {count} steps")
    return shape


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"Complete is {text[:40]!r}")
    return text == "true"


def _listed(text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(kind(part) for part in text.split(",")) if text else ()


def _each(text: str | None, kind: Callable[[str], T], count: int) -> tuple[T, ...] | None:
    """One value for each step; a single one stands for all."""
    if text is None:
        return None
    found = _listed(text, kind)
    if len(found) not in (1, count):
        raise ValueError(f"{len(found)} values for {count} steps")
    return found * count if len(found) == 1 else found
