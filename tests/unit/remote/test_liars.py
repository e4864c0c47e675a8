"""Servers that lie, or what stands between does: an error of the store, and never a wrong answer or a loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

import gradtap.remote.client
from gradtap.errors import StoreError
from gradtap.remote.client import Client
from gradtap.remote.place import RemotePlace
from tests.unit.remote.test_place import BODY, HEADERS, place

ROW = {
    "step": 1,
    "attempt": 1,
    "complete": True,
    "flags": [],
    "session": "0000",
    "record": "committed",
    "time": 1.0,
    "state": "applied",
    "norm": 1.0,
    "raw_bytes": 8,
    "stored_bytes": 8,
}
STEPS: dict[str, Any] = {"run": "ab" * 16, "first": 1, "last": 1, "steps": [ROW], "next": None, "total": 1}
NORMS: dict[str, Any] = {
    "run": "ab" * 16,
    "stat": "l2",
    "steps": [1, 2],
    "parameters": [{"name": "w", "values": [1.0, None]}],
    "nonfinite": {"nan": 1, "posinf": 0, "neginf": 0},
}
HIST: dict[str, Any] = {
    "run": "ab" * 16,
    "name": "w",
    "step": 3,
    "attempt": 1,
    "slice": None,
    "dtype_captured": "float32",
    "flags": [],
    "scale": "log2",
    "source": "summary",
    "zero_bin": 0,
    "nan": 0,
    "inf": 0,
    "posinf": None,
    "neginf": None,
    "bins": [{"low": None, "high": 0.0, "count": 3}],
}
STEP: dict[str, Any] = {"run": "ab" * 16, "step": 3, "attempt": 1, "parameters": [{"name": "w", "shape": [2]}]}
INFO: dict[str, Any] = {
    "run": "ab" * 16,
    "name": "r",
    "tags": {},
    "format": 1,
    "state": "closed",
    "engine": "torch",
    "world": 1,
    "sessions": [{"name": "0000", "state": "closed", "first_step": 1, "created": 1.0}],
    "damaged": {},
    "steps": {"first": 1, "last": 1, "count": 1, "gaps": []},
    "raw_bytes": 1,
    "stored_bytes": 1,
    "index_bytes": 1,
    "other_bytes": 1,
    "ratio": 1.0,
    "parameters": {
        "total": 1,
        "stored": 1,
        "frozen": 0,
        "unoptimized": 0,
        "not_selected": 0,
        "empty": 0,
        "elements": 6,
        "dtypes": {"float32": 1},
    },
}
PARAM = {
    "index": 0,
    "name": "w",
    "aliases": ["head"],
    "shape": [2, 3],
    "numel": 6,
    "dtype": "float32",
    "status": "captured",
    "arrays": 1,
    "chunk": [2, 3],
    "norm": 1.0,
}
PARAMS: dict[str, Any] = {"run": "ab" * 16, "step": 3, "parameters": [PARAM], "next": None, "total": 1}
ASK: dict[str, tuple[dict[str, Any], Callable[[RemotePlace], Any]]] = {
    "steps": (STEPS, lambda p: p.steps()),
    "norms": (NORMS, lambda p: p.norms()),
    "hist": (HIST, lambda p: p.hist("w", "3")),
    "step": (STEP, lambda p: p.step("3")),
    "info": (INFO, lambda p: p.info()),
    "params": (PARAMS, lambda p: p.params()),
    "runs": ({"runs": [{"name": "r", "damaged": {}}]}, lambda p: p.notices()),
}


def saying(name: str, *bodies: dict[str, Any]) -> RemotePlace:
    """A run on a server that gives these bodies, the last one for ever."""
    left = list(bodies)

    def answer(request: httpx2.Request) -> httpx2.Response:
        body = left.pop(0) if len(left) > 1 else left[0]
        return httpx2.Response(200, text=json.dumps({"schema": f"gradtap.{name}/1"} | body))

    return RemotePlace(client=Client("http://h", transport=httpx2.MockTransport(answer)), name="r")


@pytest.mark.parametrize("name", list(ASK))
def test_a_sound_answer_is_taken(name: str) -> None:
    """What a server of this version says passes, and what a newer one adds to it too."""
    body, ask = ASK[name]
    ask(saying(name, body))
    ask(saying(name, body | {"more": [1]}))


@pytest.mark.parametrize("name", list(ASK))
def test_an_answer_without_a_key_is_no_answer(name: str) -> None:
    """Each key that the verbs read is looked for: one that is missing, or of another kind, is a stranger's answer."""
    body, ask = ASK[name]
    for key in set(body) - {"next", "total", "nonfinite"}:
        for other in ({k: v for k, v in body.items() if k != key}, body | {key: {"odd": [1]}}):
            if name in ("info",) and key in ("tags", "damaged") and key in other:
                continue
            with pytest.raises(StoreError, match="is no gradtap server: or of another version"):
                ask(saying(name, other))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("steps", {"nonfinite": 5}),
        ("steps", {"nonfinite": {"nan": "x"}}),
        ("steps", {"next": 7}),
        ("steps", {"total": "many"}),
        ("steps", {"steps": [1]}),
        ("steps", {"steps": [ROW | {"step": True}]}),
        ("norms", {"parameters": [{"name": "w", "values": [1.0]}]}),
        ("hist", {"zero_bin": 5}),
        ("info", {"sessions": [{}]}),
        ("info", {"damaged": 5}),
        ("runs", {"runs": [{"name": "r", "damaged": 5}]}),
        ("params", {"parameters": [PARAM | {"shape": 5}]}),
    ],
)
def test_an_answer_of_other_kinds_is_no_answer(name: str, change: dict[str, Any]) -> None:
    """Numbers where lists belong, and the like, are told with the place where they stand."""
    body, ask = ASK[name]
    with pytest.raises(StoreError, match="or of another version"):
        ask(saying(name, body | change))


