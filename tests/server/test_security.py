"""Who is let in, and what every answer tells browsers."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gradtap_server.app import create_app
from gradtap_server.security import HEADERS, host_name, is_local, is_loopback
from gradtap_server.settings import ServerSettings
from tests.server.serving import Server, serving

TOKEN = "a-token-for-tests"


def asked(path: str, zoo: Path, *, server: Any = ("127.0.0.1", 80), host: str = "127.0.0.1", **settings: Any) -> Any:
    """The answer to a request that seems to arrive at `server` and calls the service `host`."""

    async def ask() -> httpx2.Response:
        app = create_app([zoo], ServerSettings(**settings))

        async def arriving(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"server": server}, receive, send)

        transport = httpx2.ASGITransport(app=arriving)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers={"Host": host})

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/api/v1", "/nope", "/healthz", "/docs", "/metrics", "/api/v1/runs/nope"])
def test_every_answer_has_the_headers(server: Server, path: str) -> None:
    """Answers, errors and pages alike tell browsers not to guess, not to frame, and to load nothing from elsewhere."""
    headers = server.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == HEADERS["Referrer-Policy"]
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers


def test_request_ids_come_back(server: Server) -> None:
    """A good id of the client is kept, any other is replaced; no two are equal."""
    assert server.get("/healthz", headers={"X-Request-ID": "mine.1"}).headers["x-request-id"] == "mine.1"
    odd = server.get("/healthz", headers={"X-Request-ID": "a b" * 40}).headers["x-request-id"]
    assert len(odd) == 32
    assert odd != server.get("/healthz").headers["x-request-id"]


def test_a_token_is_needed_where_one_is_set(zoo: Path) -> None:
    """Without the token every address of runs and the counters are refused; what tells of no run is not."""
    with serving(zoo, token=TOKEN) as server:
        for path in ("/api/v1", "/api/v1/runs", "/api/v1/runs/closed", "/metrics", "/nope", "/api/v1/runs/nope"):
            problem = server.json(path, 401)
            assert problem["type"] == "/problems/unauthenticated"
            assert server.get(path).headers["www-authenticate"].startswith("Bearer")
        for path in ("/healthz", "/readyz", "/docs", "/docs/start.js", "/openapi.json", "/problems/usage"):
            assert server.get(path).status_code == 200
        right = {"Authorization": f"bearer {TOKEN}"}
        assert server.json("/api/v1", headers=right)["auth"] == "token"
        assert server.get("/metrics", headers=right).status_code == 200
        # Others between must not keep it for somebody without the token.
        assert "private" in server.get("/api/v1/runs/closed", headers=right).headers["cache-control"]


@pytest.mark.parametrize(
    "given", ["", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer \xe9"]
)
def test_wrong_tokens_are_refused(zoo: Path, given: str) -> None:
    """Anything but the token itself is a 401 that does not repeat it."""
    with serving(zoo, token=TOKEN) as server:
        answer = server.get("/api/v1/runs", headers={"Authorization": given.encode("latin-1")})
    assert answer.status_code == 401
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "path", ["/docs/../api/v1/runs", "/healthz/../api/v1/runs", "//api/v1/runs", "/docs/%2e%2e/api/v1"]
)
def test_no_open_address_leads_to_a_closed_one(zoo: Path, path: str) -> None:
    """An address that begins as an open one and leads elsewhere gives nothing away."""
    with (
        serving(zoo, token=TOKEN) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw,
    ):
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.split()[1] in (b"401", b"404")
    assert b"closed" not in answer


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:9", "LOCALHOST.", "x.localhost", "127.1.2.3"])
def test_loopback_names_are_let_in(zoo: Path, host: str) -> None:
    """Every way to call this machine's loopback is a name of the service."""
    assert asked("/healthz", zoo, host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil.example", "a b"]
)
def test_a_page_of_another_site_is_refused(zoo: Path, host: str) -> None:
    """Another site whose name was pointed at this machine gets nothing."""
    answer = asked("/api/v1/runs", zoo, host=host)
    assert answer.status_code == 403
    assert answer.json()["type"] == "/problems/forbidden"
    assert "GRADTAP_SERVER_HOSTS" in answer.json()["detail"]


def test_a_request_without_host_is_let_in(server: Server) -> None:
    """A simple health check of HTTP/1.0 need not know how the service is called."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert raw.recv(100).split()[1] == b"200"


def test_names_may_be_added(zoo: Path) -> None:
    """A configured name is let in, others are not; with `*` any is."""
    assert asked("/healthz", zoo, host="grads.lan:80", hosts="grads.lan, other").status_code == 200
    assert asked("/healthz", zoo, host="evil.example", hosts="grads.lan").status_code == 403
    assert asked("/healthz", zoo, host="evil.example", hosts="grads.lan", token=TOKEN).status_code == 403
    assert asked("/healthz", zoo, host="any.example", hosts="*").status_code == 200
    assert asked("/healthz", zoo, host="any.example", token=TOKEN).status_code == 200


@pytest.mark.parametrize("address", ["10.1.2.3", "192.168.0.9", "::", "2001:db8::1", "testserver", "::ffff:10.0.0.1"])
def test_other_addresses_need_a_token(zoo: Path, address: str) -> None:
    """A request that came in beyond loopback is refused where nobody set a token, whoever started the server."""
    answer = asked("/healthz", zoo, server=(address, 80))
    assert answer.status_code == 403
    assert "GRADTAP_SERVER_TOKEN" in answer.json()["detail"]
    assert asked("/healthz", zoo, server=(address, 80), token=TOKEN).status_code == 200
    assert asked("/api/v1", zoo, server=(address, 80), insecure_no_auth=True).json()["auth"] == "none"


def test_a_unix_socket_is_local() -> None:
    """A Unix socket and loopback are local; no address at all is not."""
    assert is_local(("/run/gradtap.sock", None))
    assert is_local(("::1", 80))
    assert is_local(["127.0.0.1", 80])
    assert not is_local(None)
    assert not is_local(())


def test_names_of_hosts() -> None:
    """Ports, brackets, case and the root's dot do not count."""
    assert [host_name(h) for h in ("A.b:1", "[::1]:2", "x.", "")] == ["a.b", "::1", "x", ""]
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("localhost.example")


def test_a_proxy_s_path_is_in_every_address(zoo: Path) -> None:
    """Under a proxy's path addresses begin with it, whether the proxy leaves it on requests or takes it off."""
    with serving(zoo, root_path="/grad ients", token=TOKEN) as server:
        right = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/grad%20ients/api/v1", "/api/v1"):
            assert server.json(path, headers=right)["links"]["runs"] == "/grad%20ients/api/v1/runs"
            assert server.get(path).status_code == 401
        row = server.json("/api/v1/runs?q=closed", headers=right)["runs"][0]
        assert server.json(row["url"], headers=right)["run"] == row["run"]
        assert server.get("/grad%20ients/docs").status_code == 200
        step = server.get("/grad%20ients/api/v1/runs/closed/steps/last", headers=right)
        assert step.headers["content-location"] == f"/grad%20ients/api/v1/runs/{row['run']}/steps/5?attempt=1"
        assert server.get("/grad%20ients/").headers["location"] == "/grad%20ients/docs"
