"""The whole error tree. Each error is also the builtin that a user would catch.

    GradtapError
    |-- UsageError (ValueError)             a wrong argument or option
    |   |-- SelectionError                  a slice that does not parse or does not fit
    |   `-- NotAcceptableError              a form of answer that there is none of
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
    |   |-- RunNotFoundError
    |   |-- StepNotFoundError
    |   `-- ParamNotFoundError
    |-- IncompleteError (LookupError)       a capture that not every rank has committed, or a value not captured
    |   `-- InFlightError                   a capture that ranks are still committing
    |-- LimitError (RuntimeError)           an answer larger than the server gives
    |   `-- TimedOutError                   an answer that took longer than the server waits
    |-- AccessError (PermissionError)       a server that does not let this caller in
    |   `-- UnauthenticatedError            no token, or a wrong one
    |-- MissingExtraError (ImportError)     an optional package is not installed
    `-- CaptureError (RuntimeError)         a capture failed under on_error="raise"

A message names the value, what is allowed, and the next thing to try; `facts` has the same for programs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

NO_FACTS: Mapping[str, Any] = MappingProxyType({})


class GradtapError(Exception):
    """Root of all errors that gradtap raises on purpose."""

    facts: Mapping[str, Any] = NO_FACTS
    """What a program can use of the message: near names, a slice that would fit. Ready for JSON."""

    def noting(self, **facts: Any) -> Self:
        """The error itself, with these facts added."""
        self.facts = {**self.facts, **facts}
        return self


class UsageError(GradtapError, ValueError):
    """A wrong argument or option."""


class SelectionError(UsageError):
    """A slice that does not parse, or does not fit the shape."""


class NotAcceptableError(UsageError):
    """A form of answer that there is none of."""


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


class RunNotFoundError(NotFoundError):
    """A run that is not where one was looked for."""


class StepNotFoundError(NotFoundError):
    """A step that the run does not hold."""


class ParamNotFoundError(NotFoundError):
    """A parameter that the run does not hold."""


class IncompleteError(GradtapError, LookupError):
    """A capture that not every rank has committed, or a value that was not captured."""


class InFlightError(IncompleteError):
    """A capture that ranks are still committing: a moment later it may be there."""


class LimitError(GradtapError, RuntimeError):
    """An answer that is larger, or would read more, than the server allows."""


class TimedOutError(LimitError):
    """An answer that took longer than the server waits for one."""


class AccessError(GradtapError, PermissionError):
    """A server that does not let this caller in."""


class UnauthenticatedError(AccessError):
    """No token was given, or a wrong one."""


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
    NotAcceptableError: Problem(2, 406, "not-acceptable"),
    StoreError: Problem(3, 500, "store-unreadable"),
    NotARunError: Problem(3, 404, "not-a-run"),
    FormatVersionError: Problem(3, 500, "newer-format"),
    NotFoundError: Problem(4, 404, "not-found"),
    RunNotFoundError: Problem(4, 404, "run-not-found"),
    StepNotFoundError: Problem(4, 404, "step-not-found"),
    ParamNotFoundError: Problem(4, 404, "parameter-not-found"),
    IncompleteError: Problem(4, 404, "incomplete"),
    InFlightError: Problem(4, 409, "step-in-flight"),
    DamagedError: Problem(5, 500, "damaged"),
    AccessError: Problem(6, 403, "forbidden"),
    UnauthenticatedError: Problem(6, 401, "unauthenticated"),
    LimitError: Problem(7, 422, "too-large"),
    TimedOutError: Problem(7, 503, "timed-out"),
    MissingExtraError: Problem(8, 501, "missing-extra"),
    LockedError: Problem(9, 409, "locked"),
    OtherModelError: Problem(9, 409, "other-model"),
    AttachError: Problem(10, 500, "attach"),
    CaptureError: Problem(10, 500, "capture"),
    GradtapError: Problem(1, 500, "error"),
}
"""One table for exit codes and HTTP problems; the nearest class in the error's ancestry counts."""


ERRORS: dict[str, type[GradtapError]] = {problem.slug: error for error, problem in PROBLEMS.items()}
"""The error that a slug stands for: what a client raises for a server's problem."""


PROBLEM_SCHEMA = "gradtap.problem/1"
"""Name and version of the form of `problem_body`."""


def problem_of(error: BaseException) -> Problem:
    """The exit code, status and slug of an error; `GradtapError`'s own for any other exception."""
    for cls in type(error).__mro__:
        if cls in PROBLEMS:
            return PROBLEMS[cls]
    return PROBLEMS[GradtapError]


def problem_body(
    error: BaseException, *, detail: str | None = None, facts: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """An error as the one object that programs get of it, over HTTP and from the command line: RFC 9457 and two keys.

    `detail` and `facts` where they differ from the error's own; facts never take the place of another key. `more` are
    keys beside these, or in place of them.
    """
    problem = problem_of(error)
    own = error.facts if isinstance(error, GradtapError) else NO_FACTS
    return {
        **(own if facts is None else facts),
        "schema": PROBLEM_SCHEMA,
        "type": f"/problems/{problem.slug}",
        "title": problem.slug.replace("-", " "),
        "status": problem.status,
        "detail": str(error) if detail is None else detail,
        "exit_code": problem.exit_code,
        **more,
    }


def near_names(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known names that are nearest to a misspelt one, best first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """`"; did you mean a, b?"`, or an empty text where nothing is near. For the end of a message."""
    close = near_names(name, known, most=most)
    return f"; did you mean {', '.join(close)}?" if close else ""
