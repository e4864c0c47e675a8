"""The dtype of an answer: names that people write, and a cast that says how many values it changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import UsageError, nearest

if TYPE_CHECKING:
    from gradtap.query.formats import GradHead

DTYPES = ("stored", "native", "bfloat16", "float16", "float32", "float64")
SHORT = {"bf16": "bfloat16", "f2": "float16", "f4": "float32", "f8": "float64"}
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one element."""


def dtype_named(text: str) -> str:
    """The name in `DTYPES` that a text means. Raises `UsageError`."""
    name = SHORT.get(text, text)
    if name not in DTYPES:
        known = (*DTYPES, *SHORT)
        raise UsageError(f"dtype is {text[:40]!r}; allowed are {', '.join(known)}{nearest(text, known)}")
    return name


def target_of(head: GradHead, dtype: str) -> str:
    """The dtype that a request for `dtype` is answered in: `stored` is the store's, `native` that of the engine.

    Raises `UsageError` for an unknown name, and for `native` where steps of a stack were captured in several dtypes.
    """
    name = dtype_named(dtype)
    if name == "stored":
        return head.dtype
    if name == "native":
        if head.dtype_captured not in SIZES:
            raise UsageError(
                f"dtype native means one captured dtype, and these steps have {head.dtype_captured}; use stored, or "
                f"one of {', '.join(SIZES)}"
            )
        return head.dtype_captured
    return name


def cast(values: NDArray[Any], dtype: str) -> tuple[NDArray[Any], int]:
    """The values in a dtype of `SIZES`, and how many of them it cannot hold as they are.

    Rounding is to nearest, ties to even; float64 reaches bfloat16 by way of float32, as it does in torch. What is too
    large becomes infinite and counts as changed. NaN stays NaN. The same array where the dtype is the same.
    """
    target = _numpy(dtype)
    if values.dtype == target:
        return values, 0
    with np.errstate(all="ignore"):
        made = values.astype(target)
        if made.dtype.itemsize > values.dtype.itemsize:
            return made, 0
        # Neither of the two half dtypes holds the other's values; float32 holds both.
        wide = np.promote_types(values.dtype, np.float32)
        changed = (made.astype(wide) != values.astype(wide, copy=False)) & ~np.isnan(values)
    return made, int(np.count_nonzero(changed))


def _numpy(dtype: str) -> np.dtype[Any]:
    if dtype == "bfloat16":
        import ml_dtypes

        made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return made
    return np.dtype(dtype)
