"""`GET /api/v1/runs/{run}/norms`: the parameter x step matrix of a stored statistic, from summaries alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response

from gradtap.errors import LimitError
from gradtap.query.params import stored
from gradtap.query.words import range_of
from gradtap.read.norms import check_stat
from gradtap.read.steps import chosen_steps
from gradtap_server.answers import JsonResponse
from gradtap_server.arrays import head_only
from gradtap_server.asked import check_names
from gradtap_server.caching import Freshness, holds, tag_of, unchanged
from gradtap_server.limits import first_steps
from gradtap_server.parameters import Match, RunName, problems
from gradtap_server.reads import in_thread
from gradtap_server.routing import Router
from gradtap_server.run import OF_A_RUN
from gradtap_server.state import Here, State

router = Router(tags=["statistics"])

QUICK = 2**16
"""Cells that are made and written as JSON in the time of any look-up; more wait for a thread with the reads."""

Steps = Annotated[
    str,
    Query(description="Steps from A up to, not including, B, every C-th: `A:B:C`. Empty for all.", examples=["0:9"]),
]
Stat = Annotated[str, Query(description="l2, l1, absmax, mean, std, zeros, nan or inf.", examples=["l2"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A matrix that was looked up and not read: what makes it, how large it is, its freshness."""

    match: str
    steps: str
    stat: str
    cells: int
    fresh: Freshness


@router.get(
    "/runs/{run}/norms",
    operation_id="get_norms",
    summary="Norms and other statistics over steps",
    responses=problems(*OF_A_RUN, "parameter-not-found", "step-not-found", "incomplete", "too-large", "timed-out"),
)
async def get_norms(
    request: Request, here: Here, run: RunName, match: Match = "", steps: Steps = "", stat: Stat = "l2"
) -> Response:
    """One row for each parameter that matches; its `values` are those at `steps`, null where it was not taken."""
    check_names(request, ("match", "steps", "stat"))
    timeout = here.settings.timeout
    table = await in_thread(partial(_look_up, here, request, run, match, steps, stat), timeout=timeout)
    if same := unchanged(request, table.fresh):
        return same
    if request.method == "HEAD":
        return head_only(media_type="application/json", length=None, headers=table.fresh.headers())
    limiter = here.limiter if table.cells > QUICK else None
    return await in_thread(partial(_read, here, run, table), timeout=timeout, limiter=limiter)


def _look_up(here: State, request: Request, name: str, match: str, steps: str, stat: str) -> Table:
    run = here.place(name).run
    check_stat(stat)
    params = stored(run, match) if run.params else []
    known, within = run.steps, range_of(steps)
    chosen = chosen_steps(within, known) if known or steps else ()
    places = [(at.session, at.capture) for at in (run.locate(step)[-1] for step in chosen)]
    fresh = Freshness(tag=tag_of("norms", run.id, stat, params, chosen, places), shared=here.shared)
    cells = len(params) * len(chosen)
    if cells > here.settings.cells and not holds(request, fresh):
        raise _too_many(len(params), chosen, within.step, here.settings.cells)
    # What is read is what was looked at, although the run may have grown by then.
    text = first_steps(chosen, len(chosen), within.step) if chosen else steps
    return Table(match=match, steps=text, stat=stat, cells=cells, fresh=fresh)


def _too_many(params: int, steps: tuple[int, ...], stride: int | None, most: int) -> LimitError:
    error = LimitError(
        f"{params} parameters at {len(steps)} steps are {params * len(steps)} cells, the most is {most}; ask for fewer "
        "steps, or for fewer parameters by match="
    ).noting(limit="cells", found=params * len(steps), most=most, parameters=params, steps=len(steps))
    fitting = most // params
    return error.noting(suggested_steps=first_steps(steps, fitting, stride)) if fitting else error


def _read(here: State, name: str, table: Table) -> Response:
    made = here.place(name).norms(table.match, steps=table.steps, stat=table.stat)
    return JsonResponse(made.body(), headers=table.fresh.headers())