@pytest.mark.parametrize(
    "bodies",
    [
        [STEPS | {"steps": [], "next": "a", "total": 5}],
        [STEPS | {"next": "a", "total": 99}],
        [STEPS | {"next": "a", "total": 99}, STEPS | {"next": "b", "total": 99}, STEPS | {"next": "a", "total": 99}],
        [STEPS | {"next": "a", "total": 1}, STEPS | {"next": "b", "total": 1}],
    ],
)
def test_pages_without_an_end_are_refused(bodies: list[dict[str, Any]]) -> None:
    """An empty page with a next one, a cursor that comes again, and more rows than there are end in an error."""
    with pytest.raises(StoreError, match="its pages have no end"):
        saying("steps", *bodies).steps()


def endless(**headers: str) -> Client:
    """A client of a server whose bodies have no end."""

    def zeros() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"0" * 65536
        raise AssertionError("the body was read far beyond its bound")

    return Client(
        "http://h",
        transport=httpx2.MockTransport(lambda request: httpx2.Response(200, headers=headers, content=zeros())),
    )


def test_an_endless_body_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON ends at its bound, an array at what its shape makes, a file at that and a head: no more is read."""
    monkeypatch.setattr(gradtap.remote.client, "MOST_JSON", 200_000)
    with endless() as client, pytest.raises(StoreError, match="beyond the 200000 bytes"):
        client.json("/runs", schema="gradtap.runs/1")
    with endless(**HEADERS) as client:
        asked = RemotePlace(client=client, name="r")
        with pytest.raises(StoreError, match="beyond the 24 bytes"):
            asked.grad("w", "3")
        for form in ("npy", "safetensors", "json"):
            with pytest.raises(StoreError, match="goes on beyond"):
                asked.payload("w", "3", format=form)


def test_a_length_that_cannot_be_is_refused_unread() -> None:
    """Content-Length is compared with the shape before any of the body is read."""
    for length in ("23", "25", str(2**50)):
        told = pytest.raises(StoreError, match=f"{length} bytes where 24 belong")
        with endless(**HEADERS, **{"Content-Length": length}) as client, told:
            RemotePlace(client=client, name="r").grad("w", "3")


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Gradtap-Dtype": "object"},
        {"X-Gradtap-Dtype": "foo"},
        {"X-Gradtap-Shape": "-2,-3"},
        {"X-Gradtap-Shape": f"0,{2**70}"},
        {"X-Gradtap-Shape": ",".join("1" * 99)},
        {"X-Gradtap-Complete": "[" * 5000},
        {"X-Gradtap-Complete": "1"},
        {"X-Gradtap-Factor": "perhaps"},
        {"X-Gradtap-Step": "1..3"},
        {"X-Gradtap-Step": ""},
        {"X-Gradtap-Step": None, "X-Gradtap-Steps": "", "X-Gradtap-Count": "0"},
        {"X-Gradtap-Step": None, "X-Gradtap-Steps": "1,2,3", "X-Gradtap-Count": "3"},
        {"X-Gradtap-Name": None},
        {"X-Gradtap-Rounded": "x"},
    ],
)
def test_headers_that_no_array_has_are_refused(headers: dict[str, str | None]) -> None:
    """Dtypes that are none, shapes that cannot be, nested or odd texts: an error for a gradient and for a file."""
    for ask in (lambda p: p.grad("w", "3"), lambda p: p.payload("w", "3", format="raw")):
        with pytest.raises(StoreError, match="headers of an array"):
            ask(place(**headers))


def test_another_dtype_is_refused() -> None:
    """Values of a dtype that was not asked for are not taken for the gradient."""
    short = {"X-Gradtap-Dtype": "float16"}
    with pytest.raises(StoreError, match="float16 where"):
        place(BODY[:12], **short).grad("w", "3")
    with pytest.raises(StoreError, match="float16 where float32 was asked for"):
        place(BODY[:12], **short).payload("w", "3", format="raw")


def test_an_unknown_factor_is_taken() -> None:
    """NaN is what a store says where nobody knows the factor."""
    factor = place(**{"X-Gradtap-Factor": "nan"}).grad("w", "3").factor
    assert factor is not None and math.isnan(factor[0])


STACK: dict[str, str | None] = {
    "X-Gradtap-Step": None,
    "X-Gradtap-Steps": "2,4",
    "X-Gradtap-Count": "2",
    "X-Gradtap-Attempt": "1",
}


@pytest.mark.parametrize(
    ("headers", "step", "attempt", "said"),
    [
        ({"X-Gradtap-Step": "4"}, "3", None, "step 4 where '3'"),
        ({}, "3", 1, "attempt .2,. where 1"),
        (STACK, "3", None, "several steps"),
        ({}, "3:4", None, "one step"),
        (STACK, "3:9", None, "step 2 where '3:9'"),
        (STACK, "0:4", None, "step 4 where '0:4'"),
        (STACK, "0:9:4", None, "step 2 where"),
        (STACK | {"X-Gradtap-Steps": "4,2"}, ":", None, "do not ascend"),
        (STACK | {"X-Gradtap-Steps": "2,2"}, ":", None, "do not ascend"),
    ],
)
def test_what_was_not_asked_for_is_refused(
    headers: dict[str, str | None], step: str, attempt: int | None, said: str
) -> None:
    """Another step or attempt is an error that names both, for a gradient and for a file: it is never written."""
    for ask in (
        lambda p: p.grad("w", step, attempt=attempt),
        lambda p: p.payload("w", step, attempt=attempt, format="raw"),
    ):
        with pytest.raises(StoreError, match=said):
            ask(place(**headers))


def test_words_and_ranges_that_fit_are_taken() -> None:
    """`last` may mean any step, and a range those that it holds."""
    assert place().grad("w", "last").steps == (3,)
    assert place().grad("w", "3", attempt=2).steps == (3,)
    assert place(**STACK).grad("w", "0:9:2").steps == (2, 4)


def named(name: str) -> RemotePlace:
    """A run whose gradients come under this name, and whose one parameter is `w`, also called `head`."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/params"):
            return httpx2.Response(200, json={"schema": "gradtap.params/1"} | PARAMS)
        sent = dict(HEADERS.items()) | {"X-Gradtap-Name": name}
        return httpx2.Response(200, headers=sent, content=BODY)

    return RemotePlace(client=Client("http://h", transport=httpx2.MockTransport(answer)), name="r")


