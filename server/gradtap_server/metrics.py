"""What Prometheus is told: requests, seconds, bytes, chunks read, runs. One registry for each app."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradtap.errors import GradtapError
from gradtap.read.catalog import Catalog
from gradtap_server.routing import API

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds of the histogram of seconds: from a 304 to the time-out."""

UNROUTED = "none"
"""The route of a request that fits none: its path is the client's own and would make a series for each typo."""


class Metrics:
    """The counters of one app. Labels are route templates, never paths: a series for each route, not each gradient."""

    def __init__(self, catalog: Catalog) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Answers, by route, method and status.", "route", "method", "status")
        self._bytes = self._counter("response_bytes", "Bytes of the bodies of answers.", "route")
        self._chunks = self._counter("chunks_read", "Stored chunks read to answer.", "route")
        self._seconds = Histogram(
            "gradtap_server_request_seconds",
            "Seconds from a request to the last byte of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._in_flight = Gauge("gradtap_server_in_flight", "Requests being answered.", registry=self.registry)
        runs = Gauge("gradtap_server_runs", "Runs that are served.", registry=self.registry)
        runs.set_function(lambda: _count(catalog))

    def chunks(self, scope: Scope, count: int) -> None:
        """Count chunks that were read for a request."""
        self._chunks.labels(route_of(scope)).inc(count)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self.registry)

    def began(self) -> None:
        """A request came in."""
        self._in_flight.inc()

    def ended(self, scope: Scope, *, status: int, sent: int, seconds: float) -> None:
        """The last byte of an answer went out."""
        route = route_of(scope)
        method = scope["method"] if scope["method"] in ("GET", "HEAD") else "other"
        self._in_flight.dec()
        self._requests.labels(route, method, str(status)).inc()
        self._bytes.labels(route).inc(sent)
        self._seconds.labels(route).observe(seconds)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"gradtap_server_{name}", words, labels, registry=self.registry)


class Measured:
    """ASGI middleware that counts every answer, those of errors and refusals too."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and count it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, sent = time.perf_counter(), 500, 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif scope["method"] != "HEAD":
                sent += len(message.get("body", b""))
            await send(message)

        self.metrics.began()
        try:
            await self.app(scope, receive, counted)
        finally:
            self.metrics.ended(scope, status=status, sent=sent, seconds=time.perf_counter() - start)


def route_of(scope: Scope) -> str:
    """The template of the route that answers a request, such as `/api/v1/runs/{run}`."""
    template = getattr(scope.get("route"), "path", None)
    if template is None:
        return UNROUTED
    # The route of a router that was included does not say under which prefix.
    inside = scope["path"].removeprefix(scope.get("root_path", "")).startswith(API)
    return str(template if template.startswith(API) or not inside else API + template)


def _count(catalog: Catalog) -> int:
    try:
        return sum(not entry.folder for entry in catalog.entries())
    except GradtapError:
        return 0
