"""What a server answers when it cannot give what was asked for, as the error that a folder would have raised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gradtap.errors import (
    ERRORS,
    AccessError,
    DamagedError,
    GradtapError,
    LimitError,
    MissingExtraError,
    NotFoundError,
    StoreError,
    TimedOutError,
    UnauthenticatedError,
    UsageError,
)

MEMBERS = frozenset({"schema", "type", "title", "status", "detail", "exit_code", "instance"})
"""Of every problem; all else are its facts."""

_BY_EXIT: dict[int, type[GradtapError]] = {
    2: UsageError,
    3: StoreError,
    4: NotFoundError,
    5: DamagedError,
    6: AccessError,
    7: LimitError,
    8: MissingExtraError,
}
_BY_STATUS: dict[int, type[GradtapError]] = {
    401: UnauthenticatedError,
    403: AccessError,
    407: AccessError,
    408: TimedOutError,
    413: LimitError,
    429: LimitError,
    504: TimedOutError,
}


def error_of(status: int, body: bytes, url: str) -> GradtapError:
    """The error of an answer that is none. `body` is a problem of gradtap, or whatever stands between has to say."""
    problem = _problem(body)
    if problem is None:
        return _of_others(status, url)
    slug = str(problem.get("type", "")).rpartition("/")[2]
    # A newer server may have problems that this version does not know; their exit codes it does.
    cls = ERRORS.get(slug) or _BY_EXIT.get(_whole(problem.get("exit_code")), GradtapError)
    detail = str(problem.get("detail") or f"the server answered {status}")
    if issubclass(cls, UnauthenticatedError):
        detail += "; gradtap sends what the environment variable GRADTAP_TOKEN holds"
    facts = {str(name): value for name, value in problem.items() if name not in MEMBERS}
    return cls(detail).noting(**facts) if facts else cls(detail)


def stranger(url: str, why: str) -> StoreError:
    """The error for an answer that no gradtap server gives."""
    return StoreError(
        f"{url} is no gradtap server: {why}; give the address that `gradtap serve` printed, with the path that a proxy "
        "adds"
    )


def _of_others(status: int, url: str) -> GradtapError:
    if status in (502, 503):
        return StoreError(f"the proxy at {url} does not reach its server ({status}); is `gradtap serve` running?")
    if status in _BY_STATUS:
        return _BY_STATUS[status](
            f"{url} answered {status}, and not in gradtap's words: something in front of the server refuses or waits"
        )
    return stranger(url, f"it answered {status} without saying why")


def _problem(body: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(found, Mapping) and str(found.get("schema", "")).startswith("gradtap.problem/")
    return found if ours else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) else -1
