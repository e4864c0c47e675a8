"""Addresses of servers: which part names the server, and which the run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from gradtap.errors import UsageError

API = "/api/v1"
"""What the addresses of runs begin with, at every server; another number would be another contract."""

_RUN = re.compile(rf"(?P<base>.*?){API}(/runs(/(?P<run>[^/]+))?)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server and, where the address has one, a run on it. `base` ends without a slash; a proxy may add a path."""

    base: str
    run: str | None = None


def is_address(text: str) -> bool:
    """Whether a text is the address of a server rather than the path of a folder."""
    return text.lower().startswith(("http://", "https://"))


def address_of(text: str) -> Address:
    """The server and run that an address names: `http://host:8000`, `.../api/v1/runs/NAME`, below any path.

    Raises `UsageError` for what is no such address, and for one that holds a password or a query.
    """
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _bad(text, str(error)) from error
    if not host or text.strip() != text or any(ord(letter) < 32 for letter in text):
        raise _bad(text, "it names no host")
    if "@" in parts.netloc:
        raise UsageError("the address holds a user or password; take it out, and give the token in GRADTAP_TOKEN")
    if parts.query or parts.fragment:
        raise _bad(text, "it ends in a query")
    path = parts.path.rstrip("/")
    found = _RUN.fullmatch(path)
    run = found["run"] if found else None
    base = f"{parts.scheme.lower()}://{parts.netloc}{found['base'] if found else path}"
    return Address(base=base.rstrip("/"), run=None if run is None else unquote(run))


def _bad(text: str, why: str) -> UsageError:
    return UsageError(
        f"{text[:200]!r} is no address of a server ({why}); give one such as http://127.0.0.1:8000 or "
        "http://127.0.0.1:8000/api/v1/runs/NAME"
    )
