"""The optional halves of gradtap: which packages each needs, what it gives, and what to say where one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gradtap.errors import MissingExtraError


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Distributions of an extra, and what a user gets with them."""

    packages: tuple[str, ...]
    gives: str


EXTRAS = {
    "train": Extra(packages=("accelerate", "torch"), gives="gradtap.attach on accelerate or plain torch"),
    "deepspeed": Extra(
        packages=("accelerate", "deepspeed", "torch"), gives="gradtap.attach on DeepSpeed ZeRO, `gradtap demo`"
    ),
    "hf": Extra(packages=("accelerate", "torch", "transformers"), gives="gradtap.hf for the HF Trainer"),
    "lightning": Extra(packages=("accelerate", "pytorch-lightning", "torch"), gives="gradtap.lightning for Lightning"),
    "server": Extra(
        packages=(
            *("anyio", "fastapi", "fastapi-offline", "orjson", "prometheus-client", "pydantic", "starlette"),
            "uvicorn",
        ),
        gives="`gradtap serve`, and `gradtap get` on a folder",
    ),
}
"""By the name in `pip install 'gradtap[NAME]'`."""


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'gradtap[{extra}]'"


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Imports within need the packages of an extra. Raises `MissingExtraError` with the command that installs them."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        # A module of gradtap itself that is missing is a bug, but for the server, which an installation may lack.
        if name == "gradtap":
            raise
        raise MissingExtraError(f"{what} needs {name}, which is not installed; {install(extra)}").noting(
            extra=extra, missing=name, command=install(extra)
        ) from error