@pytest.mark.parametrize(("name", "asked"), [("x", "w"), ("x", "head"), ("x", "0"), ("w", "1"), ("w", "x")])
def test_another_parameter_is_refused(name: str, asked: str) -> None:
    """A name that the run does not know under what was asked for is an error that names both."""
    for ask in (lambda p: p.grad(asked, "3"), lambda p: p.payload(asked, "3", format="raw")):
        with pytest.raises(StoreError, match=f"parameter '{name}' where '{asked}'"):
            ask(named(name))


@pytest.mark.parametrize("asked", ["w", "head", "0"])
def test_an_alias_and_an_index_are_looked_up(asked: str) -> None:
    """The run's own name is taken for what the run's parameters say that it is."""
    assert named("w").grad(asked, "3").name == "w"
    assert named("w").payload(asked, "3", format="raw").head.name == "w"


@pytest.mark.parametrize("change", [{"step": 4}, {"attempt": 2}])
def test_statistics_of_another_step_are_refused(change: dict[str, int]) -> None:
    """A step and a histogram are those that were asked for too."""
    with pytest.raises(StoreError, match="was asked for"):
        saying("step", STEP | change).step("3", attempt=1)
    with pytest.raises(StoreError, match="was asked for"):
        saying("hist", HIST | change).hist("w", "3", attempt=1)
