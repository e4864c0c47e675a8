"""Where the API is, and a router whose GET routes answer HEAD too, with the same headers and no body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from gradtap.remote.address import API as API


class Router(APIRouter):
    """As FastAPI's. HEAD is left out of the API's description: one operation would appear twice under one id."""

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Add a route, and for a GET route the same one for HEAD."""
        methods = set(options.pop("methods", None) or ["GET"])
        super().add_api_route(path, endpoint, methods=sorted(methods - {"HEAD"}), **options)
        if methods & {"GET", "HEAD"}:
            super().add_api_route(path, endpoint, methods=["HEAD"], **(options | {"include_in_schema": False}))
