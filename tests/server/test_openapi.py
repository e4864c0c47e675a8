"""The API's description: it promises what is answered, and changes on purpose only.

`openapi.json` beside this file is the description as it was last agreed on. After a change on purpose renew it by
`GRADTAP_RENEW=1 python -m pytest tests/server/test_openapi.py` and look at the difference.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gradtap.errors import ERRORS, PROBLEMS
from gradtap.query.formats import DTYPES, FORMATS
from gradtap_server.describing import ANSWERS
from gradtap_server.security import OPEN, OPEN_BELOW
from tests.server.serving import Server

GOLDEN = Path(__file__).with_name("openapi.json")

JSON_OF = {
    "get_about": "/api/v1",
    "list_runs": "/api/v1/runs",
    "get_run": "/api/v1/runs/closed",
    "list_params": "/api/v1/runs/closed/params",
    "list_steps": "/api/v1/runs/closed/steps",
    "get_step": "/api/v1/runs/closed/steps/1?limit=2",
    "get_hist": "/api/v1/runs/closed/steps/1/grads/mlp.bias/hist",
    "get_norms": "/api/v1/runs/closed/norms",
    "get_audit": "/api/v1/runs/closed/audit",
    "get_health": "/healthz",
    "get_readiness": "/readyz",
    "get_problem": "/problems/usage",
}
ARRAYS_OF = {
    "get_grad": "/api/v1/runs/closed/steps/last/grads/mlp.bias",
    "get_grads": "/api/v1/runs/closed/grads/mlp.bias?steps=0:3",
}


@pytest.fixture(scope="module")
def described(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.json("/openapi.json")
    return found


def operations(described: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {methods["get"]["operationId"]: (path, methods["get"]) for path, methods in described["paths"].items()}


def parameters(described: dict[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (operation, each)
        for operation, (_, found) in operations(described).items()
        for each in found.get("parameters", [])
        if each["name"] == name
    ]


def test_it_changes_on_purpose_only(described: dict[str, Any]) -> None:
    """The description is the one that was agreed on, but for the version."""
    found = {**described, "info": {**described["info"], "version": "0"}}
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get("GRADTAP_RENEW"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert json.loads(GOLDEN.read_text(encoding="utf-8")) == found, "renew it as the head of this file says"


def test_problems_are_at_their_status(described: dict[str, Any]) -> None:
    """Every slug is one of the table at the table's status; only a store that is lost makes `/readyz` a 503."""
    for name, (_, operation) in operations(described).items():
        for status, response in operation["responses"].items():
            slugs = re.findall(r"`([a-z-]+)`", response["description"]) if int(status) >= 400 else []
            assert bool(slugs) == (int(status) >= 400), (name, status)
            for slug in slugs:
                wanted = 503 if (name, slug) == ("get_readiness", "store-unreadable") else PROBLEMS[ERRORS[slug]].status
                assert wanted == int(status), (name, slug)


def test_who_needs_a_token_says_so(described: dict[str, Any]) -> None:
    """A route that needs a token promises 401 and 403; one that tells nothing of any run promises neither, nor 400."""
    for path, operation in operations(described).values():
        is_open = path in OPEN or path.startswith(OPEN_BELOW)
        assert {"401", "403"} & operation["responses"].keys() == (set() if is_open else {"401", "403"}), path
        assert not (is_open and "400" in operation["responses"]), path
        if path.startswith("/api/v1"):
            assert "304" in operation["responses"] and "`timed-out`" in operation["responses"]["503"]["description"]
    responses = operations(described)["get_hist"][1]["responses"]
    assert "406" not in responses and "406" in operations(described)["get_grad"][1]["responses"]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_have_the_described_keys(server: Server, described: dict[str, Any], name: str) -> None:
    """A JSON answer has the schema's name and every key that is required, of the type that is described."""
    path, operation = operations(described)[name]
    body = server.json(JSON_OF[name])
    reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    form = described["components"]["schemas"][reference.rpartition("/")[2]]
    assert body["schema"] == form["properties"]["schema"]["const"]
    assert set(form["required"]) <= body.keys() <= form["properties"].keys() | {"attempts", "next", "total"}, path
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
        "null": type(None),
    }
    for key, value in body.items():
        kind = form["properties"].get(key, {}).get("type", "integer" if key != "next" else "string")
        allowed = [kind] if isinstance(kind, str) else kind
        assert any(isinstance(value, kinds[each]) for each in allowed), (key, value)


@pytest.mark.parametrize("name", ARRAYS_OF)
def test_arrays_have_the_described_headers(server: Server, described: dict[str, Any], name: str) -> None:
    """Every header of an array is described, and every described one is sent."""
    headers = operations(described)[name][1]["responses"]["200"]["headers"]
    sent = server.get(ARRAYS_OF[name]).headers
    assert {each for each in sent if each.startswith("x-gradtap-")} == {
        each.lower() for each in headers if each.startswith("X-Gradtap-")
    }
    assert all(each in sent for each in headers)


def test_words_that_are_few_are_listed(described: dict[str, Any]) -> None:
    """Formats, dtypes with their short names, statistics, scales and states are enums; attempts begin with 1."""
    for name, some in (
        ("format", set(FORMATS)),
        ("dtype", {*DTYPES, "bf16", "f4"}),
        ("stat", {"l2", "absmax"}),
        ("scale", {"log2", "linear"}),
        ("state", {"live", "closed"}),
    ):
        found = parameters(described, name)
        assert found and all(set(each["schema"]["enum"]) >= some for _, each in found), name
        assert all(each["schema"].get("default", "") in ["", *each["schema"]["enum"]] for _, each in found)
    for name in ("attempt", "slice", "steps", "cursor"):
        assert all(each.get("examples") or each["schema"].get("examples") for _, each in parameters(described, name))
    text = json.dumps([each for _, each in parameters(described, "attempt")])
    assert text.count('"minimum": 1') == len(parameters(described, "attempt")) >= 3
    for name, good, bad in (("slice", "0:10, ..., -1", "a"), ("steps", "0:9:2", "1:2:3:4")):
        for _, each in parameters(described, name):
            assert re.match(each["schema"]["pattern"], good) and not re.match(each["schema"]["pattern"], bad)


@pytest.mark.parametrize("path", ["steps/1", "steps/1/grads/mlp.bias", "steps/1/grads/mlp.bias/hist"])
def test_attempt_0_is_a_wrong_argument(server: Server, path: str) -> None:
    """There is no attempt 0: a 400 on every route."""
    assert server.json(f"/api/v1/runs/closed/{path}?attempt=0", 400)["type"] == "/problems/usage"
