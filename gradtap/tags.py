"""User tags as JSON: numbers, texts, lists and dicts as they are, tensors and arrays as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradtap.errors import UsageError


def as_json(value: Any) -> Any:
    """The value as JSON holds it: what has `tolist` or `item` (tensors, arrays, NumPy numbers) as plain numbers.

    JSON has no NaN and no infinity: they become the texts "NaN", "Infinity" and "-Infinity".
    Raises `UsageError` for a value that is none of these.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _nonfinite(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    raise UsageError(
        f"a tag is {value!r} of type {type(value).__name__}; tags are numbers, texts, lists, dicts, tensors or arrays"
    )


def _nonfinite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
