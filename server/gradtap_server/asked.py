"""The query part of an address: parameters that a route does not have are refused, so that a typo is no silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request

from gradtap.errors import UsageError, near_names, nearest
from gradtap_server.routing import API


def check_names(request: Request, allowed: Iterable[str]) -> None:
    """Raises `UsageError` for a query parameter that is not allowed, or one that is given twice."""
    known = list(allowed)
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            raise UsageError(
                f"there is no parameter {name[:80]!r} here; allowed are {', '.join(known)}{nearest(name, known)}"
            ).noting(allowed=known, did_you_mean=near_names(name, known))
        if given.count(name) > 1:
            raise UsageError(f"{name} is given {given.count(name)} times; give it once")


def accepted(request: Request) -> str | None:
    """What the client accepts, over all of its `Accept` headers; None where it has none."""
    found = request.headers.getlist("accept")
    return ", ".join(found) if found else None


def address(request: Request, *parts: object, query: Mapping[str, Any]) -> str:
    """The address below `/api/v1`, as a client of this service sees it, that these names make.

    Parts are encoded, slashes in them too; of `query`, what is None, False or empty is left out and True is 1.
    """
    path = "/".join(quote(str(part), safe="") for part in parts)
    kept = {name: value for name, value in query.items() if value not in (None, False, "")}
    text = urlencode({name: 1 if value is True else value for name, value in kept.items()}, quote_via=quote)
    root = quote(request.scope.get("root_path", ""))
    return f"{root}{API}/{path}" + (f"?{text}" if text else "")
