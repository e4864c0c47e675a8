"""`gradtap run`: record a training script as it is."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What to run, as it is.")] = None,
    *,
    store: Annotated[str, typer.Option(help="Folder of the run to write; of several runs for several models.")],
    select: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Parameters to record; may be given again; ! excludes.")
    ] = None,
    every: Annotated[
        str, typer.Option(help="Steps to record: 10, or 1,2,500, or 'first 100, then every 50', or log-spaced.")
    ] = "1",
    codec: Annotated[str, typer.Option(help="exact or fast.")] = "exact",
    summary: Annotated[str, typer.Option(help="none, basic or full.")] = "full",
    on_full: Annotated[str, typer.Option(help="wait or drop.")] = "wait",
    on_error: Annotated[str, typer.Option(help="warn or raise.")] = "warn",
) -> None:
    """Run a training command and record its gradients, without an edit.

    For scripts that use Accelerate, HF Trainer or Lightning, under accelerate launch, torchrun, deepspeed or python.
    Ends with the command's exit code; with 10, and the reason, where nothing was recorded.
    """
    from gradtap.runner.launch import run_command

    options: dict[str, Any] = {"every": _steps(every), "codec": codec, "summary": summary}
    options |= {"on_full": on_full, "on_error": on_error}
    if select:
        options["select"] = select
    raise typer.Exit(run_command(command or [], store, options))


def _steps(text: str) -> int | str | list[int]:
    """`every` as `attach` takes it: a number, a list of numbers, or the words of a schedule."""
    words = [word.strip() for word in text.strip("[] ").split(",")]
    if all(word.isdigit() for word in words):
        return int(words[0]) if len(words) == 1 and "[" not in text else [int(word) for word in words]
    return text
