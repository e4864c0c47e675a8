"""JSON on its way out: an `Answer` or a plain object as bytes, compact and in UTF-8."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gradtap.query.answer import Answer
from gradtap_server.caching import Freshness, unchanged


class JsonResponse(Response):
    """A body of plain values as JSON, many times faster than the standard library writes it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes, as of `json_bytes`."""
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """Plain values as JSON. Non-finite numbers must be gone already, as `Answer.body` sees to."""
    try:
        return orjson.dumps(content)
    except TypeError:
        # A number of more than 64 bits, or a name that is no Unicode: slower, but it can be written.
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def answered(
    request: Request,
    answer: Answer,
    *,
    shared: bool,
    settled: bool = False,
    location: str | None = None,
    later: bool = False,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    """The response for an answer of a query, with further keys such as `next` beside its own.

    `no-cache` unless `settled`, as a run that is written grows; the tag is of the bytes, which are few and had to be
    made. `shared`, `settled` and `location` as in `Freshness`. `later`: a page after the first, whose facts were
    counted there.
    """
    response = JsonResponse({**(_later(answer) if later else answer.body()), **more})
    # Two answers in the same bytes are the same answer.
    tag = f'"{hashlib.blake2b(bytes(response.body), digest_size=16).hexdigest()}"'
    fresh = Freshness(tag=tag, settled=settled, shared=shared, location=location)
    for name, value in {**fresh.headers(), **(headers or {})}.items():
        response.headers[name] = value
    return unchanged(request, fresh) or response


def _later(answer: Answer) -> dict[str, Any]:
    """The body, with what its rows alone lack under "nonfinite": clients add up the pages."""
    facts = replace(answer, rows=(), rows_name="").body()
    facts.pop("nonfinite", None)
    return {**facts, **replace(answer, facts={}).body()}
