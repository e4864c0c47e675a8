"""Long lists in pages: a limit, an opaque cursor, and a `Link` to the next page.

A cursor also holds what the words of the first page meant, such as the step that was the last one then: a run that
grows would make them mean another on the next page.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from starlette.requests import Request

from gradtap.errors import UsageError
from gradtap.query.words import ENDS, step_of
from gradtap.read import Run
from gradtap_server.settings import ServerSettings

T = TypeVar("T")
Key = int | str
"""What a row is known by from page to page; rows ascend by it, so that a list may grow between two pages."""

PINS = {"params": 1, "step": 2}
"""How many numbers go with a cursor of a list: a step; a step and an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """Some rows of `total`. `next` is the cursor of the page after them, None at the end."""

    rows: Sequence[T]
    total: int
    next: str | None = None

    def facts(self) -> dict[str, Any]:
        """What a body says of its page."""
        return {"next": self.next, "total": self.total}

    def link(self, request: Request) -> dict[str, str]:
        """The `Link` header, relative to the address that was asked for; none at the end."""
        if self.next is None:
            return {}
        # Alone it keeps the path, whatever a proxy made of it.
        asked = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
        return {"Link": f'<?{urlencode([*asked, ("cursor", self.next)])}>; rel="next"'}


def page(
    rows: Sequence[T],
    *,
    key: Callable[[T], Key],
    of: str,
    limit: int | None,
    cursor: str | None,
    settings: ServerSettings,
    pin: Sequence[int | None] = (),
) -> Page[T]:
    """The rows after the cursor's, at most `limit`. `rows` ascend by `key`; `of` names the list, such as "steps".

    `pin` goes with the cursor, for `pinned` to give back. Raises `UsageError` for a limit that is not allowed and for a
    cursor that is no other page's `next`.
    """
    most = check_limit(limit, settings)
    start = bisect.bisect_right(rows, _read(cursor, of)[0], key=key) if cursor else 0
    chosen = rows[start : start + most]
    more = start + most < len(rows)
    return Page(rows=chosen, total=len(rows), next=_cursor(of, key(chosen[-1]), pin) if more and chosen else None)


def pinned(cursor: str | None, of: str) -> Sequence[int | None]:
    """The `pin` of the page that a cursor is from; empty without a cursor. Raises `UsageError` as `page`."""
    return _read(cursor, of)[1] if cursor else ()


def fixed(run: Run, word: str, step: int | None) -> str:
    """The word for a step of the first page, for all that follow. Raises `UsageError` where `word` names another."""
    if word not in ENDS and step_of(run, word) != step:
        raise UsageError(f"step is {word[:80]!r}, and the cursor is of step {step}; take both from one address")
    return word if step is None else str(step)


def check_limit(limit: int | None, settings: ServerSettings) -> int:
    """The rows of a page. Raises `UsageError` for none at all and for too many."""
    if limit is None:
        return settings.page
    if not 1 <= limit <= settings.page_max:
        raise UsageError(f"limit is {limit}; give 1 to {settings.page_max}, and follow `next` for more").noting(
            page_max=settings.page_max
        )
    return limit


def _cursor(of: str, key: Key, pin: Sequence[int | None]) -> str:
    return base64.urlsafe_b64encode(json.dumps([of, key, *pin]).encode()).decode().rstrip("=")


def _read(cursor: str, of: str) -> tuple[Key, Sequence[int | None]]:
    kinds: dict[str, type[Key]] = {"runs": str}
    try:
        raw = base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        name, key, *pin = json.loads(raw)
    except (binascii.Error, ValueError, TypeError, RecursionError):
        name, key, pin = None, None, []
    sound = len(pin) == PINS.get(of, 0) and all(each is None or type(each) is int for each in pin)
    if name != of or type(key) is not kinds.get(of, int) or not sound:
        raise UsageError(f"cursor is {cursor[:80]!r}; take it from `next` of another page of the same list")
    return key, pin
