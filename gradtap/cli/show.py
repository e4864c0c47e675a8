"""`gradtap show`: one gradient for human eyes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtap.cli.arguments import AsConsumed, Attempt, Param, RunName, Slice, Step, Store
from gradtap.cli.output import Csv, Json, Jsonl, dumped, emit, facts_grid, form_of, number, say, shape_text
from gradtap.cli.places import asking
from gradtap.errors import UsageError
from gradtap.query.answer import plain
from gradtap.query.words import is_range

if TYPE_CHECKING:
    from gradtap.query.place import Place
    from gradtap.types import GradSlice


def show(
    store: Store,
    step: Step,
    param: Param,
    *,
    run: RunName = None,
    slice: Slice = "",
    attempt: Attempt = None,
    as_consumed: AsConsumed = False,
    head: Annotated[int, typer.Option(min=0, help="How many values to print.")] = 8,
    as_json: Json = False,
    as_jsonl: Jsonl = False,
    as_csv: Csv = False,
) -> None:
    """Show one gradient: facts, statistics, values, histogram."""
    from gradtap.query.show import show as shown

    form = form_of(as_json=as_json, as_jsonl=as_jsonl, as_csv=as_csv)
    if is_range(step):
        raise UsageError(f"step is {step!r}; `show` takes one step, `gradtap grad` takes a range")
    with asking(store, run) as place:
        grad = place.grad(param, step, slice=slice, attempt=attempt, as_consumed=as_consumed)
        run_id, tags = _tags(place, grad)
        answer = shown(run_id, grad, slice=slice, head=head, tags=tags)
        emit(answer, form, pictures=_pictures(answer.facts) if form == "table" else ())


def _tags(place: Place, grad: GradSlice) -> tuple[str, dict[str, Any] | None]:
    """The run's id, and the tags of the step; None where they do not read, which stderr says, and of old attempts."""
    answer = place.steps(str(grad.step), tags=True)
    row: Mapping[str, Any] = next(iter(answer.rows), {})
    if "tags_error" in row:
        say(f"tags of step {grad.step}: {row['tags_error']}")
    return answer.facts["run"], row.get("tags") if row.get("attempt") == grad.attempts[0] else None


def _pictures(facts: Mapping[str, Any]) -> list[Any]:
    from rich.text import Text

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
    if "consumed" in facts:
        header["as consumed"] = f"stored value x {facts['consumed']}"
    if facts["tags"]:
        header["tags"] = ", ".join(f"{name}={dumped(value)}" for name, value in plain(facts["tags"]).items())
    statistics = {
        name: number(value) if isinstance(value, float) else str(value) for name, value in facts["summary"].items()
    }
    more = facts["values_total"] - facts["values_shown"]
    values = " ".join(map(number, facts["values"])) + (f" ... {more} more" if more else "")
    pictures: list[Any] = [facts_grid(header), "", facts_grid(statistics), "", Text(values), ""]
    return pictures + _bars(facts["histogram"])


def _bars(counted: Mapping[str, Any]) -> list[Any]:
    from rich.text import Text

    from gradtap.cli.pictures import histogram, histogram_title
    from gradtap.encode.histogram import BINS, LOWEST, ZERO_BIN, bin_edges

    counts = [0] * BINS
    counts[ZERO_BIN] = counted["zero"]
    for name, sign in (("negative", -1), ("positive", 1)):
        for exponent, count in counted[name].items():
            counts[ZERO_BIN + sign * (int(exponent) - LOWEST + 1)] = count
    return [
        Text(histogram_title(counts, ZERO_BIN), style="bold"),
        histogram(counts, bin_edges().tolist(), ZERO_BIN),
    ]
