"""What a cache may keep of an answer, and how a client learns that it has it already: `ETag`, `Cache-Control`.

Tags of what is large (values, histograms, matrices) are made of identifiers by `tag_of`, so that nothing need be read
to answer `If-None-Match`; those of other JSON are of the body (`answers`). Not here: which identifiers an answer has.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

YEAR = 365 * 24 * 3600
"""Seconds that an answer which cannot change may be kept: the longest that caches take seriously."""

NO_STORE = {"Cache-Control": "no-store"}
"""Of errors, and of answers to a capture that is not complete."""

_ITEM = re.compile(r'[ \t]*+(?:(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")[ \t]*+)?(?:,|\Z)')
"""One of a list of tags, or the nothing between two commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How long an answer holds. `tag` is its entity tag, quoted.

    `settled`: the address names what can no longer change, so nobody need ask again. `location` is the address that
    names it where the one asked for does not (`Content-Location`). `shared`: caches between may keep it too, which
    they may not where a token is needed to get it.
    """

    tag: str
    settled: bool = False
    location: str | None = None
    shared: bool = True

    def headers(self) -> dict[str, str]:
        """The headers of the answer and of the 304 in its place."""
        whose = "public" if self.shared else "private"
        control = (
            f"{whose}, max-age={YEAR}, immutable" if self.settled else "no-cache" + ("" if self.shared else ", private")
        )
        made = {"ETag": self.tag, "Cache-Control": control, "Vary": "Accept"}
        return made | ({"Content-Location": self.location} if self.location else {})


def tag_of(*identifiers: object) -> str:
    """A strong entity tag, quoted, that two answers share only if all their identifiers are equal.

    Identifiers are what JSON takes: text, numbers, None, tuples of them.
    """
    text = json.dumps(identifiers, separators=(",", ":"))
    return f'"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"'


def known(tag: str, if_none_match: str | None) -> bool:
    """Whether `If-None-Match` names the answer: `*`, or a list with its tag, weak (`W/`) or strong.

    What does not parse names nothing: the client gets the whole answer.
    """
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or tag in _tags(if_none_match)


def _tags(text: str) -> list[str]:
    """The tags of a list, without `W/`; none of one that does not parse."""
    found, at = [], 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None:
            return []
        found += [item[1]] if item[1] else []
        at = item.end()
    return found


def holds(request: Request, fresh: Freshness) -> bool:
    """Whether the client says that it has this answer."""
    asked = request.headers.getlist("if-none-match")
    return bool(asked) and known(fresh.tag, ", ".join(asked))


def unchanged(request: Request, fresh: Freshness) -> Response | None:
    """The 304 for a client that has this answer; None for one that must be given it."""
    return Response(status_code=304, headers=fresh.headers()) if holds(request, fresh) else None
