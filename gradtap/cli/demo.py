"""`gradtap demo`: train a small model with one added line, record it, check what was recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from gradtap.cli.output import Json


def demo(
    *,
    store: Annotated[str, typer.Option(help="Folder of the run to write.")] = "runs/demo.gradtap",
    steps: Annotated[int, typer.Option(help="Optimizer steps to train.")] = 30,
    processes: Annotated[int | None, typer.Option(help="Training processes; 2 if not given (1 for torch).")] = None,
    stage: Annotated[int, typer.Option(help="ZeRO stage of the DeepSpeed engine.")] = 2,
    engine: Annotated[str, typer.Option(help="deepspeed, ddp or torch.")] = "deepspeed",
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a small model, record every gradient, check three steps.

    Exit code 1 when the check fails.
    """
    from gradtap.demo.launch import run_demo
    from gradtap.demo.options import Options

    options = Options(
        store=store, steps=steps, processes=processes, stage=stage, engine=engine, seed=seed, json=as_json
    )
    raise typer.Exit(run_demo(options))
