"""Stores that the tests of the data routes read, and how to ask for what is in them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.server.serving import Server
from tests.support.synthetic import Job, spec

NAMES = ("layers/0/w", "größe.β", "a b+c", "100%25.w", "2", "x/hist", "q?a=1&b#c", "%2F", "-", "x:y;z")
"""Names that an address must carry without harm."""

PARAMS = (
    spec("w", 37, 13, aliases=("head",)),
    spec("scalar"),
    spec("conv", 5, 3, 2, 4),
    spec("frozen", 11, status="frozen"),
    spec("half", 9, 4, dtype="bfloat16"),
    spec("tiny", 17, dtype="float16"),
    spec("double", 6, 5, dtype="float64"),
    spec("none", 0, 4),
    *(spec(name, 8 + at) for at, name in enumerate(NAMES)),
)

ODD = {
    "float32": np.array([0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF], np.uint32),
    "float64": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, -2.2e-308]).view(np.uint64),
    "float16": np.array([0x7E00, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x83FF], np.uint16),
    "bfloat16": np.array([0x7FC0, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x807F], np.uint16),
}
"""NaN, both infinities, minus zero, the smallest and a larger subnormal number of each dtype, as bits."""

BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


class OddJob(Job):
    """A job whose gradients begin with all kinds of odd numbers."""

    def gradient(self, param: int, step: int) -> NDArray[Any]:
        """As of any job, the first six elements but odd."""
        values, odd = super().gradient(param, step), ODD[self.params[param].dtype]
        if values.size > len(odd):
            values[: len(odd)] = odd.view(values.dtype)
        return values

    def captured(self, name: str, step: int) -> NDArray[Any]:
        """What the engine held, in the dtype that it had."""
        at = [p.name for p in self.params].index(name)
        values = self.gradient(at, step).reshape(self.params[at].shape)
        return values.view(ml_dtypes.bfloat16) if self.params[at].dtype == "bfloat16" else values


def same_bits(one: Any, other: Any) -> bool:
    """Whether two arrays have one shape, one dtype and the same bits, those of NaN and minus zero too."""
    first, second = np.ascontiguousarray(one), np.ascontiguousarray(other)
    if np.shape(one) != np.shape(other) or first.dtype.newbyteorder("=") != second.dtype.newbyteorder("="):
        return False
    bits = BITS[first.dtype.itemsize]
    return bool((first.view(bits) == second.view(bits)).all())


def grad_path(run: str, step: object, name: str, **query: Any) -> str:
    """The address of a gradient."""
    return f"/api/v1/runs/{run}/steps/{step}/grads/{quote(name, safe='')}{_query(query)}"


def stack_path(run: str, name: str, steps: str, **query: Any) -> str:
    """The address of a stack of gradients."""
    return f"/api/v1/runs/{run}/grads/{quote(name, safe='')}{_query({'steps': steps} | query)}"


def _query(query: dict[str, Any]) -> str:
    return "?" + "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items()) if query else ""


def array_of(answer: Any) -> NDArray[Any]:
    """The array that a raw answer holds, made from its headers alone."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-gradtap-byteorder"] == "little"
    name, shape = answer.headers["x-gradtap-dtype"], answer.headers["x-gradtap-shape"]
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name).newbyteorder("<")
    return np.frombuffer(answer.content, dtype).reshape([int(length) for length in shape.split(",") if length])


def reads(server: Server, run: str) -> int:
    """How many chunks the server has read of a run."""
    opened = server.app.state.gradtap.place(run).run
    return sum(reader.chunks.reads for reader in opened._readers.values())
