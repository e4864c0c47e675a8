"""The API's description beyond what the routes say of themselves: the forms of answers, and their headers.

Written by hand, as the answers are made by `gradtap.query` and have no models here. Tests hold them against answers.
"""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
FLAG: dict[str, Any] = {"type": "boolean"}
ANY: dict[str, Any] = {"type": "object", "additionalProperties": True}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
ROWS: dict[str, Any] = {"type": "array", "items": ANY}
WHOLES: dict[str, Any] = {"type": "array", "items": WHOLE}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, or null."""
    return {**schema, "type": [schema["type"], "null"]}


PAGED = {
    "next": {**maybe(TEXT), "description": "`cursor` of the next page; null at the end."},
    "total": {**WHOLE, "description": "Rows of all pages."},
}

ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "get_about": (
        "about",
        {
            "gradtap": TEXT,
            "format": WHOLE,
            "api": TEXT,
            "formats": TEXTS,
            "dtypes": TEXTS,
            "limits": ANY,
            "auth": {"type": "string", "enum": ["none", "token"]},
            "links": ANY,
        },
    ),
    "list_runs": ("runs", {"runs": ROWS, **PAGED}),
    "get_run": (
        "info",
        {
            "run": TEXT,
            "name": TEXT,
            "tags": ANY,
            "format": WHOLE,
            "gradtap": TEXT,
            "state": TEXT,
            "engine": maybe(TEXT),
            "world": maybe(WHOLE),
            "sessions": ROWS,
            "damaged": ANY,
            "steps": ANY,
            "parameters": ANY,
            "raw_bytes": WHOLE,
            "stored_bytes": WHOLE,
            "index_bytes": WHOLE,
            "other_bytes": WHOLE,
            "ratio": maybe(NUMBER),
        },
    ),
    "list_params": ("params", {"run": TEXT, "step": maybe(WHOLE), "parameters": ROWS, **PAGED}),
    "list_steps": ("steps", {"run": TEXT, "first": maybe(WHOLE), "last": maybe(WHOLE), "steps": ROWS, **PAGED}),
    "get_step": (
        "step",
        {
            "run": TEXT,
            "step": WHOLE,
            "attempt": WHOLE,
            "session": TEXT,
            "capture": WHOLE,
            "complete": FLAG,
            "settled": FLAG,
            "ledger": maybe(ANY),
            "tags": maybe(ANY),
            "parameters": ROWS,
        },
    ),
    "get_hist": (
        "hist",
        {
            "run": TEXT,
            "name": TEXT,
            "step": WHOLE,
            "attempt": WHOLE,
            "slice": maybe(TEXT),
            "dtype_captured": TEXT,
            "flags": TEXTS,
            "scale": TEXT,
            "source": TEXT,
            "zero_bin": maybe(WHOLE),
            "nan": WHOLE,
            "inf": WHOLE,
            "posinf": maybe(WHOLE),
            "neginf": maybe(WHOLE),
            "bins": ROWS,
        },
    ),
    "get_norms": ("norms", {"run": TEXT, "stat": TEXT, "steps": WHOLES, "parameters": ROWS}),
    "get_audit": (
        "audit",
        {"run": TEXT, "steps": WHOLE, "first": maybe(WHOLE), "last": maybe(WHOLE), "not_judged": ANY, "findings": ROWS},
    ),
    "get_health": ("health", {"status": TEXT}),
    "get_readiness": ("ready", {"status": TEXT, "runs": WHOLE}),
    "get_problem": (
        "problem-kind",
        {"type": TEXT, "title": TEXT, "status": WHOLE, "exit_code": WHOLE, "meaning": TEXT},
    ),
}
"""By operation: the name in `schema`, and the keys that every answer has beside it."""


def _header(description: str, schema: dict[str, Any] = TEXT) -> dict[str, Any]:
    return {"description": description, "schema": schema}


CACHING = {
    "ETag": _header("Strong; the same as long as the answer is the same."),
    "Content-Location": _header("The address that names this very answer for good, where the one asked for does not."),
}

ARRAY = {
    "X-Gradtap-Shape": _header("Lengths of the axes, commas between; empty for a scalar."),
    "X-Gradtap-Dtype": _header("Of the elements in the body."),
    "X-Gradtap-Byteorder": _header("Always `little`.", {"type": "string", "const": "little"}),
    "X-Gradtap-Run": _header("The run's id."),
    "X-Gradtap-Name": _header("The parameter's name, percent-encoded UTF-8."),
    "X-Gradtap-Source-Dtype": _header("What the training held; several, commas between, over several sessions."),
    "X-Gradtap-Flags": _header("What is odd about the capture, commas between."),
    "X-Gradtap-Attempt": _header("Which capture of the step; in a stack of each step, or one for all."),
    "X-Gradtap-Factor": _header("Times it, the values are the gradient as defined; as `X-Gradtap-Attempt` in a stack."),
    "X-Gradtap-Complete": _header("Whether every rank committed it; missing where that is not known yet.", FLAG),
    "X-Gradtap-Rounded": _header("Values that the dtype could not hold exactly; of GET alone.", WHOLE),
}
ONE = {"X-Gradtap-Step": _header("The step.", WHOLE)}
STACK = {
    "X-Gradtap-Steps": _header("The steps, commas between; `first..last` where that would be too long."),
    "X-Gradtap-Count": _header("How many steps.", WHOLE),
}
OF_VALUES = {"get_grad": {**CACHING, **ARRAY, **ONE}, "get_grads": {"ETag": CACHING["ETag"], **ARRAY, **STACK}}
"""Headers of the answers that are arrays, by operation."""

UNCHANGED = {"description": "The client has this answer: `If-None-Match` names its `ETag`.", "headers": CACHING}


def described(path: str, operation: dict[str, Any], api: str) -> dict[str, dict[str, Any]]:
    """Complete the description of an operation; the schemas that it refers to, by name."""
    responses, name = operation["responses"], operation["operationId"]
    schemas = {}
    if name in ANSWERS:
        kind, keys = ANSWERS[name]
        title = "".join(word.capitalize() for word in kind.split("-"))
        schemas[title] = _form(kind, title, keys)
        responses["200"]["content"] = {
            **responses["200"].get("content", {}),
            "application/json": {"schema": {"$ref": f"#/components/schemas/{title}"}},
        }
    if name in OF_VALUES:
        responses["200"]["headers"] = OF_VALUES[name]
    elif path.startswith(api):
        responses["200"]["headers"] = CACHING
    if path.startswith(api):
        responses["304"] = UNCHANGED
    # A wrong argument is a 400 here, a 422 is an answer that is too large.
    if "HTTPValidationError" in str(responses.get("422", "")):
        del responses["422"]
    operation["responses"] = dict(sorted(responses.items()))
    for parameter in operation.get("parameters", ()):
        schema = parameter["schema"]
        if schema.get("default") == "":
            # Nothing is what is meant where it is left out; as a value it would fit neither enum nor pattern.
            del schema["default"]
    return schemas


def _form(kind: str, title: str, keys: dict[str, Any]) -> dict[str, Any]:
    lost = {**ANY, "description": "How many values JSON has no number for: they are null here."}
    return {
        "title": title,
        "type": "object",
        "properties": {
            "schema": {"type": "string", "const": f"gradtap.{kind}/1"},
            **keys,
            **({} if kind in ("health", "ready", "problem-kind") else {"nonfinite": lost}),
        },
        "required": ["schema", *keys],
    }
