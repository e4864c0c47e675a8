"""`GET /api/v1/runs`: what there is."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request, Response

from gradtap.errors import UsageError, nearest
from gradtap.query.answer import Answer
from gradtap.query.runs import STATES, named, run_row
from gradtap.read.discover import RunEntry
from gradtap_server.answers import answered
from gradtap_server.asked import address, check_names
from gradtap_server.pages import page
from gradtap_server.parameters import Cursor, Limit, problems
from gradtap_server.problems import without_folders
from gradtap_server.routing import Router
from gradtap_server.state import Here, State

router = Router(tags=["runs"])


@router.get("/runs", operation_id="list_runs", summary="All runs", responses=problems("store-unreadable"))
def list_runs(
    request: Request,
    here: Here,
    q: Annotated[
        str,
        Query(description="Runs whose name holds this text, or fits it where it has wildcards.", examples=["demo*"]),
    ] = "",
    state: Annotated[
        str,
        Query(
            description=f"Runs in this state alone: {', '.join(STATES)}.",
            examples=["live"],
            json_schema_extra={"enum": list(STATES)},
        ),
    ] = "",
    limit: Limit = None,
    cursor: Cursor = None,
) -> Response:
    """Runs by name, with state, engine, steps and bytes; one that does not open is there with its `error`."""
    check_names(request, ("q", "state", "limit", "cursor"))
    if state and state not in STATES:
        raise UsageError(f"state is {state[:80]!r}{nearest(state, STATES) or '; there are ' + ', '.join(STATES)}")
    entries = named(here.catalog.entries(), q)
    rows: dict[str, dict[str, Any]] = {}
    if state:
        rows = {entry.slug: _row(request, here, entry) for entry in entries}
        entries = [entry for entry in entries if rows[entry.slug]["state"] == state]
    found = page(entries, key=lambda e: e.slug, of="runs", limit=limit, cursor=cursor, settings=here.settings)
    chosen = [rows.get(entry.slug) or _row(request, here, entry) for entry in found.rows]
    answer = Answer(query="runs", rows=chosen, rows_name="runs")
    return answered(request, answer, shared=here.shared, headers=found.link(request), **found.facts())


def _row(request: Request, here: State, entry: RunEntry) -> dict[str, Any]:
    row = run_row(here.catalog, entry)
    if "error" in row:
        row["error"]["detail"] = without_folders(row["error"]["detail"], here.catalog)
        row["error"]["type"] = f"/problems/{row['error'].pop('slug')}"
    return row | {"url": address(request, "runs", entry.slug, query={})}
