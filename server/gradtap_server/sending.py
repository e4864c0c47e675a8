"""Large bodies on their way out: how many may be in memory at a time, and until when.

A body lives from its read until its last byte is sent, and how long that takes is up to the client. Hence room for so
many large ones, a wait for it, and an end to the patience with a client that takes nothing. Not here: what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gradtap.errors import TimedOutError

log = logging.getLogger("gradtap_server")

Buffer = bytes | memoryview

LARGE = 2**20
"""Bytes from which an answer needs room; smaller ones are as many as there are connections."""

PIECE = 2**16
"""Bytes handed to the server at a time; a client that does not take so many within the time-out is cut off."""


class Room:
    """Room for one large answer. Given back once, by whoever has it last."""

    def __init__(self, limiter: anyio.CapacityLimiter | None) -> None:
        self._limiter = limiter

    def release(self) -> None:
        """Give it back; again does nothing."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release_on_behalf_of(self)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The room stays taken after this, unless it ends with an error."""
        try:
            yield
        except BaseException:
            self.release()
            raise


async def room_for(nbytes: int, limiter: anyio.CapacityLimiter, *, timeout: float) -> Room:
    """Room for an answer of so many bytes, as soon as there is some.

    Raises `TimedOutError` where other answers keep it for longer than `timeout` seconds.
    """
    room = Room(limiter if nbytes >= LARGE else None)
    if nbytes >= LARGE:
        try:
            async with asyncio.timeout(timeout):
                await limiter.acquire_on_behalf_of(room)
        except TimeoutError:
            raise TimedOutError(
                f"no answer: {limiter.total_tokens:g} large answers were being sent for longer than {timeout:g} s; ask "
                f"again, or for less than {LARGE} bytes"
            ).noting(timeout_seconds=timeout) from None
    return room


class PartsResponse(Response):
    """An answer whose body is a list of buffers, sent one after the other as they lie. The length is that of all.

    `room` is given back when all is sent, and when the client has left or took nothing for `patience` seconds. Such an
    answer breaks off, short of its length.
    """

    def __init__(
        self,
        parts: Sequence[Buffer],
        *,
        media_type: str,
        headers: Mapping[str, str],
        room: Room | None = None,
        patience: float | None = None,
    ) -> None:
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        length = {"content-length": str(sum(view.nbytes for view in views))}
        super().__init__(headers={**headers, **length}, media_type=media_type)
        self._views = views
        self._room = room
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it: the head, the pieces, and an empty piece that ends it."""
        gone = asyncio.ensure_future(_left(receive))
        try:
            for message in self._messages():
                # Without a pause the loop never gets to see that the client has left.
                await asyncio.sleep(0)
                if gone.done():
                    return
                async with asyncio.timeout(self._patience):
                    await send(message)
        except TimeoutError:
            log.warning("a client took nothing of its answer for %g s; it breaks off", self._patience)
        finally:
            gone.cancel()
            self._views = []
            if self._room is not None:
                self._room.release()

    def _messages(self) -> Iterator[Message]:
        yield {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        for view in self._views:
            for start in range(0, view.nbytes, PIECE):
                yield {"type": "http.response.body", "body": view[start : start + PIECE], "more_body": True}
        yield {"type": "http.response.body", "body": b"", "more_body": False}


async def _left(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
