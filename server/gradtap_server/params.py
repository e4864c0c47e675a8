"""`GET /api/v1/runs/{run}/params`: the parameters, in the model's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Query, Request, Response

from gradtap_server.answers import answered
from gradtap_server.asked import check_names
from gradtap_server.pages import fixed, page, pinned
from gradtap_server.parameters import Cursor, Limit, Match, RunName, problems
from gradtap_server.routing import Router
from gradtap_server.run import OF_A_RUN
from gradtap_server.state import Here

router = Router(tags=["parameters"])


@router.get(
    "/runs/{run}/params",
    operation_id="list_params",
    summary="Parameters of a run",
    responses=problems(*OF_A_RUN, "parameter-not-found", "step-not-found"),
)
def list_params(
    request: Request,
    here: Here,
    run: RunName,
    match: Match = "",
    step: Annotated[
        str, Query(description="Step whose norms the rows have: a number, `first` or `last`.", examples=["last"])
    ] = "last",
    limit: Limit = None,
    cursor: Cursor = None,
) -> Response:
    """Name, shape, dtype as captured, status and newest norm of each parameter.

    All pages are of the step that `first` or `last` meant at the first one.
    """
    check_names(request, ("match", "step", "limit", "cursor"))
    place = here.place(run)
    if pin := pinned(cursor, "params"):
        step = fixed(place.run, step, pin[0])
    answer = place.params(match, step=step)
    pin = (answer.facts["step"],)
    found = page(answer.rows, key=_index, of="params", limit=limit, cursor=cursor, settings=here.settings, pin=pin)
    shown = replace(answer, rows=found.rows)
    return answered(request, shown, shared=here.shared, headers=found.link(request), **found.facts())


def _index(row: Mapping[str, Any]) -> int:
    return int(row["index"])
