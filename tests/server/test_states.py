"""Runs in every state, asked for a step and for a stack; disks that fail or hang below them."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gradtap.read.catalog import Catalog
from tests.server.samples import grad_path, stack_path
from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

RUN = "mine"


@pytest.mark.parametrize(
    ("run", "one", "stack"),
    [
        ("live", 200, 200),
        ("closed", 200, 200),
        ("unclosed", 200, 200),
        # One chunk of step 1 is damaged: what is stored of the step itself, and other steps, are not.
        ("damaged", 200, "damaged"),
        ("empty", "step-not-found", "parameter-not-found"),
        ("newer", "newer-format", "newer-format"),
        ("torn", "damaged", "damaged"),
    ],
)
def test_a_step_and_a_stack_of_every_state(server: Server, run: str, one: int | str, stack: int | str) -> None:
    """A live, closed, unclosed or partly damaged run answers; one that cannot says why, and never with zeros."""
    for path, wanted in (
        (f"/api/v1/runs/{run}/steps/last", one),
        (f"/api/v1/runs/{run}/steps/1", "step-not-found" if run == "empty" else one),
        (stack_path(run, "mlp.bias", "0:3"), stack),
        (stack_path(run, "mlp.bias", "0:3", slice="0"), stack),
    ):
        answer = server.get(path)
        if isinstance(wanted, str):
            assert answer.json()["type"] == f"/problems/{wanted}", answer.text
        else:
            assert answer.status_code == wanted, answer.text
    if isinstance(one, int):
        body = server.json(f"/api/v1/runs/{run}/steps/1")
        assert (body["step"], body["complete"], body["settled"]) == (1, True, body["settled"])
        assert body["ledger"]["step"] == 1 and len(body["parameters"]) == 5
    if run == "damaged":
        assert server.get(stack_path(run, "mlp.bias", "2:3")).status_code == 200
    if isinstance(stack, int):
        assert server.get(stack_path(run, "mlp.bias", "0:3")).headers["x-gradtap-steps"] == "0,1,2"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_disk_that_fails_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """An error of the disk under a chunk is a 500 that names no folder: neither damage, nor absence, nor zeros."""
    job = Job(run=tmp_path / f"{RUN}.gradtap", params=(spec("w", 30, 20),)).steps([1, 2])
    job.close()
    open_real, pread, preadv = os.open, os.pread, os.preadv
    chunks: set[int] = set()

    def opening(path: Any, *args: Any, **options: Any) -> int:
        chunk = os.path.basename(os.fspath(path)).startswith("c.") and f"{os.sep}w{os.sep}" in os.fspath(path)
        if chunk and number == errno.EACCES:
            raise PermissionError(number, os.strerror(number), path)
        made = open_real(path, *args, **options)
        (chunks.add if chunk else chunks.discard)(made)
        return made

    def failing(real: Any) -> Any:
        def reading(file: int, *args: Any) -> Any:
            if file in chunks:
                raise OSError(number, os.strerror(number))
            return real(file, *args)

        return reading

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pread", failing(pread))
    monkeypatch.setattr(os, "preadv", failing(preadv))
    with serving(tmp_path) as server:
        for path in (grad_path(RUN, 1, "w"), stack_path(RUN, "w", "1:3"), grad_path(RUN, 1, "w") + "/hist?slice=0"):
            answer = server.get(path)
            assert (answer.status_code, answer.json()["type"]) == (500, "/problems/store-unreadable"), answer.text
            assert os.strerror(number) in answer.json()["detail"]
            assert str(tmp_path) not in answer.text + str(answer.headers)
        assert server.get(f"/api/v1/runs/{RUN}/steps/1").status_code == 200


def test_a_disk_that_hangs_holds_up_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of a hung disk is a 503 after the time-out, on every route; what needs no disk is answered at once."""
    job = Job(run=tmp_path / RUN, params=(spec("w", 30, 20),)).steps([1])
    job.close()
    gate, opened = threading.Event(), Catalog.open
    entries = Catalog.entries

    def hanging(real: Any) -> Any:
        def waiting(*args: Any) -> Any:
            assert gate.wait(30)
            return real(*args)

        return waiting

    of_run = f"/api/v1/runs/{RUN}"
    paths = ["/api/v1/runs", of_run, f"{of_run}/params", f"{of_run}/steps", f"{of_run}/steps/1", f"{of_run}/norms"]
    with serving(tmp_path, timeout=0.3) as server, ThreadPoolExecutor(60) as pool:
        monkeypatch.setattr(Catalog, "open", hanging(opened))
        monkeypatch.setattr(Catalog, "entries", hanging(entries))
        try:
            # More than there are threads for look-ups.
            answers = list(pool.map(server.get, [*paths, "/readyz", "/metrics"] * 7))
            for answer in answers:
                assert (answer.status_code, answer.json()["type"]) == (503, "/problems/timed-out")
                assert int(answer.headers["retry-after"]) >= 1
            start = time.monotonic()
            for path in ("/healthz", "/api/v1", "/openapi.json", "/docs/start.js", "/docs/swagger-ui.css", "/nope"):
                answer = server.get(path)
                assert answer.status_code in (200, 404) or path == "/api/v1"
            assert time.monotonic() - start < 10
        finally:
            gate.set()
    monkeypatch.undo()
