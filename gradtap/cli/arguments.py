"""Arguments that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Store = Annotated[str, typer.Argument(metavar="STORE", help="Folder of a run, such as runs/mine.gradtap.")]
