"""What the service says of itself: about, health, counters, its own description."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gradtap.query.formats import DTYPES, FORMATS
from gradtap.read import open_run
from gradtap.version import FORMAT, __version__
from gradtap_server.about import LINKS
from gradtap_server.settings import LIMITS
from tests.server.serving import Server, serving


def counters(server: Server) -> dict[tuple[Any, ...], float]:
    """All samples of `/metrics`: name, then labels in order of their names."""
    text = server.get("/metrics").text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def operations(server: Server) -> dict[str, dict[str, Any]]:
    """The described operations by path."""
    return {path: methods["get"] for path, methods in server.json("/openapi.json")["paths"].items()}


def test_about_tells_versions_forms_and_limits(server: Server) -> None:
    """One address tells versions, forms, dtypes, every limit, the auth mode and where all else is."""
    body = server.json("/api/v1")
    assert (body["schema"], body["gradtap"], body["format"]) == ("gradtap.about/1", __version__, FORMAT)
    assert (body["formats"], body["dtypes"], body["auth"]) == (list(FORMATS), list(DTYPES), "none")
    assert body["limits"].keys() == {*LIMITS, "bins"}
    assert body["limits"]["page_max"] == 1000


def test_about_s_links_are_the_routes(server: Server) -> None:
    """Every link is an address of the description, and every described address of runs is linked."""
    described = {path.replace(":path", "") for path in operations(server)}
    linked = set(LINKS.values()) - {"/docs", "/openapi.json"}
    assert linked <= described
    assert {path for path in described if path.startswith("/api/v1/")} <= linked


def test_health_needs_no_store(tmp_path: Path) -> None:
    """The process is healthy without its store, and not ready until it is there."""
    with serving(tmp_path / "later") as server:
        assert server.json("/healthz")["status"] == "ok"
        assert server.json("/readyz", 503)["status"] == 503
        (tmp_path / "later").mkdir()
        assert server.json("/readyz") == {"schema": "gradtap.ready/1", "status": "ok", "runs": 0}


def test_requests_are_counted_by_route(zoo: Path) -> None:
    """Counters have route templates, methods and statuses; typos share one label; bodies and chunks are counted."""
    with serving(zoo) as server:
        size = len(server.get("/api/v1/runs/closed").content)
        server.head("/api/v1/runs/closed")
        server.get("/api/v1/runs/nope")
        server.get("/no/such/thing")
        server.get("/api/v1/runs/closed/steps/1/grads/mlp.weight")
        found = counters(server)
    name, route = "gradtap_server_requests_total", "/api/v1/runs/{run}"
    assert (
        found[name, "GET", route, "200"] == found[name, "HEAD", route, "200"] == found[name, "GET", route, "404"] == 1
    )
    assert found[name, "GET", "none", "404"] == 1
    assert found["gradtap_server_response_bytes_total", route] > size
    assert found["gradtap_server_request_seconds_count", route] == 3
    chunks = {key[1]: value for key, value in found.items() if key[0] == "gradtap_server_chunks_read_total"}
    with open_run(zoo / "closed.gradtap") as run:
        assert list(chunks.values()) == [run.request("mlp.weight", 1).chunks]
    assert "grads" in next(iter(chunks))
    assert found[("gradtap_server_runs",)] == 10
    assert found[("gradtap_server_in_flight",)] == 1
    assert not any("nope" in str(part) or "no/such" in str(part) for key in found for part in key)


def test_two_apps_count_apart(zoo: Path, server: Server) -> None:
    """The counters of one app are not those of another in the same process."""
    with serving(zoo) as other:
        assert ("gradtap_server_requests_total", "GET", "/healthz", "200") not in counters(other)


def test_the_root_leads_to_the_docs(server: Server) -> None:
    """Whoever opens the bare address in a browser lands on the description, under any path of a proxy too."""
    answer = server.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")


def test_docs_need_no_other_machine(server: Server) -> None:
    """The page and what it loads name no other machine, and have no script within the page."""
    page = server.get("/docs").text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert "docs/start.js" in loaded
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|<style", page)
    for path in loaded:
        answer = server.get(f"/{path}")
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(answer.content) > 0
    for text in (page, server.get("/docs/start.js").text):
        assert not re.search(r"https?:|//[a-z]", text)
    assert not re.search(r"url\(\s*['\"]?(?!['\"]|data:)", server.get("/docs/swagger-ui.css").text)
    assert server.json("/docs/other.js", 404)["type"] == "/problems/not-found"


def test_the_description_is_whole(server: Server) -> None:
    """Each operation has an id of verb and noun, a tag, a summary, described parameters and its problems."""
    found = operations(server)
    ids = [operation["operationId"] for operation in found.values()]
    assert len(set(ids)) == len(ids)
    for path, operation in found.items():
        assert re.fullmatch("(get|list)_[a-z_]+", operation["operationId"]), path
        assert len(operation["tags"]) == 1, path
        assert operation["summary"], path
        assert operation["description"], path
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), (path, parameter["name"])
        if path.startswith("/api/v1"):
            assert {"400", "401", "403"} <= operation["responses"].keys(), path
        if "{run}" in path:
            assert {"404", "500"} <= operation["responses"].keys(), path


def test_the_framework_s_own_errors_are_not_described(server: Server) -> None:
    """What FastAPI says of wrong arguments is gone: they are problems like all others."""
    assert "HTTPValidationError" not in server.get("/openapi.json").text


def test_head_answers_as_get(server: Server) -> None:
    """Every described address that can be asked for answers HEAD with the status and headers of GET and no body."""
    names = {"run": "closed", "step": "2", "param": "mlp.bias", "slug": "usage"}
    paths = [*operations(server), "/docs", "/docs/start.js", "/openapi.json"]
    for path in paths:
        url = re.sub(r"\{(\w+)(?::path)?\}", lambda found: names[found[1]], path)
        url += "?steps=1:3" if url.endswith("/runs/closed/grads/mlp.bias") else ""
        got, head = server.get(url), server.head(url)
        assert got.status_code == head.status_code == 200, (url, got.text[:300])
        assert head.content == b"", url
        same = ("content-type", "etag", "cache-control", "content-location", "link")
        assert {k: got.headers.get(k) for k in same} == {k: head.headers.get(k) for k in same}, url


def test_metadata_is_answered_while_all_reads_are_busy(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every thread for reads taken, lists and health are answered all the same."""
    from gradtap.read.request import GradRequest

    begun, let_go = threading.Event(), threading.Event()
    read = GradRequest.read

    def slow(self: GradRequest, *args: Any, **options: Any) -> Any:
        begun.set()
        assert let_go.wait(20)
        return read(self, *args, **options)

    monkeypatch.setattr(GradRequest, "read", slow)
    with serving(zoo, threads=1) as server:
        path = f"{server.url}/api/v1/runs/closed/steps/1/grads/mlp.bias"
        import httpx2

        done: list[int] = []
        threads = [
            threading.Thread(target=lambda: done.append(httpx2.get(path, trust_env=False, timeout=30).status_code))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        try:
            assert begun.wait(20)
            start = time.monotonic()
            assert server.get("/healthz").status_code == 200
            assert server.get("/api/v1/runs/closed/steps").status_code == 200
            assert time.monotonic() - start < 10
            assert done == []
        finally:
            let_go.set()
            for thread in threads:
                thread.join(20)
    assert done == [200, 200, 200]
