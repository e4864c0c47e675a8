"""`GET /api/v1/runs/{run}/steps` and one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Query, Request, Response

from gradtap.query.words import holds, range_of
from gradtap_server.answers import answered
from gradtap_server.asked import address, check_names
from gradtap_server.pages import fixed, page, pinned
from gradtap_server.parameters import RANGE_PATTERN, Attempt, Cursor, Limit, Match, RunName, StepWord, problems
from gradtap_server.routing import Router
from gradtap_server.run import OF_A_RUN
from gradtap_server.state import Here

router = Router(tags=["steps"])


@router.get("/runs/{run}/steps", operation_id="list_steps", summary="Steps of a run", responses=problems(*OF_A_RUN))
def list_steps(
    request: Request,
    here: Here,
    run: RunName,
    within: Annotated[
        str,
        Query(
            alias="steps",
            description="Steps from A up to, not including, B, every C-th: `A:B:C`.",
            examples=["0:9"],
            json_schema_extra={"pattern": RANGE_PATTERN},
        ),
    ] = "",
    tags: Annotated[bool, Query(description="With what the training logged at each step.", examples=[1])] = False,
    limit: Limit = None,
    cursor: Cursor = None,
) -> Response:
    """One row for each step that the ledger has, captured or not, ascending."""
    check_names(request, ("steps", "tags", "limit", "cursor"))
    place, wanted = here.place(run), range_of(within)
    numbers = [step for step in place.run.ledger.steps if holds(wanted, step)]
    found = page(numbers, key=int, of="steps", limit=limit, cursor=cursor, settings=here.settings)
    # Only the rows of this page become plain values: a run may have a million steps.
    part = f"{found.rows[0]}:{found.rows[-1] + 1}:{wanted.step or 1}" if found.rows else "0:0"
    answer = place.steps(part, tags=tags)
    return answered(request, answer, shared=here.shared, headers=found.link(request), **found.facts())


@router.get(
    "/runs/{run}/steps/{step}",
    operation_id="get_step",
    summary="One step",
    responses=problems(*OF_A_RUN, "step-not-found", "step-in-flight", "incomplete", "parameter-not-found"),
)
def get_step(
    request: Request,
    here: Here,
    run: RunName,
    step: StepWord,
    attempt: Attempt = None,
    match: Match = "",
    limit: Limit = None,
    cursor: Cursor = None,
) -> Response:
    """The step's row of the ledger, its tags, and the stored statistics of each parameter.

    Whole, unless there are more parameters than a page may have. `Content-Location` is the address of this attempt,
    which answers the same for ever once the step is settled. All pages are of one step and one attempt, and
    `nonfinite` of a later page counts its rows alone.
    """
    check_names(request, ("attempt", "match", "limit", "cursor"))
    place = here.place(run)
    word = step
    if pin := pinned(cursor, "step"):
        word, attempt = fixed(place.run, step, pin[0]), pin[1] if attempt is None else attempt
    answer = place.step(word, attempt=attempt, match=match)
    paged: dict[str, Any] = {}
    link: dict[str, str] = {}
    if limit is not None or cursor or len(answer.rows) > here.settings.page_max:
        rows = list(enumerate(answer.rows))
        most = here.settings.page_max if limit is None else limit
        pins = answer.facts["step"], answer.facts["attempt"]
        found = page(
            rows, key=lambda row: row[0], of="step", limit=most, cursor=cursor, settings=here.settings, pin=pins
        )
        answer = replace(answer, rows=[row for _, row in found.rows])
        paged, link = found.facts(), found.link(request)
    facts = answer.facts
    # Under the run's id: its name another run may have tomorrow, in the same folder.
    lasting = attempt is not None and (run, step) == (facts["run"], str(facts["step"]))
    location = None
    if not lasting and not paged and here.lasts(facts["run"]):
        query = {"attempt": facts["attempt"], "match": match}
        location = address(request, "runs", facts["run"], "steps", facts["step"], query=query)
    settled = lasting and facts["settled"]
    return answered(
        request,
        answer,
        shared=here.shared,
        settled=settled,
        location=location,
        headers=link,
        later=bool(cursor),
        **paged,
    )
