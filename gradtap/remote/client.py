"""One server over HTTP: a request and its answer, and every way in which that can fail as an error of gradtap.

Not here: which addresses there are and what the answers mean (`place`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2

from gradtap.environment import TOKEN
from gradtap.errors import GradtapError, StoreError, TimedOutError, UsageError
from gradtap.remote.address import API
from gradtap.remote.problems import error_of, stranger
from gradtap.remote.shapes import SHAPES, check_shape
from gradtap.version import __version__

TIMEOUT = 60.0
"""Seconds without a byte after which a server counts as hung: twice what it lets a client wait."""

MOST_JSON = 256 * 2**20
"""Bytes of an answer that does not say how long it is, and of any JSON: far above what a server puts in a page."""

CONNECT = 10.0
"""Seconds that a connection may take to come about."""

Query = Mapping[str, str | int | None]
Progress = Callable[[int, int], None]
"""Called with the bytes that are here and the whole."""
Bound = Callable[[str, Mapping[str, str], int | None], int]
"""The most bytes that a body may have, of its address, its headers and the length that it announces, if any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """An answer that is one. `body` can be written to, so that an array over it can too."""

    url: str
    status: int
    headers: httpx2.Headers
    body: bytearray


class Client:
    """Requests to the server at `base`, with the token where there is one. Redirects are told, not followed.

    Raises `UsageError` for a token that no header can hold. `transport` stands in for the network.
    """

    def __init__(
        self,
        base: str,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.base = base.rstrip("/")
        headers = {"User-Agent": f"gradtap/{__version__}"}
        if token:
            if not (token.isascii() and token.isprintable()):
                raise UsageError(f"the token in {TOKEN} has characters that no token has; set it anew")
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx2.Client(
            headers=headers,
            # The token must not go wherever an answer points to.
            follow_redirects=False,
            timeout=httpx2.Timeout(timeout, connect=min(CONNECT, timeout)),
            transport=transport,
            # A proxy for the outside world does not reach this machine's own loopback.
            trust_env=not _is_loopback(self.base),
        )

    @classmethod
    def from_environment(cls, base: str) -> Self:
        """A client with the token of `GRADTAP_TOKEN`, as the command line has it."""
        return cls(base, token=os.environ.get(TOKEN, "").strip() or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def json(self, path: str, query: Query | None = None, *, schema: str) -> dict[str, Any]:
        """The object at a path below `/api/v1`, which must have that schema. Raises as `fetch`."""
        reply = self.fetch("GET", API + path, query, accept="application/json")
        found = _object(reply)
        if found.get("schema") != schema:
            raise stranger(reply.url, f"its answer is not {schema}, or it is of another version")
        name = schema.removeprefix("gradtap.").partition("/")[0]
        if name in SHAPES:
            check_shape(reply.url, name, found)
        return found

    def fetch(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        accept: str = "*/*",
        progress: Progress | None = None,
        bound: Bound | None = None,
    ) -> Reply:
        """As `request`, for an answer that is what was asked for. Raises what the server's problem stands for too."""
        reply = self.request(method, path, query, accept=accept, progress=progress, bound=bound)
        if not 200 <= reply.status < 300:
            raise error_of(reply.status, bytes(reply.body), reply.url)
        return reply

    def request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        accept: str = "*/*",
        progress: Progress | None = None,
        bound: Bound | None = None,
    ) -> Reply:
        """The whole answer at a path of the server, of any status. `bound` is that of an answer that is what was asked.

        Raises `StoreError` where there is no server, where it points elsewhere, for an answer that broke off, and for
        one that goes on beyond its bound; `TimedOutError` for one that did not come.
        """
        url = self.base + path
        params = {name: str(value) for name, value in (query or {}).items() if value not in (None, "")}
        # Without any, those of the path itself stay.
        options: dict[str, Any] = {"params": params} if params else {}
        with _named(url), self._http.stream(method, url, headers={"Accept": accept}, **options) as response:
            body = bytearray()
            whole = None if method == "HEAD" else _length(response)
            # Before the body: one that has no end would never come to be looked at.
            most = (bound if bound and response.is_success else _bound)(url, response.headers, whole)
            for piece in response.iter_bytes():
                body += piece
                if len(body) > most:
                    raise StoreError(
                        f"the answer of {url} goes on beyond the {most} bytes that it may have; it was cut"
                    )
                if progress is not None and whole:
                    progress(len(body), whole)
        if response.is_redirect:
            raise stranger(url, f"it points to {response.headers.get('location', 'elsewhere')!r}")
        if whole is not None and len(body) != whole:
            raise StoreError(f"the answer of {url} broke off: {len(body)} of {whole} bytes came; ask again")
        return Reply(url=url, status=response.status_code, headers=response.headers, body=body)


def _bound(url: str, headers: Mapping[str, str], length: int | None) -> int:
    text = "json" in headers.get("content-type", "").partition(";")[0]
    return MOST_JSON if length is None or text else length


def _length(response: httpx2.Response) -> int | None:
    """Bytes of the body; None where it is not said, or said of an encoded form of it."""
    text = response.headers.get("content-length", "")
    return int(text) if text.isdigit() and "content-encoding" not in response.headers else None


def _object(reply: Reply) -> dict[str, Any]:
    try:
        found = json.loads(bytes(reply.body))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise stranger(reply.url, f"it answered {reply.headers.get('content-type', 'nothing')}, no JSON object")
    return found


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """What goes wrong on the way, in words and with the address."""
    try:
        yield
    except GradtapError:
        raise
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise UsageError(f"{url[:200]!r} is no address: {error}") from error
    except httpx2.TimeoutException as error:
        raise TimedOutError(f"{url} did not answer in time ({type(error).__name__}); ask again, or for less") from error
    except httpx2.ConnectError as error:
        raise StoreError(
            f"cannot reach {url}: {error}; is `gradtap serve` running there, and is the address right?"
        ) from error
    except httpx2.DecodingError as error:
        raise StoreError(f"the answer of {url} does not decode: {error}") from error
    except httpx2.RemoteProtocolError as error:
        raise StoreError(f"the answer of {url} broke off or is no HTTP: {error}; ask again") from error
    except httpx2.HTTPError as error:
        raise StoreError(f"the connection to {url} broke ({type(error).__name__}: {error}); ask again") from error


def _is_loopback(base: str) -> bool:
    host = urlsplit(base).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
