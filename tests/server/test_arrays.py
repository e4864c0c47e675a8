"""Bodies made of parts, and the headers that say what they hold."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from gradtap.query.formats import GradHead
from gradtap_server.arrays import LONGEST_LIST, array_headers, download_headers
from gradtap_server.sending import PIECE, PartsResponse


def head(steps: tuple[int, ...], name: str = "w", factor: float = 0.125) -> GradHead:
    return GradHead(
        run="0" * 32,
        name=name,
        shape=(len(steps), 1),
        dtype="float32",
        dtype_captured="float32",
        steps=steps,
        attempts=(1,) * len(steps),
        flags=("untouched", "nonfinite"),
        factor=tuple(step + factor for step in steps),
        complete=None,
        stacked=True,
        slice=":",
    )


def sent(response: PartsResponse) -> list[Any]:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return await asyncio.Event().wait()

    asyncio.run(response({"type": "http"}, receive, send))
    return messages


def test_parts_are_sent_in_pieces_without_a_copy() -> None:
    """Parts follow each other, in pieces that are views of them; empty parts do no harm, the length is that of all."""
    values = np.arange(PIECE // 4 + 3, dtype=np.float64)
    response = PartsResponse(
        (b"head", b"", memoryview(values), memoryview(b"")), media_type="application/x-npy", headers={"X-A": "1"}
    )
    start, *bodies = sent(response)
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(4 + values.nbytes).encode()
    assert headers[b"content-type"] == b"application/x-npy" and headers[b"x-a"] == b"1"
    assert b"".join(body["body"] for body in bodies) == b"head" + values.tobytes()
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert all(len(body["body"]) <= PIECE for body in bodies)
    assert all(np.shares_memory(np.frombuffer(body["body"], np.uint8), values) for body in bodies[1:-1])


def test_an_empty_body() -> None:
    """A gradient without elements is an answer of no bytes."""
    start, *bodies = sent(PartsResponse((memoryview(b""),), media_type="application/octet-stream", headers={}))
    assert dict(start["headers"])[b"content-length"] == b"0"
    assert bodies == [{"type": "http.response.body", "body": b"", "more_body": False}]


def test_long_lists_are_cut_short() -> None:
    """Steps that would fill a header are named by their ends and number, equal attempts by one."""
    headers = array_headers(head(tuple(range(1, 2000))), dtype="float32")
    assert headers["X-Gradtap-Steps"] == "1..1999" and headers["X-Gradtap-Count"] == "1999"
    assert headers["X-Gradtap-Attempt"] == "1"
    assert "X-Gradtap-Factor" not in headers
    assert all(len(value) <= LONGEST_LIST for value in headers.values())
    short = array_headers(head((1, 2)), dtype="float32")
    assert short["X-Gradtap-Steps"] == "1,2" and short["X-Gradtap-Factor"] == "1.125,2.125"


def test_what_is_not_known_is_not_said() -> None:
    """Whether it is complete and what was rounded is left out before anything was read."""
    headers = array_headers(head((1,)), dtype="float32")
    assert "X-Gradtap-Complete" not in headers and "X-Gradtap-Rounded" not in headers
    assert headers["X-Gradtap-Flags"] == "untouched,nonfinite"
    assert array_headers(head((1,)), dtype="float32", rounded=3)["X-Gradtap-Rounded"] == "3"


def test_headers_hold_any_name() -> None:
    """Header values are ASCII of one line whatever a parameter is called."""
    for name in ("a\r\nSet-Cookie: b", "größe", '"', "..", "/" * 300, "\x00", ""):
        made = array_headers(head((1,), name), dtype="float32") | download_headers(head((1, 5), name), "npy")
        for value in made.values():
            assert value.isascii() and value.isprintable()
        assert made["Content-Disposition"].endswith((".step1-5.npy", '.step1-5.npy"'))
        assert "/" not in made["Content-Disposition"] and len(made["Content-Disposition"]) < 500
