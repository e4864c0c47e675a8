"""`/problems/{slug}`: what the `type` of a problem means, for whoever follows it."""

from __future__ import annotations

import html
from typing import Annotated

from fastapi import Path, Request, Response
from starlette.responses import HTMLResponse

from gradtap.errors import ERRORS, PROBLEMS, NotFoundError, near_names, nearest
from gradtap_server.answers import JsonResponse
from gradtap_server.negotiate import chosen_form
from gradtap_server.parameters import open_problems
from gradtap_server.routing import Router

router = Router(tags=["about"])

OFFERS = {"json": "application/json", "html": "text/html"}

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
<h1>{title}</h1>
<p>{meaning}</p>
<p>HTTP status {status}; exit code {exit_code} of the command line.</p>
</body>
</html>
"""

MEANINGS = {
    "usage": "An argument is wrong or missing; the text names it, its value and what is allowed.",
    "bad-slice": "The slice does not parse, or does not fit the parameter's shape, which the text names.",
    "not-acceptable": "There is no such form of the answer; `supported` lists those that there are.",
    "store-unreadable": "A folder or file of the store cannot be read, or the store is not there.",
    "not-a-run": "The folder holds no run.",
    "newer-format": "A newer gradtap wrote the run; the service must be updated to read it.",
    "not-found": "There is nothing at this address.",
    "run-not-found": "No run goes by this name or id; `did_you_mean` has the nearest names.",
    "step-not-found": "The run does not have this step or attempt; `nearest` has the nearest steps.",
    "parameter-not-found": "The run has no such parameter, or no gradients of it; `did_you_mean` has near names.",
    "incomplete": "Not every rank committed the capture, or the parameter was not captured at this step.",
    "step-in-flight": "Ranks are still committing the step; ask again in a moment, as `Retry-After` says.",
    "damaged": "Stored bytes are not what was committed; run `gradtap verify` on the store to see what is lost.",
    "forbidden": "The service does not answer here, or not under this name; whoever runs it can change that.",
    "unauthenticated": "A token is needed: `Authorization: Bearer <token>`.",
    "too-large": "The answer would be or read more than the limits allow; `suggested_slice` fits.",
    "timed-out": "The answer took longer than the service waits; ask for less, or again later.",
    "missing-extra": "The service lacks an optional package that this answer needs.",
    "locked": "Another live job holds the run.",
    "other-model": "The run holds gradients of another model.",
    "attach": "A training could not be recorded; the service itself never says this.",
    "capture": "A capture failed in a training; the service itself never says this.",
    "error": "An error of the service itself; its log has more under the id in `instance`.",
}
"""A sentence for each slug of the table."""


@router.get(
    "/problems/{slug}",
    operation_id="get_problem",
    summary="What a problem means",
    responses=open_problems("not-found", "not-acceptable"),
)
def get_problem(
    request: Request,
    slug: Annotated[str, Path(description="Last part of a problem's `type`.", examples=["too-large"])],
) -> Response:
    """Status, exit code and meaning of a kind of problem, as JSON, or as a page for browsers."""
    if slug not in MEANINGS:
        raise NotFoundError(
            f"no problem {slug[:80]!r}{nearest(slug, MEANINGS) or '; there are ' + ', '.join(MEANINGS)}"
        ).noting(did_you_mean=near_names(slug, MEANINGS))
    problem, title = PROBLEMS[ERRORS[slug]], slug.replace("-", " ")
    headers = {"Cache-Control": "max-age=86400", "Vary": "Accept"}
    if chosen_form(None, request.headers.get("accept"), OFFERS) == "html":
        words = {"title": title, "meaning": html.escape(MEANINGS[slug])}
        return HTMLResponse(PAGE.format(status=problem.status, exit_code=problem.exit_code, **words), headers=headers)
    body = {
        "schema": "gradtap.problem-kind/1",
        "type": f"/problems/{slug}",
        "title": title,
        "status": problem.status,
        "exit_code": problem.exit_code,
        "meaning": MEANINGS[slug],
    }
    return JsonResponse(body, headers=headers)
