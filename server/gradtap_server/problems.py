"""Every error as `application/problem+json` (RFC 9457), from the table in `gradtap.errors` that exit codes come from.

Nothing of the machine leaves with it: a folder is called by its last name, an unexpected error by the request's id.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradtap.errors import GradtapError, NotFoundError, UnauthenticatedError, UsageError, problem_body, problem_of
from gradtap.read.catalog import Catalog
from gradtap_server.answers import JsonResponse
from gradtap_server.routing import API

log = logging.getLogger("gradtap_server")

METHODS = "GET, HEAD"
"""What every address answers: the service only reads."""

_RETRY = {409: 1, 503: 5}
"""Seconds until it makes sense to ask again: a step in flight takes a moment, a store that is lost longer."""

_WORDS = {
    "run.params": "`params` of the run",
    "run.steps": "`steps` of the run",
    "run.sessions": "`sessions` of the run",
    "partial=True": "partial=1",
}
"""What an address calls what an error's text calls by its name in Python."""
_EXAMPLES = {"steps": "steps=A:B:C, such as steps=0:9, or steps=: for all"}
"""What to give for a parameter that an address must have."""
_NAMED = re.compile(r"(?<![\w.`/])(" + "|".join(map(re.escape, _WORDS)) + r")(?![\w(])")


class ProblemResponse(JsonResponse):
    """A problem; never kept by a cache."""

    media_type = "application/problem+json"


def error_response(
    error: GradtapError, scope: Scope, catalog: Catalog, *, status: int | None = None, headers: Mapping[str, str] = {}
) -> ProblemResponse:
    """The response for an error of gradtap; `status` where it is not the table's own."""
    number = status or problem_of(error).status
    if number >= 500:
        log.error("request %s: %s", id_of(scope), error)
    challenge = {"WWW-Authenticate": 'Bearer realm="gradtap"'} if isinstance(error, UnauthenticatedError) else {}
    body = problem_body(
        error,
        detail=_NAMED.sub(lambda found: _WORDS[found[1]], without_folders(str(error), catalog)),
        facts=_hidden(error.facts, catalog),
        status=number,
        instance=id_of(scope),
    )
    return _response(body, {**challenge, **headers})


def _response(body: Mapping[str, Any], headers: Mapping[str, str]) -> ProblemResponse:
    number = body["status"]
    again = {"Retry-After": str(_RETRY[number])} if number in _RETRY else {}
    return ProblemResponse(body, status_code=number, headers={"Cache-Control": "no-store", **again, **headers})


def id_of(scope: Scope) -> str:
    """The id of a request, as its answer's `X-Request-ID` has it."""
    return str(scope.get("state", {}).get("request_id", ""))


def without_folders(text: str, catalog: Catalog) -> str:
    """The text with the last name of each run's and store's folder in place of its path. Touches no disk."""
    for paths in catalog.names:
        for path in paths:
            if path in text:
                # A run is called by its own folder, not by the store's.
                inner = sorted({os.path.join(path, e.within) for e in catalog.known() if e.within != "."}, key=len)
                for run in reversed(inner):
                    text = text.replace(run, os.path.basename(run))
                text = text.replace(path, os.path.basename(path)) if path != os.sep else text
    return text


def install_problems(app: FastAPI, catalog: Catalog) -> None:
    """Have the app answer every error with a problem."""

    async def ours(request: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, GradtapError)
        return error_response(error, request.scope, catalog)

    async def invalid(request: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_usage(error), request.scope, catalog)

    async def routing(request: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, HTTPException)
        return _unrouted(error, request, catalog)

    app.add_exception_handler(GradtapError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routing)


class Caught:
    """ASGI middleware: an error that nobody foresaw is logged with its traceback, and answered with the id alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            if scope["type"] != "http" or begun:
                # The client has half of an answer; only a cut connection tells it so.
                raise
            log.exception("request %s: %s %r failed", id_of(scope), scope["method"], scope["path"])
            detail = f"an error of the service itself; its log has more under the id {id_of(scope)}"
            body = problem_body(GradtapError(detail), instance=id_of(scope))
            await _response(body, {})(scope, receive, send)


def _usage(error: RequestValidationError) -> UsageError:
    found: list[dict[str, str | None]] = [
        {"parameter": str(each["loc"][-1]), "value": str(each.get("input"))[:80], "message": str(each["msg"])}
        for each in error.errors()
    ]
    for each, wrong in zip(found, error.errors(), strict=True):
        if wrong["type"] == "missing":
            # The value is that of all that was given: nothing that anybody has written.
            each["value"] = None
    words = "; ".join(map(_wrong, found))
    return UsageError(words).noting(errors=found)


def _wrong(each: Mapping[str, str | None]) -> str:
    name = each["parameter"] or ""
    if each["value"] is None:
        return f"{name} is missing; give {_EXAMPLES.get(name, f'{name}=...')}"
    return f"{name} is {each['value']!r}: {each['message']}"


def _unrouted(error: HTTPException, request: Request, catalog: Catalog) -> ProblemResponse:
    path = request.scope["path"]
    if error.status_code == 405:
        usage = UsageError(
            f"{request.method} is not answered; the service only reads: use {METHODS.replace(', ', ' or ')}"
        )
        return error_response(usage, request.scope, catalog, status=405, headers={"Allow": METHODS})
    if error.status_code == 404:
        missing = NotFoundError(f"there is nothing at {path[:200]!r}; {API} lists the addresses, /docs describes them")
        return error_response(missing, request.scope, catalog)
    return error_response(UsageError(str(error.detail)), request.scope, catalog, status=error.status_code)


def _hidden(value: Any, catalog: Catalog) -> Any:
    if isinstance(value, str):
        return without_folders(value, catalog)
    if isinstance(value, Mapping):
        return {str(key): _hidden(item, catalog) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item, catalog) for item in value]
    return value
