"""`/docs`: the API's description to read and try, from files of this machine alone and without a script in the page."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from urllib.parse import quote

from fastapi import Request, Response
from starlette.responses import FileResponse, HTMLResponse

from gradtap.errors import MissingExtraError, NotFoundError
from gradtap_server.routing import Router

router = Router(include_in_schema=False)

# Relative addresses: right under any path that a proxy may show.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>gradtap API</title>
<link rel="icon" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""

START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""

FILES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon.png": "image/png",
}
"""What is served of fastapi_offline, with its media type: looked up here, never made into a path."""

POLICY = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"}
"""Swagger UI's style sheet holds its icons in itself."""


@router.get("/")
async def get_root(request: Request) -> Response:
    """Whoever opens the service in a browser is shown what there is."""
    root = quote(request.scope.get("root_path", ""))
    return Response(status_code=307, headers={"Location": f"{root}/docs", "Cache-Control": "no-store"})


@router.get("/docs")
async def get_docs() -> Response:
    """The page."""
    return HTMLResponse(PAGE, headers=POLICY)


@router.get("/docs/start.js")
async def get_start() -> Response:
    """What starts Swagger UI: a file of its own, as the page's policy allows no script in it."""
    return Response(START, media_type="text/javascript")


@router.get("/docs/{name}")
def get_file(name: str) -> Response:
    """A file of Swagger UI. Raises `NotFoundError` for any other name."""
    if name not in FILES:
        raise NotFoundError(f"no file {name[:80]!r}; there are {', '.join(FILES)}")
    return FileResponse(_folder() / name, media_type=FILES[name], headers={"Cache-Control": "max-age=86400"})


def _folder() -> Path:
    try:
        return Path(str(importlib.resources.files("fastapi_offline"))) / "static"
    except ModuleNotFoundError as error:
        raise MissingExtraError("/docs needs fastapi_offline: pip install 'gradtap[server]'") from error
