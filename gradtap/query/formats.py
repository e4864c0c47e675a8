"""One gradient as the bytes of a file: raw, npy, safetensors or JSON. What it costs is known before it is read."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import UsageError, nearest
from gradtap.query.answer import plain
from gradtap.query.cast import DTYPES, SHORT, SIZES, cast, target_of
from gradtap.types import GradSlice

__all__ = ["DTYPES", "FORMATS", "MEDIA_TYPES", "SHORT", "GradHead", "Payload", "encode", "length_of", "resolved_dtype"]

MEDIA_TYPES = {
    "raw": "application/octet-stream",
    "npy": "application/x-npy",
    "json": "application/json",
    "safetensors": "application/x-safetensors",
}
FORMATS = tuple(MEDIA_TYPES)

SCHEMA = "gradtap.grad/1"
WITHOUT_BFLOAT16 = frozenset({"npy", "json"})
"""Formats that have no bfloat16; they carry it as float32, which holds all of its values."""

SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
ALIGNMENT = 8
"""safetensors pads its header so that the values begin at a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradHead:
    """What is known of a gradient before it is read. `run` is the run's id, `shape` and `dtype` those of the answer.

    `complete` is None where only reading tells. `stacked`: the first axis is that of `steps`. `slice` is the canonical
    text of the part of the parameter. `consumed`: as of `GradSlice`.
    """

    run: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    dtype_captured: str
    steps: tuple[int, ...]
    attempts: tuple[int, ...]
    flags: tuple[str, ...]
    factor: tuple[float, ...]
    complete: bool | None
    stacked: bool
    slice: str
    consumed: tuple[float, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements of the answer."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """A gradient in a format. `parts` follow each other in the body; values are little-endian, in row-major order.

    `dtype` is that of the elements in the body; `rounded` counts elements that it could not hold as they are stored.
    """

    format: str
    media_type: str
    dtype: str
    head: GradHead
    parts: tuple[bytes | memoryview, ...]
    rounded: int

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return sum(memoryview(part).nbytes for part in self.parts)

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


def format_named(text: str) -> str:
    """The format itself. Raises `UsageError` for an unknown one."""
    if text not in MEDIA_TYPES:
        raise UsageError(f"format is {text[:40]!r}; allowed are {', '.join(FORMATS)}{nearest(text, FORMATS)}")
    return text


def resolved_dtype(head: GradHead, *, format: str, dtype: str) -> str:
    """The dtype of the elements in the body. Raises `UsageError` for a format or dtype that there is none of."""
    known, target = format_named(format), target_of(head, dtype)
    return "float32" if target == "bfloat16" and known in WITHOUT_BFLOAT16 else target


def length_of(head: GradHead, *, format: str, dtype: str) -> int | None:
    """Bytes that `encode` makes, without reading anything; None where only reading tells.

    That is JSON, and safetensors of a gradient of which it is not known that it is whole. Raises as `resolved_dtype`.
    """
    target = resolved_dtype(head, format=format, dtype=dtype)
    if format == "json" or (format == "safetensors" and head.complete is None):
        return None
    headers = {"npy": _npy_header, "safetensors": _safetensors_header}
    header = headers[format](head, target) if format in headers else b""
    return len(header) + head.numel * SIZES[target]


def encode(grad: GradSlice, head: GradHead, *, format: str, dtype: str) -> Payload:
    """The gradient that was read as bytes of `format`, its values in `dtype`. The values are copied only to convert.

    Raises as `resolved_dtype`.
    """
    target = resolved_dtype(head, format=format, dtype=dtype)
    # Through the dtype that was asked for, so that a format without it gives the same numbers.
    asked, rounded = cast(np.asarray(grad.values), target_of(head, dtype))
    values, _ = cast(asked, target)
    parts: tuple[bytes | memoryview, ...]
    if format == "json":
        parts = (json_text(head, values, complete=grad.complete, rounded=rounded),)
    elif format == "npy":
        parts = (_npy_header(head, target), _bytes_of(values))
    elif format == "safetensors":
        parts = (_safetensors_header(head, target, complete=grad.complete), _bytes_of(values))
    else:
        parts = (_bytes_of(values),)
    # Once it is read, it is known whether it is whole.
    head = replace(head, complete=grad.complete)
    return Payload(format=format, media_type=MEDIA_TYPES[format], dtype=target, head=head, parts=parts, rounded=rounded)


def facts_of(head: GradHead, *, complete: bool) -> dict[str, Any]:
    """What every format that can says beside the values; plain, single ones where there is one step."""
    one = not head.stacked
    # A factor that nobody knows is no value of the gradient: left NaN, it would be counted as one.
    factor = [known if math.isfinite(known) else None for known in head.factor]
    made: dict[str, Any] = {
        "run": head.run,
        "name": head.name,
        "slice": head.slice,
        "shape": list(head.shape),
        "dtype_captured": head.dtype_captured,
        "complete": complete,
        "flags": list(head.flags),
        **({"step": head.steps[0], "attempt": head.attempts[0], "factor": factor[0]} if one else {}),
        **({} if one else {"steps": list(head.steps), "attempts": list(head.attempts), "factor": factor}),
    }
    if head.consumed is not None:
        made["consumed"] = head.consumed[0] if one else list(head.consumed)
    return made


def json_text(head: GradHead, values: NDArray[Any], *, complete: bool, rounded: int) -> bytes:
    """One JSON object; NaN and infinities of the values are null and counted under "nonfinite", be there any or none.

    A number parses to the same value in its dtype: float32 as the shortest decimal of the double that it widens to.
    """
    facts = {"schema": SCHEMA, **facts_of(head, complete=complete), "dtype": str(values.dtype), "rounded": rounded}
    body = {"nonfinite": {"nan": 0, "posinf": 0, "neginf": 0}} | plain({**facts, "values": values})
    return json.dumps(body, allow_nan=False).encode()


def _bytes_of(values: NDArray[Any]) -> memoryview:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    # As bytes: a buffer of bfloat16 has no format that others know.
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _npy_header(head: GradHead, dtype: str) -> bytes:
    file = io.BytesIO()
    descr = np.dtype(dtype).newbyteorder("<").str
    facts = {"descr": descr, "fortran_order": False, "shape": head.shape}
    np.lib.format.write_array_header_1_0(file, facts)
    return file.getvalue()


def _safetensors_header(head: GradHead, dtype: str, *, complete: bool = True) -> bytes:
    """Length and JSON as the format has them; the values follow, so that they need no copy.

    Metadata of safetensors is text alone; what is no text is JSON.
    """
    facts = {"schema": SCHEMA, **facts_of(head, complete=complete)}
    metadata = {
        name: fact if isinstance(fact, str) else json.dumps(plain({"": fact})[""]) for name, fact in facts.items()
    }
    nbytes = head.numel * SIZES[dtype]
    tensor = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(head.shape), "data_offsets": [0, nbytes]}
    name = head.name if head.name != "__metadata__" else "__metadata__.gradient"
    text = json.dumps({"__metadata__": metadata, name: tensor}).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
