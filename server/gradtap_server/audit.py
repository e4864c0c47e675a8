"""`GET /api/v1/runs/{run}/audit`: faults of the training loop that the ledger shows."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from gradtap_server.answers import answered
from gradtap_server.asked import check_names
from gradtap_server.parameters import RunName, problems
from gradtap_server.reads import in_thread
from gradtap_server.routing import Router
from gradtap_server.run import OF_A_RUN
from gradtap_server.state import Here, State

router = Router(tags=["steps"])


@router.get(
    "/runs/{run}/audit",
    operation_id="get_audit",
    summary="Faults of the training loop",
    responses=problems(*OF_A_RUN, "timed-out"),
)
async def get_audit(request: Request, here: Here, run: RunName) -> Response:
    """One row for each finding: code, severity, steps, evidence from the ledger, cause, cure. Reads no gradient."""
    check_names(request, ())
    # A long run's whole ledger is read: with the other reads, not beside the look-ups.
    work = partial(_answer, here, request, run)
    return await in_thread(work, timeout=here.settings.timeout, limiter=here.limiter)


def _answer(here: State, request: Request, run: str) -> Response:
    return answered(request, here.place(run).audit(), shared=here.shared)
