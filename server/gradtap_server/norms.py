"""`GET /api/v1/runs/{run}/norms`: the parameter x step matrix of a stored statistic, from summaries alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response

from gradtap.errors import LimitError
from gradtap.query.local import LocalPlace
from gradtap.query.params import stored
from gradtap.query.words import range_of
from gradtap.read.norms import STATS, check_stat, check_taken
from gradtap.read.steps import chosen_steps
from gradtap_server.answers import json_bytes
from gradtap_server.arrays import head_only
from gradtap_server.asked import check_names
from gradtap_server.caching import Freshness, holds, tag_of, unchanged
from gradtap_server.limits import first_steps
from gradtap_server.lookup import ENCODING, JSON_BYTES
from gradtap_server.parameters import RANGE_PATTERN, Match, RunName, problems
from gradtap_server.reads import in_thread
from gradtap_server.routing import Router
from gradtap_server.run import OF_A_RUN
from gradtap_server.sending import PartsResponse, room_for
from gradtap_server.state import Here, State

router = Router(tags=["statistics"])

QUICK = 2**16
"""Cells that are made and written as JSON in the time of any look-up; more wait for a thread with the reads."""

Steps = Annotated[
    str,
    Query(
        description="Steps from A up to, not including, B, every C-th: `A:B:C`. Empty for all.",
        examples=["0:9"],
        json_schema_extra={"pattern": RANGE_PATTERN},
    ),
]
Stat = Annotated[str, Query(description="Which statistic.", examples=["l2"], json_schema_extra={"enum": list(STATS)})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A matrix that was looked up and not read: what makes it, how large it is, its freshness."""

    place: LocalPlace
    match: str
    steps: str
    stat: str
    cells: int
    fresh: Freshness


@router.get(
    "/runs/{run}/norms",
    operation_id="get_norms",
    summary="Norms and other statistics over steps",
    responses=problems(*OF_A_RUN, "parameter-not-found", "step-not-found", "incomplete", "too-large"),
)
async def get_norms(
    request: Request, here: Here, run: RunName, match: Match = "", steps: Steps = "", stat: Stat = "l2"
) -> Response:
    """One row for each parameter that matches; its `values` are those at `steps`, null where it was not taken."""
    check_names(request, ("match", "steps", "stat"))
    timeout = here.settings.timeout
    work = partial(_look_up, here, request, run, match, steps, stat)
    table = await in_thread(work, timeout=timeout, limiter=here.quick)
    if same := unchanged(request, table.fresh):
        return same
    if request.method == "HEAD":
        return head_only(media_type="application/json", length=None, headers=table.fresh.headers())
    limiter = here.limiter if table.cells > QUICK else here.quick
    room = await room_for(table.cells * JSON_BYTES, here.held, timeout=timeout)
    with room.kept():
        body = await in_thread(partial(_read, table), timeout=timeout, limiter=limiter)
        headers = table.fresh.headers()
        return PartsResponse([body], media_type="application/json", headers=headers, room=room, patience=timeout)


def _look_up(here: State, request: Request, name: str, match: str, steps: str, stat: str) -> Table:
    place = here.place(name)
    run = place.run
    check_stat(stat)
    params = stored(run, match) if run.params else []
    known, within = run.steps, range_of(steps)
    chosen = chosen_steps(within, known) if known or steps else ()
    places = run.in_force(chosen)
    check_taken((at.reader for at in places), stat)
    captures = [(at.reader.session.name, at.capture) for at in places]
    fresh = Freshness(tag=tag_of(ENCODING, "norms", run.id, stat, params, chosen, captures), shared=here.shared)
    cells = len(params) * len(chosen)
    if cells > here.settings.cells and not holds(request, fresh):
        raise _too_many(len(params), chosen, within.step, here.settings.cells)
    # What is read is what was looked at, although the run may have grown by then.
    text = first_steps(chosen, len(chosen), within.step) if chosen else steps
    return Table(place=place, match=match, steps=text, stat=stat, cells=cells, fresh=fresh)


def _too_many(params: int, steps: tuple[int, ...], stride: int | None, most: int) -> LimitError:
    error = LimitError(
        f"{params} parameters at {len(steps)} steps are {params * len(steps)} cells, the most is {most}; ask for fewer "
        "steps, or for fewer parameters by match="
    ).noting(limit="cells", found=params * len(steps), most=most, parameters=params, steps=len(steps))
    fitting = most // params
    return error.noting(suggested_steps=first_steps(steps, fitting, stride)) if fitting else error


def _read(table: Table) -> bytes:
    made = table.place.norms(table.match, steps=table.steps, stat=table.stat)
    return json_bytes(made.body())
