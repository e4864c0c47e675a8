"""The parts of addresses that routes share, with the words and examples of the API's description."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

from fastapi import Path, Query

from gradtap.errors import ERRORS, PROBLEM_SCHEMA, PROBLEMS
from gradtap.read.discover import RUN_SLUG

RunName = Annotated[
    str,
    Path(
        description="Name of a run as `GET /api/v1/runs` lists it, or its id of 32 hexadecimal digits.",
        examples=["demo"],
        # A name that does not fit is a run that is not there, with near names; not another kind of error.
        json_schema_extra={"pattern": f"^{RUN_SLUG}$"},
    ),
]
StepWord = Annotated[
    str,
    Path(
        description="Number of a step, `first` or `last`.",
        examples=["last"],
        json_schema_extra={"pattern": "^([0-9]+|first|last)$"},
    ),
]
Match = Annotated[
    str,
    Query(
        description="Parameters whose name holds this text, or fits it whole where it has wildcards; `!` in front "
        "turns it round. Empty for all.",
        examples=["layers.*.weight"],
    ),
]
RANGE_PATTERN = r"^-?[0-9]*(:-?[0-9]*(:[0-9]*)?)?$"
"""Steps `A:B:C`, each part optional."""
SLICE_PATTERN = r"^[-0-9:,. ]*$"
"""The letters of a slice; what is one, the parameter's shape decides."""

Attempt = Annotated[
    int | None,
    Query(
        ge=1,
        description="Which capture of a step that was recorded again, from 1; the last one if left out.",
        examples=[1],
    ),
]
Limit = Annotated[
    int | None,
    Query(
        description="Most rows of this page; `limits` of `GET /api/v1` has the default and the most.", examples=[200]
    ),
]
Cursor = Annotated[
    str | None,
    Query(description="`next` of the page before; nothing for the first page.", examples=["WyJzdGVwcyIsIDE5OV0"]),
]


def problems(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """What a route says of its errors in the API's description, by status; those of any route with data beside them."""
    return open_problems(*slugs, "usage", "unauthenticated", "forbidden", "timed-out")


def open_problems(*slugs: str, status: int | None = None) -> dict[int | str, dict[str, Any]]:
    """The same of a route that tells nothing of any run; `status` where it is not that of the table."""
    by_status: dict[int, list[str]] = defaultdict(list)
    for slug in dict.fromkeys(slugs):
        by_status[status or PROBLEMS[ERRORS[slug]].status].append(slug)
    return {
        number: {
            "description": "Problem: " + ", ".join(f"`{slug}`" for slug in found),
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for number, found in sorted(by_status.items())
    }


PROBLEM: dict[str, Any] = {
    "title": "Problem",
    "type": "object",
    "description": "RFC 9457. `exit_code` is what the command line ends with for the same error; further keys have "
    "what a program can use of `detail`, such as `did_you_mean`.",
    "properties": {
        "schema": {"type": "string", "const": PROBLEM_SCHEMA},
        "type": {"type": "string", "examples": ["/problems/run-not-found"]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "exit_code": {"type": "integer"},
        "instance": {"type": "string", "description": "The request's id."},
    },
    "required": ["schema", "type", "title", "status", "detail", "exit_code", "instance"],
}
"""The shape of every error."""
