"""`gradtap grad`: the bytes of a gradient, a slice or a stack of them, as a file of a common format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from gradtap.cli.arguments import AsConsumed, Attempt, Param, RunName, Slice, Store
from gradtap.cli.completion import steps_of, words_of
from gradtap.cli.files import Force, Output, check_output, put
from gradtap.cli.output import console, say, shape_text, size
from gradtap.cli.places import asking

if TYPE_CHECKING:
    from gradtap.query.formats import Payload

ENDINGS = {
    ".npy": "npy",
    ".json": "json",
    ".safetensors": "safetensors",
    ".bin": "raw",
    ".raw": "raw",
}
"""Which format the name of a file asks for."""

Steps = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        help="Optimizer step, `first`, `last`, or a range A:B:C, whose gradients are stacked along a new first axis.",
        autocompletion=steps_of,
    ),
]


def grad(
    store: Store,
    step: Steps,
    param: Param,
    *,
    run: RunName = None,
    slice: Slice = "",
    format: Annotated[
        str,
        typer.Option(
            help="npy, raw, json or safetensors; by the ending of FILE if not given, else npy.",
            autocompletion=words_of(*sorted(set(ENDINGS.values()))),
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="stored, native (as captured), bfloat16, float16, float32 or float64.",
            autocompletion=words_of("stored", "native", "bfloat16", "float16", "float32", "float64"),
        ),
    ] = "stored",
    attempt: Attempt = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Take a capture that is not complete; what is missing is NaN.")
    ] = False,
    as_consumed: AsConsumed = False,
    output: Output = "",
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Write a gradient, a slice, or a stack over steps as a file.

    Formats: npy, raw, json, safetensors. Without -o the bytes go to stdout.
    """
    from gradtap.query.cast import dtype_named
    from gradtap.query.formats import format_named

    named = format_named(format or ("json" if as_json else "") or ENDINGS.get(os.path.splitext(output)[1], "npy"))
    dtype_named(dtype)
    binary = "" if named == "json" else named
    check_output(output, force=force, binary=binary, instead=", or look at it with --format json or `gradtap show`")
    with asking(store, run) as place, _progress() as progress:
        payload = place.payload(
            param,
            step,
            slice=slice,
            attempt=attempt,
            partial=partial,
            as_consumed=as_consumed,
            format=named,
            dtype=dtype,
            progress=progress,
        )
    _tell(payload, dtype)
    put([*payload.parts, *([b"\n"] if named == "json" else [])], output, force=force)
    if output:
        head = payload.head
        say(f"wrote {output}: {named}, {payload.dtype} {shape_text(head.shape)}, {size(payload.nbytes)}")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr where that is a terminal; what it is called with has any unit."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _tell(payload: Payload, dtype: str) -> None:
    """What the bytes do not say of themselves."""
    head = payload.head
    if head.flags:
        say(f"flags: {' '.join(head.flags)}")
    if head.complete is False:
        say("not complete: what is missing is NaN")
    odd = {factor for factor in head.factor if factor != 1}
    if odd:
        shown = ", ".join(f"{factor:g}" for factor in sorted(odd)[:3]) + (", ..." if len(odd) > 3 else "")
        say(f"factor {shown}: stored value x factor = the gradient as defined; not applied here")
    if head.consumed is not None:
        some = sorted(set(head.consumed))
        listed = ", ".join(f"{value:g}" for value in some[:3]) + (", ..." if len(some) > 3 else "")
        say(f"as consumed: stored value x {listed}")
    if payload.rounded:
        say(f"rounded: {payload.rounded} of {head.numel} values do not fit {dtype} as they are")
    if payload.dtype == "float32" and (
        dtype in ("bf16", "bfloat16") or (dtype == "native" and head.dtype_captured == "bfloat16")
    ):
        say(f"{payload.format} has no bfloat16: written as float32, which holds all of its values")
