from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import httpx2
import pytest

from gradtap.errors import (
    ERRORS,
    PROBLEMS,
    AccessError,
    DamagedError,
    GradtapError,
    StoreError,
    TimedOutError,
    UnauthenticatedError,
    UsageError,
)
from gradtap.remote.client import Client


def client(answer: Callable[[httpx2.Request], httpx2.Response], **options: str) -> Client:
    """A client whose server is a function."""
    return Client("http://h/base", transport=httpx2.MockTransport(answer), **options)  # type: ignore[arg-type]


def problem(slug: str, **more: object) -> bytes:
    """The body of a problem."""
    kind = PROBLEMS[ERRORS[slug]]
    body = {"schema": "gradtap.problem/1", "type": f"/problems/{slug}", "title": "t", "status": kind.status}
    return json.dumps(body | {"detail": "why", "exit_code": kind.exit_code, "instance": "id"} | more).encode()


@pytest.fixture
def raw() -> Iterator[Callable[[bytes], str]]:
    """Starts servers that answer any request with these very bytes, and close."""
    open_ones = []

    def serve(answer: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        open_ones.append(listener)

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=once, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for listener in open_ones:
        listener.close()


@pytest.mark.parametrize("slug", list(ERRORS))
def test_a_problem_is_the_error_that_it_stands_for(slug: str) -> None:
    """Every slug becomes its class, with the server's words and its facts, and none of its other members."""
    status = PROBLEMS[ERRORS[slug]].status
    body = problem(slug, did_you_mean=["w"], suggested_slice="0:3")
    with client(lambda request: httpx2.Response(status, content=body)) as asking, pytest.raises(GradtapError) as found:
        asking.fetch("GET", "/x")
    assert type(found.value) is ERRORS[slug]
    assert str(found.value).startswith("why")
    assert found.value.facts == {"did_you_mean": ["w"], "suggested_slice": "0:3"}


def test_a_problem_of_a_newer_server_keeps_its_exit_code() -> None:
    """A slug that this version does not know is the error of its exit code."""
    body = problem("damaged", type="/problems/eaten-by-mice")
    with client(lambda request: httpx2.Response(500, content=body)) as asking, pytest.raises(DamagedError):
        asking.fetch("GET", "/x")


def test_the_token_is_sent_and_a_missing_one_is_told() -> None:
    """The token goes as Bearer; where the server wants one, the message names the variable."""
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers.get("authorization"))
        return httpx2.Response(401, content=problem("unauthenticated"))

    for options in ({}, {"token": "abc"}):
        with client(answer, **options) as asking, pytest.raises(UnauthenticatedError, match="GRADTAP_TOKEN"):
            asking.fetch("GET", "/x")
    assert seen == [None, "Bearer abc"]
    with pytest.raises(UsageError, match="GRADTAP_TOKEN"):
        Client("http://h", token="a\nb")


def test_a_redirect_is_not_followed() -> None:
    """The token never goes to where an answer points; the message says where that is."""
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        return httpx2.Response(302, headers={"Location": "http://evil/steal"})

    with client(answer, token="abc") as asking, pytest.raises(StoreError, match="http://evil/steal"):
        asking.fetch("GET", "/x")
    assert asked == ["http://h/base/x"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(200, StoreError), (404, StoreError), (403, AccessError), (502, StoreError), (504, TimedOutError)],
)
def test_the_page_of_a_proxy_is_no_answer(status: int, kind: type[GradtapError]) -> None:
    """HTML is told apart from a gradtap server's words, whatever its status, and never read as an answer."""
    page = httpx2.Response(status, html="<html>hello</html>")
    with client(lambda request: page) as asking, pytest.raises(kind, match="http://h/base/api/v1/runs"):
        asking.json("/runs", schema="gradtap.runs/1")


@pytest.mark.parametrize("body", [b"[]", b'{"schema": "other/1"}', b'{"schema": "gradtap.runs/2"}', b"{"])
def test_another_object_is_no_answer(body: bytes) -> None:
    """JSON of another schema or another version is refused."""
    with (
        client(lambda request: httpx2.Response(200, content=body)) as asking,
        pytest.raises(StoreError, match="no gradtap server"),
    ):
        asking.json("/runs", schema="gradtap.runs/1")


def test_nobody_there_is_a_store_error() -> None:
    """A refused connection names the address and the command that starts a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as asking, pytest.raises(StoreError, match="gradtap serve") as found:
        asking.fetch("GET", "/x")
    assert str(port) in str(found.value)


def test_a_server_that_hangs_is_timed_out() -> None:
    """No answer within the time is exit code 7."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(address, timeout=0.2) as asking, pytest.raises(TimedOutError, match="did not answer in time"):
            asking.fetch("GET", "/x")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nonly this",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"",
        b"hello, this is no HTTP at all\r\n\r\n",
    ],
)
def test_a_body_that_breaks_off_is_no_answer(raw: Callable[[bytes], str], answer: bytes) -> None:
    """Fewer bytes than were promised, or no HTTP, is an error and never a short answer."""
    with Client(raw(answer)) as asking, pytest.raises(StoreError, match=r"broke"):
        asking.fetch("GET", "/x")


def test_a_length_that_a_transport_lets_pass_is_checked() -> None:
    """The count of bytes is compared here too, whoever carried them."""
    short = httpx2.Response(200, headers={"Content-Length": "10"}, content=b"abc")
    with client(lambda request: short) as asking, pytest.raises(StoreError, match="3 of 10 bytes"):
        asking.fetch("GET", "/x")


def test_progress_counts_bytes() -> None:
    """Whoever waits is told how much has come, of how much."""
    seen: list[tuple[int, int]] = []
    with client(lambda request: httpx2.Response(200, content=b"x" * 1000)) as asking:
        reply = asking.fetch("GET", "/x", progress=lambda done, whole: seen.append((done, whole)))
    assert seen[-1] == (1000, 1000)
    assert reply.body == b"x" * 1000


def test_empty_words_are_left_out_of_the_address() -> None:
    """What was not asked for is not sent, and a query that is in the path stays."""
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.url.raw_path)
        return httpx2.Response(200)

    with client(answer) as asking:
        asking.fetch("GET", "/x", {"a": None, "b": "", "c": 0, "d": "é+ &"})
        asking.request("GET", "/y?q=1")
    assert seen[0] in (b"/base/x?c=0&d=%C3%A9%2B+%26", b"/base/x?c=0&d=%C3%A9%2B%20%26")
    assert seen[1] == b"/base/y?q=1"
