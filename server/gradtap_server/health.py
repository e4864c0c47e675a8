"""`/healthz`, `/readyz` and `/metrics`: what supervisors and Prometheus ask."""

from __future__ import annotations

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse

from gradtap.errors import StoreError
from gradtap_server.answers import JsonResponse
from gradtap_server.parameters import open_problems, problems
from gradtap_server.problems import error_response
from gradtap_server.routing import Router
from gradtap_server.state import Here

router = Router(tags=["operation"])

METRICS = {**problems(), 200: {"description": "The text form that Prometheus reads."}}
METRICS.pop(400)

FRESH = {"Cache-Control": "no-store"}


@router.get("/healthz", operation_id="get_health", summary="Whether the process lives")
async def get_health() -> Response:
    """200 as long as the process answers at all. Looks at no store: a lost disk is no reason to be killed."""
    return JsonResponse({"schema": "gradtap.health/1", "status": "ok"}, headers=FRESH)


@router.get(
    "/readyz",
    operation_id="get_readiness",
    summary="Whether the stores are there",
    responses=open_problems("store-unreadable", "timed-out", status=503),
)
def get_readiness(request: Request, here: Here) -> Response:
    """200 when every store can be looked into; else 503 with the problem of the first that cannot."""
    try:
        here.catalog.check()
    except StoreError as error:
        return error_response(error, request.scope, here.catalog, status=503)
    runs = sum(not entry.folder for entry in here.catalog.entries())
    return JsonResponse({"schema": "gradtap.ready/1", "status": "ok", "runs": runs}, headers=FRESH)


@router.get(
    "/metrics",
    operation_id="get_metrics",
    summary="Counters for Prometheus",
    response_class=PlainTextResponse,
    responses=METRICS,
)
def get_metrics(here: Here) -> Response:
    """The text form that Prometheus reads. Needs the token where there is one."""
    return Response(here.metrics.text(), headers={**FRESH, "Content-Type": CONTENT_TYPE_LATEST})
