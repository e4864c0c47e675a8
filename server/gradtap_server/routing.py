"""Where the API is, and a router whose GET routes answer HEAD too, with the same headers and no body.

Routes that are plain functions run in a thread, as look-ups that may not take longer than a client waits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.convertors import Convertor, register_url_convertor

from gradtap.remote.address import API as API
from gradtap_server.reads import in_thread


class NameConvertor(Convertor[str]):
    """All the rest of a path, whatever it is made of: starlette's own `path` ends at the end of a line."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        """The name, as it is in the path."""
        return value

    def to_string(self, value: str) -> str:
        """The part of a path, as it is."""
        return value


register_url_convertor("name", NameConvertor())


class Router(APIRouter):
    """As FastAPI's. HEAD is left out of the API's description: one operation would appear twice under one id."""

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Add a route, and for a GET route the same one for HEAD."""
        if "here" in inspect.signature(endpoint).parameters and not inspect.iscoroutinefunction(endpoint):
            endpoint = _in_time(endpoint)
        methods = set(options.pop("methods", None) or ["GET"])
        super().add_api_route(path, endpoint, methods=sorted(methods - {"HEAD"}), **options)
        if methods & {"GET", "HEAD"}:
            super().add_api_route(path, endpoint, methods=["HEAD"], **(options | {"include_in_schema": False}))


def _in_time(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The route in a thread for look-ups, with the time-out of the settings. It must take the state, as `here`."""

    @functools.wraps(endpoint)
    async def waited(**arguments: Any) -> Any:
        here = arguments["here"]
        work = functools.partial(endpoint, **arguments)
        return await in_thread(work, timeout=here.settings.timeout, limiter=here.quick)

    return waited
