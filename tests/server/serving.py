"""A real server on a loopback port for tests: the app under uvicorn in a thread, and a client of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI

from gradtap_server.app import create_app
from gradtap_server.launch import _listening
from gradtap_server.settings import ServerSettings


@dataclass(frozen=True)
class Server:
    """A server that runs. `client` has its address as base."""

    url: str
    client: httpx2.Client
    app: FastAPI

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """GET an address below the server's."""
        return self.client.get(path, **options)

    def head(self, path: str, **options: Any) -> httpx2.Response:
        """HEAD an address below the server's."""
        return self.client.head(path, **options)

    def json(self, path: str, status: int = 200, **options: Any) -> Any:
        """The object that an address answers with, after a look at the status."""
        answer = self.client.get(path, **options)
        assert answer.status_code == status, answer.text
        return answer.json()


@contextlib.contextmanager
def serving(*stores: Path | str, host: str = "127.0.0.1", **settings: Any) -> Iterator[Server]:
    """A server of these stores with these settings (fields of `ServerSettings`), stopped at the end.

    Runs are looked for anew at every request unless `rescan` says otherwise.
    """
    app = create_app(list(stores), ServerSettings(**({"rescan": 0.0} | settings)))
    listener = _listening(host, 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="on", timeout_graceful_shutdown=2, ws="none")
    )
    begun = threading.Event()
    original = server.startup

    async def startup(sockets: Any = None) -> None:
        await original(sockets)
        begun.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert begun.wait(20), "the server did not start"
        url = f"http://{host}:{port}"
        # Not the environment's proxies: the server is on this machine.
        with httpx2.Client(base_url=url, trust_env=False, timeout=30) as client:
            yield Server(url, client, app)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
