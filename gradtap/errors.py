"""The whole error tree. Each error is also the builtin that a user would catch.

    GradtapError
    |-- UsageError (ValueError)             a wrong argument or option
    |   `-- SelectionError                  a slice that does not parse or does not fit
    |-- AttachError (RuntimeError)          attach cannot record this training
    |   |-- UnsupportedError                an engine, optimizer or mode whose true gradient cannot be had
    |   `-- RendezvousError                 the ranks did not meet
    |-- StoreError (OSError)                a store that is missing, unreadable or not writable
    |   |-- NotARunError                    a folder that holds no run
    |   |-- FormatVersionError              written by a newer gradtap
    |   |-- LockedError                     another live job holds the run
    |   |-- OtherModelError                 the run holds another model
    |   `-- DamagedError                    bytes that are not what was committed
    |-- NotFoundError (LookupError)
    |   |-- StepNotFoundError
    |   `-- ParamNotFoundError
    |-- IncompleteError (LookupError)       a capture that not every rank has committed, or a value not captured
    |-- MissingExtraError (ImportError)     an optional package is not installed
    `-- CaptureError (RuntimeError)         a capture failed under on_error="raise"

A message names the value, what is allowed, and the next thing to try.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class GradtapError(Exception):
    """Root of all errors that gradtap raises on purpose."""


class UsageError(GradtapError, ValueError):
    """A wrong argument or option."""


class SelectionError(UsageError):
    """A slice that does not parse, or does not fit the shape."""


class AttachError(GradtapError, RuntimeError):
    """`attach` cannot record this training."""


class UnsupportedError(AttachError):
    """An engine, optimizer or mode whose true gradient cannot be had, or not yet."""


class RendezvousError(AttachError):
    """The ranks of the job did not meet in the store in time."""


class StoreError(GradtapError, OSError):
    """A store that is missing, unreadable or not writable."""


class NotARunError(StoreError):
    """A path that holds no gradtap run."""


class FormatVersionError(StoreError):
    """A run written in a newer format."""


class LockedError(StoreError):
    """Another live job holds the run."""


class OtherModelError(StoreError):
    """The run holds gradients of another model."""


class DamagedError(StoreError):
    """Stored bytes that are not what was committed."""


class NotFoundError(GradtapError, LookupError):
    """A run, step or parameter that is not there."""


class StepNotFoundError(NotFoundError):
    """A step that the run does not hold."""


class ParamNotFoundError(NotFoundError):
    """A parameter that the run does not hold."""


class IncompleteError(GradtapError, LookupError):
    """A capture that not every rank has committed, or a value that was not captured."""


class MissingExtraError(GradtapError, ImportError):
    """An optional package is not installed."""


class CaptureError(GradtapError, RuntimeError):
    """A capture failed and `on_error="raise"` was asked for."""


@dataclass(frozen=True, slots=True)
class Problem:
    """How an error leaves the process: exit code of the command line, status and slug over HTTP."""

    exit_code: int
    status: int
    slug: str


PROBLEMS: dict[type[GradtapError], Problem] = {
    UsageError: Problem(2, 400, "usage"),
    SelectionError: Problem(2, 400, "bad-slice"),
    StoreError: Problem(3, 500, "store-unreadable"),
    NotARunError: Problem(3, 404, "not-a-run"),
    FormatVersionError: Problem(3, 500, "newer-format"),
    NotFoundError: Problem(4, 404, "not-found"),
    StepNotFoundError: Problem(4, 404, "step-not-found"),
    ParamNotFoundError: Problem(4, 404, "parameter-not-found"),
    IncompleteError: Problem(4, 404, "incomplete"),
    DamagedError: Problem(5, 500, "damaged"),
    MissingExtraError: Problem(8, 501, "missing-extra"),
    LockedError: Problem(9, 409, "locked"),
    OtherModelError: Problem(9, 409, "other-model"),
    AttachError: Problem(10, 500, "attach"),
    CaptureError: Problem(10, 500, "capture"),
    GradtapError: Problem(1, 500, "error"),
}
"""One table for exit codes and HTTP problems; the nearest class in the error's ancestry counts."""


def problem_of(error: BaseException) -> Problem:
    """The exit code, status and slug of an error; `GradtapError`'s own for any other exception."""
    for cls in type(error).__mro__:
        if cls in PROBLEMS:
            return PROBLEMS[cls]
    return PROBLEMS[GradtapError]


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """`"; did you mean a, b?"`, or an empty text where nothing is near. For the end of a message."""
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""
