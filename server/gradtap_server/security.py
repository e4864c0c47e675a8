"""Who is let in, and what browsers are told. ASGI middleware: nothing of a request is looked at before it has passed.

Not here: where the service listens (`launch` refuses the worst; this holds under any server that runs the app).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradtap.errors import AccessError, GradtapError, UnauthenticatedError
from gradtap.read.catalog import Catalog
from gradtap_server.problems import error_response
from gradtap_server.settings import ServerSettings

OPEN = ("/", "/healthz", "/readyz", "/openapi.json", "/docs")
OPEN_BELOW = ("/docs/", "/problems/")
"""What needs no token, itself and with all below it: it tells nothing of any run."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer that has none of its own."""

REQUEST_ID = "X-Request-ID"
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Secured:
    """Gives each request its id, lets in who may come in, and has the headers above on every answer."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, catalog: Catalog) -> None:
        self.app = app
        self.settings = settings
        self.catalog = catalog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        _mount(scope, self.settings.root_path)
        headers = Headers(scope=scope)
        asked = headers.get(REQUEST_ID, "")
        request_id = asked if _GOOD_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                made = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    made.setdefault(name, value)
                made[REQUEST_ID] = request_id
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is None:
            await self.app(scope, receive, dressed)
        else:
            await error_response(refusal, scope, self.catalog)(scope, receive, dressed)

    def _refusal(self, scope: Scope, headers: Headers) -> GradtapError | None:
        settings = self.settings
        if settings.token is None and not settings.insecure_no_auth and not is_local(scope.get("server")):
            return AccessError(
                "this service has no token, so it answers on this machine's own loopback only; whoever runs it can set "
                "GRADTAP_SERVER_TOKEN, or GRADTAP_SERVER_INSECURE_NO_AUTH=1 to let everybody in"
            )
        # Without Host it is no browser, and so no page of another site.
        host = headers.get("host")
        if host is not None and not self._may_call(host):
            return AccessError(
                f"Host is {host[:100]!r}, which is no name of this service; whoever runs it can add "
                "the name to GRADTAP_SERVER_HOSTS"
            )
        return self._stranger(scope, headers)

    def _may_call(self, host: str) -> bool:
        """Whether a client may call the service so: a page of some other site may have its name point here."""
        settings, name = self.settings, host_name(host)
        if "*" in settings.host_names or name in settings.host_names:
            return True
        if is_loopback(name):
            return True
        # A token is nothing that a browser sends by itself; and who lets everybody in has nothing to keep.
        return not settings.host_names and (settings.token is not None or settings.insecure_no_auth)

    def _stranger(self, scope: Scope, headers: Headers) -> UnauthenticatedError | None:
        token = self.settings.token
        if token is None or _is_open(scope):
            return None
        given = headers.get("authorization")
        if given is None:
            return UnauthenticatedError("this service wants a token: send the header `Authorization: Bearer <token>`")
        kind, _, shown = given.partition(" ")
        if kind.lower() == "bearer" and secrets.compare_digest(shown.strip().encode(), token.encode()):
            return None
        return UnauthenticatedError("the token is wrong; ask whoever runs this service for the right one")


def is_local(server: object) -> bool:
    """Whether a request arrived at a loopback address or a Unix socket. `server` is `scope["server"]`."""
    if not isinstance(server, tuple | list) or not server:
        return False
    return server[-1] is None or is_loopback(str(server[0]))


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's loopback."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def host_name(host: str) -> str:
    """The name in a Host header, lower case, without port, brackets and the root's dot."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _mount(scope: Scope, root: str) -> None:
    """Have addresses begin with the path that a proxy shows, whether it leaves that on a request or takes it off."""
    if root:
        path = scope["path"]
        scope["root_path"] = root
        scope["path"] = path if path == root or path.startswith(f"{root}/") else root + path


def _is_open(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN or path.startswith(OPEN_BELOW)
