"""`GET /api/v1/runs/{run}`: one run on one page."""

from __future__ import annotations

from fastapi import Request, Response

from gradtap_server.answers import answered
from gradtap_server.parameters import RunName, problems
from gradtap_server.routing import Router
from gradtap_server.state import Here

router = Router(tags=["runs"])

OF_A_RUN = ("run-not-found", "damaged", "newer-format", "store-unreadable")
"""Problems of every address below a run."""


@router.get("/runs/{run}", operation_id="get_run", summary="One run", responses=problems(*OF_A_RUN))
def get_run(request: Request, here: Here, run: RunName) -> Response:
    """State, engine, sessions, steps and gaps, parameters, bytes before and after encoding."""
    return answered(request, here.place(run).info(), shared=here.shared)
