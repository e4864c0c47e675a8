"""The parameters of a run, in the model's order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtap.errors import IncompleteError, ParamNotFoundError
from gradtap.matching import found_by, near_params
from gradtap.query.answer import Answer
from gradtap.query.words import step_of

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.types import ArrayPlan, ParamSpec


def params(run: Run, match: str = "", *, step: str = "last") -> Answer:
    """One row for each matching parameter; `step` (None for a run without steps) is that of the norms.

    `index` counts all parameters of the model; `arrays` counts the Zarr arrays of a parameter (0: not stored, more
    than 1: cut between owners); `chunk` is the shape of one inner chunk without the capture axis; `status` is "not
    selected" where the selection in force at the step leaves a parameter out. No rows for a run without sessions.
    Raises `ParamNotFoundError` and `StepNotFoundError`.
    """
    at = None if step == "last" and not run.steps else step_of(run, step)
    facts = {"run": run.id, "step": at}
    if not run.params and not run.sessions:
        return Answer(query="params", facts=facts, rows_name="parameters")
    found = matching(run, match)
    out = run.left_out(at)
    norms = _norms(run, [p for p in found if p.name not in out], at)
    pieces = _arrays(run)
    index = {p.name: i for i, p in enumerate(run.params)}
    rows = []
    for spec in found:
        arrays = pieces.get(spec.name, [])
        rows.append(
            {
                "index": index[spec.name],
                "name": spec.name,
                "aliases": list(spec.aliases),
                "shape": list(spec.shape),
                "numel": spec.numel,
                "dtype": spec.dtype,
                "status": "not selected" if spec.name in out else spec.status,
                "arrays": len(arrays),
                "chunk": list(arrays[0].chunk) if arrays else None,
                "norm": norms.get(spec.name),
            }
        )
    return Answer(query="params", facts=facts, rows=rows, rows_name="parameters")


def matching(run: Run, pattern: str) -> list[ParamSpec]:
    """The parameters that a text finds (`gradtap.matching.found_by`). Raises `ParamNotFoundError` for none."""
    found = found_by(pattern, run.params)
    if not found:
        near = near_params(pattern, run.params)
        said = f"did you mean {', '.join(near)}?" if near else "see run.params"
        raise ParamNotFoundError(f"no parameter of the run matches {pattern!r}; {said}").noting(did_you_mean=near)
    return found


def stored(run: Run, pattern: str) -> list[str]:
    """Names of the matching parameters that gradients are stored of. Raises `ParamNotFoundError` for none."""
    found = [p.name for p in matching(run, pattern) if p.stored]
    if not found:
        raise ParamNotFoundError(f"no parameter that matches {pattern!r} has gradients stored; see run.params")
    return found


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
    names = [p.name for p in params if p.stored]
    if step is None or not names:
        return {}
    try:
        norms = run.norms(names, steps=[step])
    except IncompleteError:
        # Recorded without summaries, or not complete: the other columns are still worth having, a norm is missing.
        if step not in run.steps:
            raise
        return {}
    return {name: float(row[0]) for name, row in zip(norms.params, norms.values, strict=True)}
