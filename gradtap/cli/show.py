"""`gradtap show`: one gradient for human eyes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtap.cli.arguments import Store
from gradtap.cli.output import (
    Answer,
    Csv,
    Json,
    Jsonl,
    emit,
    facts_grid,
    form_of,
    is_open,
    number,
    opened,
    shape_text,
    tags_of,
    to_json,
)
from gradtap.errors import StepNotFoundError, UsageError

if TYPE_CHECKING:
    from gradtap.encode.summary import PieceSummary
    from gradtap.read import Run
    from gradtap.types import GradSlice


def show(
    store: Store,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Optimizer step, or `first` or `last`.")],
    param: Annotated[str, typer.Argument(metavar="PARAM", help="Name of a parameter, as `gradtap ls` prints it.")],
    *,
    slice: Annotated[str, typer.Option(help="Part of it in NumPy's grammar, such as `0:10,::2`.")] = "",
    attempt: Annotated[
        int | None, typer.Option(help="Which capture of a step that was recorded again; the last if not given.")
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="How many values to print.")] = 8,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """Show one gradient: facts, statistics, values, histogram."""
    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    run = opened(store)
    grad = run.grad(param, step_of(run, step), slice=slice or None, attempt=attempt)
    emit(_answer(grad, slice, head, tags_of(run, grad.step)), form)


def step_of(run: Run, text: str) -> int:
    """The step that a word names.

    Raises `UsageError` for a word that is no step, `StepNotFoundError` for `first` or `last` of a run without steps.
    """
    if text not in ("first", "last"):
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"step is {text!r}; give a number, `first` or `last`") from None
    steps = run.steps
    if not len(steps):
        yet = " yet" if is_open(run) else ""
        raise StepNotFoundError(f"the run has no complete step{yet}, so no {text} one; see `gradtap steps {run.path}`")
    return int(steps[0 if text == "first" else -1])


def _answer(grad: GradSlice, slice: str, head: int, tags: dict[str, Any] | None) -> Answer:
    import numpy as np

    from gradtap.encode.summary import summarize

    flat = np.ascontiguousarray(grad.values).reshape(-1)
    summary = summarize(flat, "full")
    assert summary is not None, "level full always has a summary"
    facts = {
        "name": grad.name,
        "step": grad.step,
        "attempt": grad.attempts[0],
        "shape": list(grad.shape),
        "slice": slice or None,
        "dtype": str(grad.dtype),
        "dtype_captured": grad.dtype_captured,
        "complete": grad.complete,
        "flags": list(grad.flags),
        "factor": grad.factor[0],
        "tags": tags,
        "summary": _statistics(summary),
        "values": flat[:head].tolist(),
        "values_shown": min(head, flat.size),
        "values_total": flat.size,
        "histogram": _exponents(summary),
    }
    return Answer(verb="show", facts=facts, pictures=_pictures(facts, summary))


def _statistics(summary: PieceSummary) -> dict[str, Any]:
    names = ("count", "l2", "l1", "absmax", "mean", "std", "zeros", "nan", "inf")
    return {name: getattr(summary, name) for name in names}


def _exponents(summary: PieceSummary) -> dict[str, Any]:
    """Counts by sign and floor(log2|x|), which is cut to -64 and 31; empty ones left out."""
    from gradtap.encode.histogram import LOWEST, ZERO_BIN

    counts = [] if summary.hist is None else summary.hist.tolist()
    filled = [(bin - ZERO_BIN, count) for bin, count in enumerate(counts) if count]
    return {
        "negative": {str(LOWEST - 1 - at): count for at, count in filled if at < 0},
        "zero": sum(count for at, count in filled if at == 0),
        "positive": {str(LOWEST - 1 + at): count for at, count in filled if at > 0},
    }


def _pictures(facts: dict[str, Any], summary: PieceSummary) -> list[Any]:
    from rich.text import Text

    from gradtap.cli.pictures import histogram, histogram_title
    from gradtap.encode.histogram import ZERO_BIN, bin_edges

    header = {
        "parameter": facts["name"],
        "step": f"{facts['step']} (attempt {facts['attempt']})",
        "shape": shape_text(facts["shape"]) + (f"  of slice {facts['slice']}" if facts["slice"] else ""),
        "dtype": f"{facts['dtype']} (captured as {facts['dtype_captured']})",
        "complete": "yes" if facts["complete"] else "no",
        "flags": " ".join(facts["flags"]) or "none",
    }
    if facts["factor"] != 1:
        header["factor"] = f"{facts['factor']} (stored value x factor = the gradient as defined; not applied here)"
    if facts["tags"]:
        header["tags"] = ", ".join(f"{name}={to_json(value)}" for name, value in facts["tags"].items())
    statistics = {
        name: number(value) if isinstance(value, float) else str(value) for name, value in facts["summary"].items()
    }
    more = facts["values_total"] - facts["values_shown"]
    values = " ".join(map(number, facts["values"])) + (f" ... {more} more" if more else "")
    pictures: list[Any] = [facts_grid(header), "", facts_grid(statistics), "", Text(values), ""]
    if summary.hist is not None:
        counts = summary.hist.tolist()
        pictures += [
            Text(histogram_title(counts, ZERO_BIN), style="bold"),
            histogram(counts, bin_edges().tolist(), ZERO_BIN),
        ]
    return pictures
