"""`gradtap serve`: the application on a socket of this machine, until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvicorn

from gradtap.errors import NotARunError, StoreError, UsageError
from gradtap.read.catalog import Catalog
from gradtap.store.files import store_error
from gradtap_server.app import create_app
from gradtap_server.routing import API
from gradtap_server.security import is_loopback
from gradtap_server.settings import ServerSettings

GRACE = 1
"""Seconds that answers under way have when the server is told to stop; with it, it is gone within two."""

LAST_WAIT = 0.3
"""Seconds that threads have after that. Idle ones need none."""

WORKER = "AnyIO worker thread"
"""What anyio calls the threads that blocking work runs in."""


def serve(
    stores: Sequence[str | os.PathLike[str]],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: ServerSettings | None = None,
    root_path: str | None = None,
    log_level: str = "warning",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the stores until SIGINT or SIGTERM, and return then.

    `port` 0 takes a free one. `on_ready` is called with the address once clients can connect; by default it is printed
    on stderr. Raises `UsageError` for an address beyond this machine without a token, and where the address cannot be
    had; `StoreError` for a store that is not there; what `create_app` raises.
    A read that is still going on when the process was told to end cannot be stopped: the process ends without it, and
    then this does not return.
    """
    chosen = ServerSettings.from_environment() if settings is None else settings
    if root_path is not None:
        chosen = replace(chosen, root_path=root_path.rstrip("/"))
    _refuse_open_door(host, chosen)
    folders = tuple(stores) or chosen.folders
    _refuse_lost(folders)
    app = create_app(folders, chosen)
    with _listening(host, port) as listener:
        url = f"http://{_shown(host)}:{listener.getsockname()[1]}{chosen.root_path}"
        config = uvicorn.Config(
            app,
            log_level=log_level,
            # Standard error is for what concerns whoever started the server; Prometheus counts the requests.
            access_log=log_level in ("debug", "info", "trace"),
            server_header=False,
            # Who the client is decides nothing here, so no header may say so either.
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE,
            ws="none",
            lifespan="on",
        )
        server = _Server(config, lambda: (on_ready or _announce)(url))
        # After the configuration, which sets up the loggers.
        logging.getLogger("uvicorn.error").addFilter(lambda record: not _of_the_end(server, record))
        server.run([listener])
    if server.should_exit:
        _leave_reads_behind()


class _Server(uvicorn.Server):
    """Uvicorn, which says when it listens, and ends on a signal as any function does."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._ready()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal. Uvicorn raises it again once it is done: nothing is left to be interrupted."""
        try:
            super().run(sockets)
        except KeyboardInterrupt:
            if not self.should_exit:
                raise

    def handle_exit(self, sig: int, frame: object) -> None:
        """Note that a signal came. A second one does not wait for answers under way."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _of_the_end(server: _Server, record: logging.LogRecord) -> bool:
    """Whether a line only says that an answer was cut off because the server ends: it was told to."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return server.should_exit and (cancelled or str(record.msg).startswith("Cancel "))


def _leave_reads_behind() -> None:
    # The interpreter waits at its end for every thread; one may hang on a lost network disk for hours.
    deadline = time.monotonic() + LAST_WAIT
    for thread in threading.enumerate():
        if thread.name.startswith(WORKER):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                # It only reads, so there is nothing that it could leave half done.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)


def _refuse_open_door(host: str, settings: ServerSettings) -> None:
    if settings.token is not None or settings.insecure_no_auth or is_loopback(host.lower()):
        return
    raise UsageError(
        f"host is {host!r}: whoever reaches this machine could read every gradient. Set a token "
        "(GRADTAP_SERVER_TOKEN, as the README makes one), keep to --host 127.0.0.1, or let everybody in on purpose "
        "with GRADTAP_SERVER_INSECURE_NO_AUTH=1"
    )


def _refuse_lost(folders: Sequence[str | os.PathLike[str]]) -> None:
    """Raise where a store is not there: who types a command is told now, not by `/readyz`."""
    catalog = Catalog(folders)
    for store in catalog.stores:
        try:
            file = store.exists() and not store.is_dir()
        except OSError as error:
            raise store_error("look into", store, error) from error
        if file:
            raise NotARunError(f"{store} is a file; give the folder of a run, or a folder of runs")
    try:
        catalog.check()
    except StoreError as error:
        if error.errno == errno.ENOENT:
            raise NotARunError(str(error)) from error
        raise


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Named, as asyncio has only such sockets send at once: else each answer waits 40 ms for the client's ack.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}: {error.strerror}") from error
    try:
        # A server that was stopped a moment ago must not keep its address from the next one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _unbound(host, port, error) from error
    return listener


def _unbound(host: str, port: int, error: OSError | OverflowError) -> UsageError:
    if isinstance(error, OverflowError):
        return UsageError(f"port is {port}; give 0 (a free one) to 65535")
    cures = {
        errno.EADDRINUSE: "it is in use; stop who uses it, or give another --port, 0 for a free one",
        errno.EADDRNOTAVAIL: "this machine has no such address; see `ip address`, or give --host 127.0.0.1",
        errno.EACCES: "ports below 1024 are for root; give another --port",
    }
    cure = cures.get(error.errno or 0, error.strerror or str(error))
    return UsageError(f"cannot listen on {_shown(host)}:{port}: {cure}")


def _shown(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def _announce(url: str) -> None:
    sys.stderr.write(f"gradtap serves on {url} (API {url}{API}, docs {url}/docs); Ctrl-C ends it\n")
    sys.stderr.flush()
