"""The application, put together: state, routers, and the middleware around them, outermost last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI

from gradtap.errors import UsageError
from gradtap.read.catalog import Catalog
from gradtap.version import __version__
from gradtap_server import about, audit, docs, grads, health, hist, norms, params, problem_pages, run, runs, steps
from gradtap_server.describing import described
from gradtap_server.metrics import Measured
from gradtap_server.parameters import PROBLEM
from gradtap_server.problems import Caught, install_problems
from gradtap_server.routing import API
from gradtap_server.security import Secured
from gradtap_server.settings import ServerSettings
from gradtap_server.state import make_state

# `hist` before `grads`: the name of a parameter may have slashes, so its route takes all that follows.
OF_RUNS = (about, runs, run, params, steps, hist, grads, norms, audit)
OF_THE_SERVICE = (health, problem_pages, docs)

TAGS = [
    {"name": "about", "description": "What the service is and what its problems mean."},
    {"name": "runs", "description": "The runs that are served."},
    {"name": "parameters", "description": "The parameters of a run's model."},
    {"name": "steps", "description": "What is known of each step."},
    {"name": "gradients", "description": "The gradients themselves, slices and stacks of them."},
    {"name": "statistics", "description": "Norms and histograms, from what was stored with each capture."},
    {"name": "operation", "description": "For supervisors and Prometheus."},
]


def create_app(
    stores: Sequence[str | os.PathLike[str]] | None = None, settings: ServerSettings | None = None
) -> FastAPI:
    """The application for these stores, each a run or a folder of runs.

    Without arguments everything comes from the environment, for `uvicorn --factory gradtap_server.app:create_app`.
    A store that is not there yet is no error: `/readyz` says so. Raises `UsageError` for bad settings and where no
    store is named, `StoreError` for a token file that does not read.
    """
    chosen = ServerSettings.from_environment() if settings is None else settings
    folders = chosen.folders if stores is None else stores
    if not folders:
        raise UsageError("no store to serve; set GRADTAP_SERVER_STORES to the folder of a run, or a folder of runs")
    catalog = Catalog(folders, every=chosen.rescan)
    app = _Api(
        title="gradtap",
        summary="Every full gradient of a training run, step by step, while it trains.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_tags=TAGS,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    state = make_state(chosen, catalog)
    app.state.gradtap = state
    for part in OF_RUNS:
        app.include_router(part.router, prefix=API)
    for part in OF_THE_SERVICE:
        app.include_router(part.router)
    install_problems(app, catalog)
    app.add_middleware(Caught)
    app.add_middleware(Secured, settings=chosen, catalog=catalog)
    app.add_middleware(Measured, metrics=state.metrics)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.gradtap.catalog.close()


class _Api(FastAPI):
    """FastAPI whose description has the shape of problems, and not that of errors it never gives."""

    def openapi(self) -> dict[str, Any]:
        """The description."""
        schema = super().openapi()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = PROBLEM
        # Not needed by every service, hence the empty choice; `auth` of `GET /api/v1` says which this one is.
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}, {}]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                schemas |= described(path, operation, API)
        return schema
