"""Arguments that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from gradtap.cli.completion import params_of, runs_of, steps_of

Store = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="Folder of a run or of several, or a server's address such as http://127.0.0.1:8000."
    ),
]
Folder = Annotated[str, typer.Argument(metavar="STORE", help="Folder of a run or of several.")]
RunName = Annotated[
    str | None,
    typer.Option("--run", "-r", metavar="NAME", help="Which run, where STORE has several.", autocompletion=runs_of),
]
Step = Annotated[
    str,
    typer.Argument(metavar="STEP", help="Optimizer step, or `first` or `last`.", autocompletion=steps_of),
]
Param = Annotated[
    str,
    typer.Argument(
        metavar="PARAM", help="Name of a parameter, as `gradtap ls` prints it, or its index.", autocompletion=params_of
    ),
]
Pattern = Annotated[
    str,
    typer.Argument(
        metavar="PATTERN", help="Part of a name, or a pattern with * and ?; `!` in front turns it round.",
        autocompletion=params_of,
    ),
]  # fmt: skip
Slice = Annotated[str, typer.Option(help="Part of it in NumPy's grammar, such as `0:10,::2`.")]
AsConsumed = Annotated[
    bool, typer.Option("--as-consumed", help="As the optimizer consumed it: clipped, and divided by the scale it used.")
]
Attempt = Annotated[
    int | None, typer.Option(min=1, help="Which capture of a step that was recorded again; the last if not given.")
]
