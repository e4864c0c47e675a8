"""Answers out of JSON bodies: pages joined, and what JSON has no number for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gradtap.errors import StoreError, UsageError
from gradtap.query.answer import Answer
from gradtap.remote.client import Client, Query

PAGE = 1000
"""Rows to ask for at a time: the most that a server gives unless it was set to less."""


def asked(client: Client, path: str, query: Query, *, name: str, rows_name: str = "", paged: bool = False) -> Answer:
    """The answer to the query `name` at a path; all of its pages.

    What was NaN or infinite is None, and "nonfinite" among the facts has the counts. Raises as `Client.fetch`, and
    `StoreError` where another run took the place of this one between two pages.
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
    run, pages = body.get("run"), 1
    while cursor := body.get("next"):
        body = client.json(path, {**query, **size, "cursor": str(cursor)}, schema=schema)
        if body.get("run") != run:
            raise StoreError(f"another run took the place of {run} while it was read; ask again")
        rows, pages = rows + body.get(rows_name, []), pages + 1
        lost.update(body.get("nonfinite", {}))
    # Those of the last page: of a run that is written, they are the newest.
    facts = {
        key: value for key, value in body.items() if key not in {"schema", "next", "total", "nonfinite", rows_name}
    }
    if pages > 1 and lost and _has_none(facts):
        # Each page has counted what its facts lack too.
        again = _lost_facts(client, path, query, schema)
        lost = Counter({kind: count - (pages - 1) * again[kind] for kind, count in lost.items()})
    facts |= {"nonfinite": dict(lost)} if any(lost.values()) else {}
    return Answer(query=name, facts=facts, rows=rows, rows_name=rows_name)


def _has_none(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_none(item) for item in value.values())
    return value is None or (isinstance(value, list) and any(_has_none(item) for item in value))


def _lost_facts(client: Client, path: str, query: Query, schema: str) -> Counter[str]:
    """What the facts alone lack: of two rows apart, less of both together."""
    one = client.json(path, {**query, "limit": 1}, schema=schema)
    other = client.json(path, {**query, "limit": 1, "cursor": str(one["next"])}, schema=schema)
    both = client.json(path, {**query, "limit": 2}, schema=schema)
    counts = [Counter[str](body.get("nonfinite", {})) for body in (one, other, both)]
    return Counter({kind: counts[0][kind] + counts[1][kind] - counts[2][kind] for kind in counts[0] | counts[1]})


def with_nan(answer: Answer, column: str) -> Answer:
    """The answer with NaN for each None in the lists of a column, where nothing else can have been there."""
    lost: Mapping[str, int] = answer.facts.get("nonfinite", {})
    if not lost or lost.get("posinf") or lost.get("neginf"):
        return answer
    facts = {key: value for key, value in answer.facts.items() if key != "nonfinite"}
    rows = [row | {column: [math.nan if v is None else v for v in row[column]]} for row in map(dict, answer.rows)]
    return Answer(query=answer.query, facts=facts, rows=rows, rows_name=answer.rows_name)
