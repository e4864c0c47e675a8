"""The demo's training processes as one group: started together, watched together, ended together. No torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradtap.errors import CaptureError

CAPACITY = 64
"""Captures that the demo's store is laid out for at first, and most captures in one shard file: small, so that a
few hundred steps show growth and several shards."""

TAIL_LINES = 25
SPEAKER = "gradtap: "
GRACE_SECONDS = 5.0


def run_group(
    module: str, work: Path, *, world: int, poll: Callable[[], None], environment: dict[str, str] | None = None
) -> None:
    """Run `python -m module WORK` in `world` processes until all have ended; `poll` is called about ten times a second.

    Standard error of rank r goes to `work/rank-r.err`. Raises `CaptureError` with the end of the standard error of
    the first process that failed. However this ends, no process is left running.
    """
    environment = dict(os.environ) if environment is None else environment
    ranks: list[subprocess.Popen[bytes]] = []
    before = _leave_on_signals()
    try:
        for variables in rank_variables(environment, world):
            with (work / f"rank-{variables['RANK']}.err").open("wb") as log:
                command = [sys.executable, "-m", module, str(work)]
                ranks.append(
                    subprocess.Popen(
                        command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                )
        _watch(ranks, work, poll)
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)


def rank_variables(environment: dict[str, str], world: int) -> list[dict[str, str]]:
    """The environment of each rank: the caller's, less what an outer launcher left in it."""
    kept = {k: v for k, v in environment.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        # Threads of several processes would wait for each other's cores; the model is small enough for one each.
        "OMP_NUM_THREADS": "1",
        "GRADTAP_CAPACITY": str(CAPACITY),
        "GRADTAP_MAX_TIME": str(CAPACITY),
        "PYTHONUNBUFFERED": "1",
    }
    return [kept | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def tail(path: Path) -> str:
    """The last lines of a log; an empty text where there is no log."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])


def warnings_said(work: Path, world: int) -> list[str]:
    """What gradtap itself said on the standard error of any rank, each message once."""
    logs = (work / f"rank-{rank}.err" for rank in range(world))
    lines = [line for log in logs for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return list(dict.fromkeys(line[line.index(SPEAKER) :] for line in lines if SPEAKER in line))


def _watch(ranks: list[subprocess.Popen[bytes]], work: Path, poll: Callable[[], None]) -> None:
    while True:
        codes = [rank.poll() for rank in ranks]
        poll()
        failed = next((i for i, code in enumerate(codes) if code), None)
        if failed is not None:
            raise CaptureError(
                f"training process {failed} of {len(ranks)} ended with {_ending(codes[failed] or 0)}; the others were "
                f"stopped. The end of what it said:\n{tail(work / f'rank-{failed}.err')}"
            )
        if all(code == 0 for code in codes):
            return
        time.sleep(0.1)


def _leave_on_signals() -> dict[int, Any]:
    # The ranks are sessions of their own, so a signal to the parent alone would leave them training.
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, number)
        until = time.monotonic() + GRACE_SECONDS
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
