from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import gradtap_server.arrays
from gradtap.errors import NotARunError, RunNotFoundError, StoreError, UsageError
from gradtap.query.formats import Payload
from gradtap.remote.address import Address
from gradtap.remote.client import Client
from gradtap.remote.place import RemotePlace, _groups, remote_place
from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

HEADERS = {
    "X-Gradtap-Shape": "2,3",
    "X-Gradtap-Dtype": "float32",
    "X-Gradtap-Byteorder": "little",
    "X-Gradtap-Run": "ab" * 16,
    "X-Gradtap-Name": "w",
    "X-Gradtap-Source-Dtype": "bfloat16",
    "X-Gradtap-Flags": "untouched,nonfinite",
    "X-Gradtap-Step": "3",
    "X-Gradtap-Attempt": "2",
    "X-Gradtap-Factor": "0.5",
    "X-Gradtap-Rounded": "0",
    "Content-Type": "application/octet-stream",
}
BODY = np.arange(6, dtype="<f4").tobytes()


def place(body: bytes = BODY, **headers: str | None) -> RemotePlace:
    """A run on a server that gives this answer to everything."""
    sent = {name: value for name, value in (HEADERS | headers).items() if value is not None}
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, headers=sent, content=body))
    return RemotePlace(client=Client("http://h", transport=transport), name="r")


def test_a_gradient_is_made_of_headers_and_body() -> None:
    """Every header is a fact of the gradient, and the body its values."""
    found = place(**{"X-Gradtap-Name": "w%2Fx"}).grad("w/x", "3")
    assert found.values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found.name, found.steps, found.attempts, found.factor) == ("w/x", (3,), (2,), (0.5,))
    assert (found.dtype_captured, found.flags, found.complete) == ("bfloat16", ("untouched", "nonfinite"), True)


@pytest.mark.parametrize("cut", [0, 1, 4, 23])
def test_a_body_of_another_length_is_no_array(cut: int) -> None:
    """Too few bytes for the shape raise for a gradient and for a file: never a short array."""
    for ask in (lambda p: p.grad("w", "3"), lambda p: p.payload("w", "3", format="raw")):
        with pytest.raises(StoreError, match="24 belong"):
            ask(place(BODY[:cut]))
    with pytest.raises(StoreError, match="24 belong"):
        place(BODY + b"x").grad("w", "3")


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Gradtap-Shape": None},
        {"X-Gradtap-Shape": "2,x"},
        {"X-Gradtap-Byteorder": "big"},
        {"X-Gradtap-Step": None},
        {"X-Gradtap-Attempt": "1,2"},
        {"X-Gradtap-Complete": "perhaps"},
        {"X-Gradtap-Step": None, "X-Gradtap-Steps": "1,2", "X-Gradtap-Count": "3"},
    ],
)
def test_headers_that_make_no_sense_are_refused(headers: dict[str, str | None]) -> None:
    """What stands between may drop or garble headers: the answer is refused, not guessed at."""
    with pytest.raises(StoreError, match="headers of an array"):
        place(**headers).grad("w", "3")


def test_a_file_of_another_format_is_refused() -> None:
    """An answer that is not of the format asked for is not passed on as one."""
    with pytest.raises(StoreError, match="where npy was asked for"):
        place().payload("w", "3", format="npy")


def test_what_is_not_known_to_be_complete_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for what there is of a capture, and told nothing of the rest, it counts as incomplete."""
    assert place().grad("w", "3", partial=True).complete is False
    assert place(**{"X-Gradtap-Complete": "true"}).grad("w", "3", partial=True).complete is True


@pytest.mark.parametrize("step", ["..", "1/2", "1?x", "", "last/../first", "9" * 20])
def test_a_step_leads_nowhere_else(step: str) -> None:
    """A word that is no step never becomes a part of the address."""
    for ask in (
        lambda p: p.grad("w", step),
        lambda p: p.step(step),
        lambda p: p.hist("w", step),
        lambda p: p.params(step=step),
    ):
        with pytest.raises(UsageError, match="give a number"):
            ask(place())


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 130 steps with numbers of seven digits, of which one was dropped, and a factor of its own each."""
    path = tmp_path_factory.mktemp("long") / "long.gradtap"
    job = Job(run=path, params=(spec("w", 2),), world=1, kind="whole")
    for at in range(130):
        step = 1_000_000 + 3 * at
        job.step(step, dropped=[0] if at == 70 else [], factor=1 / (at + 1))
    job.close()
    return path


@pytest.fixture
def server(long: Path) -> Iterator[Server]:
    """A server of it."""
    with serving(long) as running:
        yield running


@pytest.mark.parametrize("longest", [2048, 10])
def test_a_stack_too_long_for_headers_is_whole(server: Server, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, attempts and factors that a header has no room for are asked for in parts; nothing is made up."""
    whole = gradtap_server.arrays._listed

    def listed(values: Any) -> str:
        # A list of few steps fits however short the longest is here: those that complete the facts must.
        return whole(values) if len(values) <= 50 or longest == 2048 else ""

    monkeypatch.setattr(gradtap_server.arrays, "_listed", listed)
    with remote_place(Address(base=server.url)).client as client:
        found = RemotePlace(client=client, name="long").grad("w", "1000000:2000000")
        payload: Payload = RemotePlace(client=client, name="long").payload("w", ":", format="raw")
    steps = tuple(1_000_000 + 3 * at for at in range(130) if at != 70)
    assert found.steps == payload.head.steps == steps
    assert found.factor == tuple(1 / (at + 1) for at in range(130) if at != 70)
    assert found.attempts == (1,) * 129
    assert found.shape == (129, 2)


def test_groups_of_steps_name_just_these_steps() -> None:
    """Ranges of one stride, each of few steps, cover all and no more."""
    steps = [1, 2, 3, 7, 9, 11, 20]
    assert [(text, list(part)) for text, part in _groups(steps)] == [
        ("1:4:1", [1, 2, 3]),
        ("7:12:2", [7, 9, 11]),
        ("20:21:1", [20]),
    ]
    assert [len(part) for _, part in _groups(range(120))] == [50, 50, 20]


def listing(*names: str) -> Callable[[], Client]:
    """Makes clients of a server with these runs."""
    body = {"schema": "gradtap.runs/1", "runs": [{"name": name} for name in names], "next": None, "total": len(names)}
    return lambda: Client("http://h", transport=httpx2.MockTransport(lambda request: httpx2.Response(200, json=body)))


def test_the_run_is_chosen_by_name_or_is_the_only_one() -> None:
    """By --run, by the address, or alone; several without a name are named, none is exit code 3."""
    base = Address(base="http://h")
    assert remote_place(base, client=listing("a")()).name == "a"
    assert remote_place(base, "b", client=listing("a")()).name == "b"
    assert remote_place(Address(base="http://h", run="c"), client=listing("a")()).name == "c"
    with pytest.raises(UsageError, match="2 runs are there: a, b"):
        remote_place(base, client=listing("a", "b")())
    with pytest.raises(NotARunError, match="no run yet"):
        remote_place(base, client=listing()())
    with pytest.raises(UsageError, match="give one of them"):
        remote_place(Address(base="http://h", run="c"), "d", client=listing("a")())
    with pytest.raises(RunNotFoundError):
        remote_place(base, "..", client=listing("a")())


def test_the_label_is_the_runs_address() -> None:
    """Messages call it by what can be given as STORE again."""
    assert place().label == "http://h/api/v1/runs/r"
