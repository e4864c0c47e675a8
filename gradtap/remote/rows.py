"""Answers out of JSON bodies: pages joined, and what JSON has no number for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from gradtap.errors import StoreError, UsageError
from gradtap.query.answer import Answer
from gradtap.remote.client import Client, Query
from gradtap.remote.problems import stranger

PAGE = 1000
"""Rows to ask for at a time: the most that a server gives unless it was set to less."""


def asked(
    client: Client,
    path: str,
    query: Query,
    *,
    name: str,
    rows_name: str = "",
    paged: bool = False,
    pinned: Callable[[Mapping[str, Any]], Query] = lambda first: {},
) -> Answer:
    """The answer to the query `name` at a path; all of its pages. `pinned`: what the first page fixes of the others.

    What was NaN or infinite is None, and "nonfinite" among the facts has the counts. Raises as `Client.fetch`, and
    `StoreError` where another run or step took the place of this one between two pages.
    """
    schema = f"gradtap.{name}/1"
    size: dict[str, str | int | None] = {"limit": PAGE} if paged else {}
    try:
        body = client.json(path, {**query, **size}, schema=schema)
    except UsageError as error:
        most = error.facts.get("page_max")
        if not paged or not isinstance(most, int):
            raise
        size = {"limit": most}
        body = client.json(path, {**query, **size}, schema=schema)
    rows, lost = list(body.get(rows_name, [])), Counter(body.get("nonfinite", {}))
    first = body
    seen: set[str] = set()
    while cursor := body.get("next"):
        _onward(f"{client.base}{path}", cursor, seen, body, rows_name, len(rows))
        # Words such as `last` must not come to mean another step on the next page.
        body = client.json(path, {**query, **size, **pinned(first), "cursor": cursor}, schema=schema)
        _same(first, body)
        rows += body.get(rows_name, [])
        lost.update(body.get("nonfinite", {}))
    # Of one step, those that the first page counted what they lack of; else the newest, of a run that is written.
    said = first if "step" in first else body
    facts = {
        key: value for key, value in said.items() if key not in {"schema", "next", "total", "nonfinite", rows_name}
    }
    facts |= {"nonfinite": dict(lost)} if lost else {}
    return Answer(query=name, facts=facts, rows=rows, rows_name=rows_name)


def _onward(url: str, cursor: str, seen: set[str], body: Mapping[str, Any], rows_name: str, count: int) -> None:
    """Raise where following `next` would never come to an end."""
    if cursor in seen or not body.get(rows_name) or count >= body.get("total", count + 1):
        raise stranger(url, "its pages have no end")
    seen.add(cursor)


def _same(first: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    if body.get("run") != first.get("run"):
        raise StoreError(f"another run took the place of {first.get('run')} while it was read; ask again")
    for key in ("step", "attempt"):
        if body.get(key) != first.get(key):
            raise StoreError(
                f"the {key} went from {first.get(key)} to {body.get(key)} while pages were read; ask again"
            )


def with_nan(answer: Answer, column: str) -> Answer:
    """The answer with NaN for each None in the lists of a column, where nothing else can have been there."""
    lost: Mapping[str, int] = answer.facts.get("nonfinite", {})
    if not lost or lost.get("posinf") or lost.get("neginf"):
        return answer
    facts = {key: value for key, value in answer.facts.items() if key != "nonfinite"}
    rows = [row | {column: [math.nan if v is None else v for v in row[column]]} for row in map(dict, answer.rows)]
    return Answer(query=answer.query, facts=facts, rows=rows, rows_name=answer.rows_name)
