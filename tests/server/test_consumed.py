"""As consumed, and the audit, over HTTP: headers, entity tags, lasting addresses, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtap_server import arrays
from tests.server.samples import array_of, grad_path, reads, stack_path
from tests.server.serving import Server, serving
from tests.support.synthetic import Job

STEPS = 6


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Steps 1 to 6, clipped by a coefficient of their own; that of step 6 is not known, and step 2 is ragged."""
    made = Job(run=tmp_path_factory.mktemp("consumed") / "run.gradtap", world=2)
    for step in range(1, STEPS + 1):
        coefficient = math.nan if step == STEPS else 1 / (step + 1)
        made.step(step, ended={"clip_coef": coefficient}, micro_seen=1 if step == 2 else 2)
    made.close()
    return made


@pytest.fixture(scope="module")
def server(job: Job) -> Iterator[Server]:
    """A server of that run."""
    with serving(job.run) as running:
        yield running


def test_values_are_those_that_were_consumed(server: Server, job: Job) -> None:
    """One step and a stack; the header has the coefficients, and is not there where values are as stored."""
    one = server.get(grad_path("run", 2, "mlp.bias", as_consumed=1, format="raw"))
    assert one.headers["x-gradtap-consumed"] == repr(1 / 3)
    assert np.array_equal(array_of(one), job.expected("mlp.bias", 2) * np.float32(1 / 3))
    stack = server.get(stack_path("run", "mlp.bias", "1:4:2", as_consumed=1, format="raw"))
    assert stack.headers["x-gradtap-consumed"] == "0.5,0.25"
    assert np.array_equal(array_of(stack)[1], job.expected("mlp.bias", 3) * np.float32(0.25))
    assert "x-gradtap-consumed" not in server.get(grad_path("run", 2, "mlp.bias")).headers
    assert server.json(grad_path("run", 1, "mlp.bias", as_consumed=1, format="json"))["consumed"] == 0.5


def test_it_is_another_answer_to_caches(server: Server) -> None:
    """Its tag is another one, its lasting address asks for it too, and a known tag reads no chunk."""
    plain, consumed = (server.get(grad_path("run", 1, "mlp.bias", **more)) for more in ({}, {"as_consumed": 1}))
    assert plain.headers["etag"] != consumed.headers["etag"]
    assert "as_consumed" not in plain.headers["content-location"]
    lasting = server.get(consumed.headers["content-location"])
    assert lasting.content == consumed.content and lasting.content != plain.content
    assert "immutable" in lasting.headers["cache-control"]
    before = reads(server, "run")
    asked = grad_path("run", 1, "mlp.bias", as_consumed=1)
    assert server.get(asked, headers={"If-None-Match": consumed.headers["etag"]}).status_code == 304
    head = server.head(asked)
    assert head.headers["x-gradtap-consumed"] == "0.5" and head.headers["etag"] == consumed.headers["etag"]
    assert reads(server, "run") == before


@pytest.mark.parametrize(
    "path",
    [grad_path("run", 6, "mlp.bias", as_consumed=1), stack_path("run", "mlp.bias", "4:", as_consumed=1)],
)
def test_what_is_not_known_is_refused(server: Server, path: str) -> None:
    """A problem that names the step and the reason, and no values."""
    problem: dict[str, Any] = server.json(path, 404)
    assert (problem["type"], problem["exit_code"], problem["step"]) == ("/problems/incomplete", 4, 6)
    assert "clipping is not known" in problem["reason"]


def test_a_list_too_long_for_a_header_is_asked_for_apart(
    server: Server, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is there and empty, so that nobody takes the values for those stored; gradtap's own client asks."""
    from gradtap.remote import place as remote
    from gradtap.remote.address import address_of

    monkeypatch.setattr(arrays, "LONGEST_LIST", 30)
    monkeypatch.setattr(remote, "FACTS_AT_ONCE", 1)
    answer = server.get(stack_path("run", "mlp.bias", "1:6", as_consumed=1, format="raw"))
    assert answer.headers["x-gradtap-consumed"] == ""
    place = remote.remote_place(address_of(server.url))
    try:
        grad = place.grad("mlp.bias", "1:6", as_consumed=True)
    finally:
        place.close()
    assert grad.consumed == tuple(1 / (step + 1) for step in range(1, 6))
    assert np.array_equal(grad[4], job.expected("mlp.bias", 5) * np.float32(1 / 6))


def test_the_audit_is_served(server: Server, tmp_path: Path) -> None:
    """Findings with evidence; the same bytes have the same tag; another parameter of the address is refused."""
    answer = server.get("/api/v1/runs/run/audit")
    (finding,) = answer.json()["findings"]
    assert (finding["code"], finding["first"], finding["evidence"]["micro_seen"]) == ("ragged-window", 2, 1)
    again = server.get("/api/v1/runs/run/audit", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    assert server.json("/api/v1/runs/run/audit?code=x", 400)["type"] == "/problems/usage"
    assert server.json("/api/v1/runs/nun/audit", 404)["did_you_mean"] == ["run"]
