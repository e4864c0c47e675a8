"""`gradtap ls`: the parameters of a run, in model order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtap.cli.arguments import Store
from gradtap.cli.output import Answer, Csv, Json, Jsonl, Listing, emit, form_of, is_open, number, opened, shape_text
from gradtap.errors import IncompleteError, ParamNotFoundError, nearest
from gradtap.matching import matches

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.types import ArrayPlan, ParamSpec


def ls(
    store: Store,
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help="Part of a name, or a pattern with * and ?.")
    ] = "",
    *,
    step: Annotated[int | None, typer.Option(help="Step of the norms; the last if not given.")] = None,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """List the parameters: shape, dtype, layout, norm, status."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    run = opened(store)
    at, rows = parameter_rows(run, pattern, step)
    yet = " yet" if at is None and is_open(run) else ""
    title = f"norms of step {at}" if at is not None else f"no complete step{yet}" if rows else f"no session{yet}"
    facts = {"store": store, "step": at}
    emit(Answer(verb="ls", facts=facts, rows=rows, rows_name="parameters", pictures=[_picture(rows, title)]), form)


def matching(run: Run, pattern: str) -> list[ParamSpec]:
    """Parameters of which a name or alias holds the pattern, or matches it whole where it has wildcards; model order.

    A leading `!` turns it round. Raises `ParamNotFoundError` when there is none, with near names.
    """
    sign = "!" if pattern.startswith("!") else ""
    part = pattern.removeprefix("!")
    glob = pattern if any(wild in part for wild in "*?[") else f"{sign}*{part}*"
    found = [p for p in run.params if matches(glob, p)]
    if not found:
        near = nearest(pattern, [p.name for p in run.params])
        raise ParamNotFoundError(f"no parameter of {run.path} matches {pattern!r}{near or '; `gradtap ls` lists all'}")
    return found


def parameter_rows(run: Run, pattern: str, step: int | None) -> tuple[int | None, list[dict[str, Any]]]:
    """The step of the norms (None for a run without steps), and one row for each matching parameter.

    `arrays` counts the Zarr arrays of a parameter (0: not stored, more than 1: cut between owners); `chunk` is
    the shape of one inner chunk without the capture axis; `status` is "not selected" where the selection in force at
    the step leaves a parameter out. No rows for a run without sessions.
    Raises `ParamNotFoundError` and `StepNotFoundError`.
    """
    if not run.params and not run.sessions:
        return None, []
    found = matching(run, pattern)
    steps = run.steps
    at = step if step is not None else int(steps[-1]) if len(steps) else None
    out = run.left_out(at)
    norms = _norms(run, [p for p in found if p.name not in out], at)
    pieces = _arrays(run)
    rows = []
    for spec in found:
        arrays = pieces.get(spec.name, [])
        rows.append(
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "status": "not selected" if spec.name in out else spec.status,
                "arrays": len(arrays),
                "chunk": list(arrays[0].chunk) if arrays else None,
                "norm": norms.get(spec.name),
            }
        )
    return at, rows


def _arrays(run: Run) -> dict[str, list[ArrayPlan]]:
    """The Zarr arrays of each stored parameter in the newest session."""
    found: dict[str, list[ArrayPlan]] = {}
    plan = run.plan
    if plan is None:
        return found
    for array in plan.arrays:
        found.setdefault(plan.params[array.param].name, []).append(array)
    return found


def _norms(run: Run, params: list[ParamSpec], step: int | None) -> dict[str, float]:
    stored = [p.name for p in params if p.stored]
    if step is None or not stored:
        return {}
    try:
        norms = run.norms(stored, steps=[step])
    except IncompleteError:
        # Recorded without summaries: the other columns are still worth printing, and a norm shows as missing.
        return {}
    return {name: float(row[0]) for name, row in zip(norms.params, norms.values, strict=True)}


def _picture(rows: list[dict[str, Any]], title: str) -> Any:
    columns = {
        "name": "left",
        "shape": "right",
        "dtype": "left",
        "arrays": "right",
        "chunk": "right",
        "norm": "right",
        "status": "left",
    }
    cells = [
        (
            row["name"],
            shape_text(row["shape"]),
            row["dtype"],
            str(row["arrays"]),
            "-" if row["chunk"] is None else shape_text(row["chunk"]),
            number(row["norm"]),
            row["status"],
        )
        for row in rows
    ]
    return Listing(columns=columns, rows=cells, title=title, drop=("arrays", "chunk", "dtype"))
