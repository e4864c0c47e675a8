"""`GET /api/v1`: versions, forms, limits, and where to go from here."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import Request, Response

from gradtap.encode.counting import MOST_BINS
from gradtap.query.answer import Answer
from gradtap.query.formats import DTYPES, FORMATS
from gradtap.version import FORMAT, __version__
from gradtap_server.answers import answered
from gradtap_server.parameters import problems
from gradtap_server.routing import API, Router
from gradtap_server.state import Here

router = Router(tags=["about"])

LINKS = {
    "runs": API + "/runs",
    "run": API + "/runs/{run}",
    "params": API + "/runs/{run}/params",
    "steps": API + "/runs/{run}/steps",
    "step": API + "/runs/{run}/steps/{step}",
    "grad": API + "/runs/{run}/steps/{step}/grads/{param}",
    "hist": API + "/runs/{run}/steps/{step}/grads/{param}/hist",
    "grads": API + "/runs/{run}/grads/{param}",
    "norms": API + "/runs/{run}/norms",
    "audit": API + "/runs/{run}/audit",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "health": "/healthz",
    "ready": "/readyz",
    "metrics": "/metrics",
}
"""Every address, as templates."""


@router.get("", operation_id="get_about", summary="What this service is", responses=problems())
def get_about(request: Request, here: Here) -> Response:
    """Versions, the forms that gradients come in, the limits of one answer, whether a token is needed, addresses."""
    root = quote(request.scope.get("root_path", ""))
    facts = {
        "gradtap": __version__,
        "format": FORMAT,
        "api": "v1",
        "formats": list(FORMATS),
        "dtypes": list(DTYPES),
        "limits": {**here.settings.limits(), "bins": MOST_BINS},
        "auth": here.settings.auth,
        "links": {name: root + path for name, path in LINKS.items()},
    }
    return answered(request, Answer(query="about", facts=facts), shared=here.shared)
