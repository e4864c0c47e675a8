"""Histograms of gradients: the stored one, or one that is counted from the values, within the limits of these."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response
from pydantic import BaseModel, Field

from gradtap.query.answer import Answer
from gradtap.query.local import LocalPlace
from gradtap.read.histogram import SCALES, check_bins, stored_histogram
from gradtap.read.request import GradRequest
from gradtap.selection import Selection
from gradtap_server.answers import JsonResponse
from gradtap_server.arrays import head_only
from gradtap_server.asked import address, check_names
from gradtap_server.caching import Freshness, holds, tag_of, unchanged
from gradtap_server.grads import PROBLEMS_OF_GRADS, ParamName, answer
from gradtap_server.limits import Cost, Limits
from gradtap_server.lookup import ENCODING, GradQuery, Target, check_request, checked_query, names_one, wanted_of
from gradtap_server.parameters import SLICE_PATTERN, RunName, StepWord
from gradtap_server.reads import in_thread
from gradtap_server.routing import Router
from gradtap_server.state import Here, State

router = Router(tags=["statistics"])

LAST = "/hist"


class HistQuery(BaseModel):
    """What an address may say of a histogram."""

    slice: str = Field(
        default="",
        description="As for the values; a slice is counted anew.",
        examples=["0:10, :"],
        json_schema_extra={"pattern": SLICE_PATTERN},
    )
    bins: int | None = Field(
        default=None, description="Equal bins from the smallest value to the largest, for scale linear.", examples=[64]
    )
    scale: str = Field(
        default="log2",
        description="log2: a bin for each sign and power of two. linear: equal bins.",
        examples=["linear"],
        json_schema_extra={"enum": list(SCALES)},
    )
    attempt: int | None = Field(
        default=None, ge=1, description="Which capture of the step, from 1; else the newest.", examples=[1]
    )

    @property
    def counts(self) -> bool:
        """Whether values are read for it; else it is the stored one."""
        return bool(self.slice) or self.scale != "log2" or self.bins is not None


# Before the values' own routes: their {param:name} would take the last part as part of a name.
@router.get(
    "/runs/{run}/steps/{step}/grads/{param:name}/hist",
    operation_id="get_hist",
    summary="The histogram of a gradient",
    responses=PROBLEMS_OF_GRADS,
)
async def histogram(
    request: Request,
    here: Here,
    run: RunName,
    step: StepWord,
    param: ParamName,
    query: Annotated[HistQuery, Query()],
) -> Response:
    """The histogram of a gradient at a step: the stored one, or counted anew of a slice or in linear bins."""
    if not request.scope.get("raw_path", b"").endswith(LAST.encode()):
        # The slash came encoded: this is a parameter whose own name ends so.
        name = param + LAST
        if request.scope["path"].endswith("\n"):
            # An expression's end is before a last line's end too.
            name += "\n"
        return await answer(here, request, Target(run=run, param=name, step=step), checked_query(request))
    check_names(request, HistQuery.model_fields)
    target, timeout = Target(run=run, param=param, step=step), here.settings.timeout
    work = partial(_look_up, here, request, target, query)
    place, wanted, fresh = await in_thread(work, timeout=timeout, limiter=here.quick)
    if same := unchanged(request, fresh):
        return same
    if request.method == "HEAD":
        return head_only(media_type="application/json", length=None, headers=fresh.headers())
    # Only counting is slow work; the stored one is looked up like any metadata.
    limiter = here.limiter if query.counts else here.quick
    made = await in_thread(partial(_histogram, place, query, wanted), timeout=timeout, limiter=limiter)
    if query.counts:
        here.metrics.chunks(request.scope, wanted.chunks)
    return JsonResponse(made.body(), headers=fresh.headers())


def _look_up(
    state: State, request: Request, target: Target, query: HistQuery
) -> tuple[LocalPlace, GradRequest, Freshness]:
    check_bins(query.bins, query.scale)
    place = state.place(target.run)
    run = place.run
    wanted = wanted_of(run, target, GradQuery(slice=query.slice, attempt=query.attempt))
    fresh = _freshness(state, request, wanted, target, query, run.id)
    if query.counts and not holds(request, fresh):
        check_request(wanted, target, partial(_cost, wanted), Limits.of(state.settings))
        if request.method == "HEAD":
            wanted.check()
    elif request.method == "HEAD" and not query.counts:
        # A row of the summaries, and no chunk, says whether there is one.
        stored_histogram(wanted)
    return place, wanted, fresh


def _cost(wanted: GradRequest, where: Selection, count: int) -> Cost:
    # The values that are counted stand for an answer: the limits are those of reading them.
    chunks, read_bytes = wanted.needs(where, count)
    return Cost(response_bytes=where.nbytes(wanted.dtype.itemsize), read_bytes=read_bytes, chunks=chunks)


def _freshness(
    state: State, request: Request, wanted: GradRequest, target: Target, query: HistQuery, run: str
) -> Freshness:
    asked = (query.counts, query.bins, query.scale)
    tag = tag_of(ENCODING, "hist", wanted.identity, str(wanted.where), asked, wanted.flags)
    if query.attempt is not None and names_one(target, wanted, run):
        return Freshness(tag=tag, settled=wanted.settled, shared=state.shared)
    more = {"slice": query.slice, "bins": query.bins, "scale": query.scale, "attempt": wanted.attempts[0]}
    place = address(request, "runs", run, "steps", wanted.steps[0], "grads", wanted.param.name, "hist", query=more)
    return Freshness(tag=tag, shared=state.shared, location=place if state.lasts(run) else None)


def _histogram(place: LocalPlace, query: HistQuery, wanted: GradRequest) -> Answer:
    return place.hist(
        wanted.param.name,
        str(wanted.steps[0]),
        slice=query.slice,
        bins=query.bins,
        scale=query.scale,
        attempt=wanted.attempts[0],
    )
