"""Large bodies: how many are in memory at a time, clients that stall, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import Response

from gradtap.errors import TimedOutError
from gradtap_server.sending import LARGE, PartsResponse, room_for
from tests.server.samples import grad_path
from tests.server.serving import Server, serving
from tests.support.synthetic import SMALL, Job, spec

RUN = "large"
SETTINGS = replace(SMALL, chunk_bytes=2**22, shard_bytes=2**25)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose large gradient, of 16 MiB, fits no buffer of a socket."""
    params = (spec("w", 2048, 2048), spec("small", 8))
    job = Job(run=tmp_path_factory.mktemp("large") / RUN, params=params, world=1, settings=SETTINGS).steps([1])
    job.close()
    return job.run


@contextlib.contextmanager
def asking(server: Server, path: str) -> Iterator[socket.socket]:
    """A client that has asked and takes nothing of the answer by itself."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect((host, int(port)))
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        yield raw


def until(there: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_large_answers_wait_for_room() -> None:
    """A large answer waits for room and is turned away after the time-out; small ones need none."""

    async def main() -> None:
        limiter = anyio.CapacityLimiter(1)
        room = await room_for(LARGE, limiter, timeout=1)
        assert limiter.borrowed_tokens == 1
        with pytest.raises(TimedOutError, match="1 large answers were being sent for longer than 0.05 s"):
            await room_for(LARGE, limiter, timeout=0.05)
        await room_for(LARGE - 1, limiter, timeout=0.05)
        waiting = asyncio.create_task(room_for(LARGE, limiter, timeout=5))
        await asyncio.sleep(0.01)
        room.release()
        room.release()
        (await waiting).release()
        assert limiter.borrowed_tokens == 0

    asyncio.run(main())


def test_no_room_is_a_503(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all room is taken a large answer is a 503 that says when to ask again; HEAD and small answers come."""
    with serving(run, answers_at_once=1, timeout=0.3) as server:
        held = server.app.state.gradtap.held

        @server.app.get("/take")
        async def take() -> None:
            await held.acquire_on_behalf_of("a test")

        @server.app.get("/give")
        async def give() -> None:
            held.release_on_behalf_of("a test")

        assert server.get("/take").status_code == 200
        answer = server.get(grad_path(RUN, 1, "w"))
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/timed-out")
        assert int(answer.headers["retry-after"]) >= 1
        assert server.head(grad_path(RUN, 1, "w")).status_code == 200
        assert server.get(grad_path(RUN, 1, "small")).status_code == 200
        norms = f"/api/v1/runs/{RUN}/norms"
        assert server.get(norms).status_code == 200
        with monkeypatch.context() as patch:
            # A matrix of norms is as much an answer that somebody holds.
            patch.setattr("gradtap_server.sending.LARGE", 1)
            assert server.get(norms).status_code == 503
        assert server.get("/give").status_code == 200
        assert len(server.get(grad_path(RUN, 1, "w")).content) == 2**24
        assert held.borrowed_tokens == 0


def test_room_is_given_back_by_a_failed_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fails keeps no room."""

    def failing(*args: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gradtap.read.request.GradRequest.read", failing)
    with serving(run, answers_at_once=1, timeout=5) as server:
        for _ in range(3):
            assert server.get(grad_path(RUN, 1, "w")).status_code == 500
        assert server.app.state.gradtap.held.borrowed_tokens == 0


def test_a_client_that_stalls_is_cut_off(run: Path) -> None:
    """A client that takes nothing loses its room after the time-out; what it has by then is no whole answer."""
    with serving(run, answers_at_once=1, timeout=0.4) as server, asking(server, grad_path(RUN, 1, "w")) as raw:
        held = server.app.state.gradtap.held
        until(lambda: held.borrowed_tokens == 1)
        until(lambda: held.borrowed_tokens == 0)
        assert len(server.get(grad_path(RUN, 1, "w")).content) == 2**24
        got = 0
        while piece := raw.recv(2**20):
            got += len(piece)
        assert 0 < got < 2**24


def test_a_client_that_leaves_is_let_go(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever leaves in the middle ends the sending: its room is free, and no log fills with failed writes."""
    with caplog.at_level(logging.DEBUG), serving(run, answers_at_once=1) as server:
        counted = []

        @server.app.get("/large")
        async def large() -> Response:
            response = PartsResponse([bytes(2**26)], media_type="text/plain", headers={})
            messages = response._messages

            def noted() -> Iterator[Any]:
                for at, message in enumerate(messages()):
                    counted.append(at)
                    yield message

            response._messages = noted  # type: ignore[method-assign]
            return response

        for path in ("/large", grad_path(RUN, 1, "w")):
            with asking(server, path) as raw:
                for _ in range(40):
                    raw.recv(2**16)
                # Closed at once, with a reset.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: server.app.state.gradtap.held.borrowed_tokens == 0)
        assert server.get("/healthz").status_code == 200
    assert 0 < len(counted) < 2**26 // 2**16
    assert "socket.send() raised exception" not in caplog.text
    assert "Exception" not in caplog.text


def test_writes_after_a_reset_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that is lost while nothing slows the sending is noticed before many writes have failed."""

    async def main() -> int:
        loop, tries = asyncio.get_running_loop(), 0
        ours, theirs = socket.socketpair()
        gone = asyncio.Event()

        class Protocol(asyncio.Protocol):
            def connection_lost(self, error: Exception | None) -> None:
                gone.set()

        ours.setblocking(False)
        transport, _ = await loop.create_connection(Protocol, sock=ours)
        theirs.close()

        async def send(message: Any) -> None:
            nonlocal tries
            tries += 1
            transport.write(message.get("body", b"") or b"x")

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        response = PartsResponse([bytes(2**24)], media_type="text/plain", headers={})
        await response({"type": "http"}, receive, send)
        transport.close()
        return tries

    with caplog.at_level(logging.WARNING, "asyncio"):
        assert asyncio.run(main()) < 8
    assert "socket.send() raised exception" not in caplog.text
