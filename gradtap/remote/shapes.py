"""What a JSON answer must hold for the verbs to read it: one table of keys and kinds, and one check of a body by it.

A server may say more than this: newer ones do. Not here: what the values mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradtap.remote.problems import stranger

Kind = str | Mapping[str, "Kind"] | tuple["Kind"]
"""A name of `_PLAIN`, with "?" behind it where it may be null; an object with these keys; a list of one kind.

A key with "?" behind it may be left out. The key "*" stands for all keys that an object has.
"""

_PLAIN: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "whole": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "any": lambda value: True,
}

_SPAN: Mapping[str, Kind] = {"first": "whole?", "last": "whole?", "count": "whole"}
_ROW_OF_STEPS: Kind = {
    "step": "whole",
    "attempt": "whole?",
    "complete": "flag",
    "flags": ("text",),
    "session": "text?",
    "record": "text?",
    "state": "text?",
    "tags_error?": "text",
    "time": "number?",
    "norm": "number?",
    "stored_bytes": "whole?",
}
_PARAMETER: Kind = {
    "index": "whole",
    "name": "text",
    "aliases": ("text",),
    "shape": ("whole",),
    "dtype": "text",
    "status": "text",
    "arrays": "whole",
    "norm": "number?",
}

SHAPES: Mapping[str, Mapping[str, Kind]] = {
    "runs": {
        "runs": ({"name": "text", "run?": "any", "damaged?": {"*": "any"}, "steps?": _SPAN, "state?": "text"},),
    },
    "info": {
        "run": "text",
        "name": "text?",
        "state": "text",
        "engine": "text?",
        "world": "whole?",
        "format": "whole",
        "ratio": "number?",
        "damaged": {"*": "any"},
        "tags": {"*": "any"},
        "steps": {**_SPAN, "gaps": ("whole",)},
        "sessions": ({"name": "text", "state": "text", "created?": "number?", "first_step?": "whole?"},),
        "parameters": {
            **dict.fromkeys(("total", "stored", "frozen", "unoptimized", "not_selected", "empty", "elements"), "whole"),
            "dtypes": {"*": "whole"},
        },
        **dict.fromkeys(("raw_bytes", "stored_bytes", "index_bytes", "other_bytes"), "whole"),
    },
    "params": {"run": "text", "step": "whole?", "parameters": (_PARAMETER,)},
    "steps": {"run": "text", "first": "whole?", "last": "whole?", "steps": (_ROW_OF_STEPS,)},
    "step": {
        "run": "text",
        "step": "whole",
        "attempt": "whole",
        "tags?": "any",
        "tags_error?": "text",
        "parameters": ({"name": "text", "shape": ("whole",)},),
    },
    "norms": {
        "run": "text",
        "stat": "text",
        "steps": ("whole",),
        "parameters": ({"name": "text", "values": ("number?",)},),
    },
    "hist": {
        "run": "text",
        "name": "text",
        "step": "whole",
        "attempt": "whole",
        "dtype_captured": "text",
        "slice": "text?",
        "flags": ("text",),
        "source": "text",
        "scale": "text",
        "zero_bin": "whole?",
        "nan": "whole?",
        "inf": "whole?",
        "posinf": "whole?",
        "neginf": "whole?",
        "bins": ({"low": "number?", "high": "number?", "count": "whole"},),
    },
    "audit": {
        "run": "text",
        "steps": "whole",
        "first": "whole?",
        "last": "whole?",
        "not_judged": {"*": "text"},
        "findings": (
            {
                **dict.fromkeys(("code", "severity", "cause", "cure"), "text"),
                **dict.fromkeys(("count", "first", "last"), "whole"),
                "evidence": {"*": "any"},
            },
        ),
    },
}
"""What the body of each query has, beside its schema."""

_OF_ANY: Kind = {"nonfinite?": {"*": "whole"}, "next?": "text?", "total?": "whole"}


def check_shape(url: str, query: str, body: Mapping[str, Any]) -> None:
    """Raise the `StoreError` of a stranger for a body without what the answer to `query` must hold."""
    wrong = _wrong(body, _OF_ANY, "") or _wrong(body, SHAPES[query], "")
    if wrong is None and query == "norms":
        width = len(body["steps"])
        uneven = [row["name"] for row in body["parameters"] if len(row["values"]) != width]
        wrong = f"{uneven[0]!r} has not one value for each of {width} steps" if uneven else None
    if wrong is None and query == "hist" and not 0 <= (body["zero_bin"] or 0) < max(1, len(body["bins"])):
        wrong = f"zero_bin is none of the {len(body['bins'])} bins"
    if wrong is not None:
        raise stranger(url, f"or of another version: {wrong}")


def _wrong(value: Any, kind: Kind, where: str) -> str | None:
    """What is wrong with a value, and where; None for nothing."""
    if isinstance(kind, tuple):
        if not isinstance(value, list):
            return f"{where} is no list"
        return next((bad for at, each in enumerate(value) if (bad := _wrong(each, kind[0], f"{where}[{at}]"))), None)
    if not isinstance(kind, str):
        return _wrong_object(value, kind, where)
    if value is None and kind.endswith("?"):
        return None
    name = kind.removesuffix("?")
    return None if _PLAIN[name](value) else f"{where} is {value!r:.40}, no {name}"


def _wrong_object(value: Any, kind: Mapping[str, Kind], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where or 'it'} is no object"
    if "*" in kind:
        kind = dict.fromkeys(value, kind["*"])
    for key, wanted in kind.items():
        # As it is first: where the keys are the body's own, one may end so too.
        name = key if key in value else key.removesuffix("?")
        if name in value:
            if wrong := _wrong(value[name], wanted, f"{where}.{name}" if where else name):
                return wrong
        elif not key.endswith("?"):
            return f"{where}.{key} is missing" if where else f"{key} is missing"
    return None
