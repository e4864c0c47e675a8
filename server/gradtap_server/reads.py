"""Blocking work in threads, and no longer than a client may wait.

What takes long (reading chunks) has a limiter of its own with few threads; what is quick (looking things up) has
another, so that it is answered while all of the few are busy. Not here: what is read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from gradtap.errors import TimedOutError

T = TypeVar("T")

_running: set[asyncio.Task[Any]] = set()
# asyncio itself holds a task only weakly.


async def in_thread(work: Callable[[], T], *, timeout: float, limiter: anyio.CapacityLimiter) -> T:
    """What `work` returns, or raises, in a thread that `limiter` has room for.

    Raises `TimedOutError` after `timeout` seconds, the wait for a thread included. A thread cannot be stopped: it works
    on, and takes its room until it is done.
    """
    started = threading.Event()

    def working() -> T:
        started.set()
        return work()

    # A task of its own, so that the thread keeps its room after its client has gone.
    task = asyncio.create_task(anyio.to_thread.run_sync(working, limiter=limiter))
    _running.add(task)
    task.add_done_callback(_ended)
    done, _ = await asyncio.wait({task}, timeout=timeout)
    if done:
        return task.result()
    if not started.is_set():
        task.cancel()
    raise _timed_out(timeout, started=started.is_set())


def _ended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        # Looked at, so that asyncio does not report what nobody waits for any more.
        task.exception()


def _timed_out(timeout: float, *, started: bool) -> TimedOutError:
    why = "it took longer" if started else "all threads were busy for longer"
    return TimedOutError(
        f"no answer: {why} than {timeout:g} s; ask again, or for a smaller slice or fewer steps"
    ).noting(timeout_seconds=timeout)
