"""gradtap: every full gradient of a sharded training run, kept in Zarr, readable while training runs.

    capture -> plan -> encode -> store -> read -> query -> serve

Each word is a folder. `attach` starts the writing half in a training loop; `open` is the reading half and needs
no torch. Both load on first use, so importing gradtap is cheap. Names not listed in `__all__` are private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradtap.errors import (
    AccessError,
    AttachError,
    CaptureError,
    DamagedError,
    FormatVersionError,
    GradtapError,
    IncompleteError,
    InFlightError,
    LimitError,
    LockedError,
    MissingExtraError,
    NotAcceptableError,
    NotARunError,
    NotFoundError,
    OtherModelError,
    ParamNotFoundError,
    RendezvousError,
    RunNotFoundError,
    SelectionError,
    StepNotFoundError,
    StoreError,
    TimedOutError,
    UnauthenticatedError,
    UnsupportedError,
    UsageError,
)
from gradtap.version import __version__

if TYPE_CHECKING:
    from gradtap.query.run import open
    from gradtap.tap import attach

__all__ = [
    "AccessError",
    "AttachError",
    "CaptureError",
    "DamagedError",
    "FormatVersionError",
    "GradtapError",
    "InFlightError",
    "IncompleteError",
    "LimitError",
    "LockedError",
    "MissingExtraError",
    "NotARunError",
    "NotAcceptableError",
    "NotFoundError",
    "OtherModelError",
    "ParamNotFoundError",
    "RendezvousError",
    "RunNotFoundError",
    "SelectionError",
    "StepNotFoundError",
    "StoreError",
    "TimedOutError",
    "UnauthenticatedError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "attach",
    "open",
]

# Modules of users' own trainers, loaded on first use as the two halves are.
_WAYS = ("hf", "lightning")


def __getattr__(name: str) -> Any:
    if name == "attach":
        try:
            from gradtap.entry import attach
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "accelerate", "deepspeed"):
                raise
            raise MissingExtraError(
                f"attach needs {error.name}, which is not installed: pip install 'gradtap[train]' (with DeepSpeed: "
                "'gradtap[deepspeed]')"
            ) from error
        return attach
    if name == "open":
        from gradtap.query.run import open

        return open
    if name in _WAYS:
        import importlib

        try:
            return importlib.import_module(f"gradtap.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "gradtap":
                raise
            raise MissingExtraError(
                f"gradtap.{name} needs {error.name}, which is not installed: pip install 'gradtap[{name}]'"
            ) from error
    raise AttributeError(f"module 'gradtap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
