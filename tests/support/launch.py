"""Runs one function in N processes that share a gloo process group on the loopback interface. Used by every area.

    results = launch("tests.support.cells:run", processes=2, args={"stage": 2}, folder=tmp_path)

The function is called as `function(args, folder)` in each process; what it returns must be JSON, and is that rank's
result. It may write `.npz` files to `folder` for arrays. Nobody outlives the call: stragglers print their stacks and
are killed.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class LaunchError(RuntimeError):
    """A process failed or did not end in time; the message holds the ends of their outputs."""


def launch(
    target: str | Path,
    *,
    processes: int,
    folder: Path,
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
    check: bool = True,
) -> list[Any]:
    """Results of `target` (`"module:function"`, or the path of a script, whose result is None), by rank.

    With `check` any exit code but 0 raises `LaunchError`; without it the results are `None` for a rank that left none.
    """
    job = start(target, processes=processes, folder=folder, args=args, env=env)
    codes = wait(job, timeout)
    if check and any(codes):
        raise LaunchError(f"exit codes {codes} of {target}\n{outputs(folder, processes)}")
    return [_result(folder / f"result{rank}.json") for rank in range(processes)]


def start(
    target: str | Path,
    *,
    processes: int,
    folder: Path,
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """The processes, started and not waited for (a test may kill one). End them with `wait` or `stop`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps(dict(args or {})))
    port = free_port()
    return [_spawn(target, folder, _environment(rank, processes, port) | dict(env or {})) for rank in range(processes)]


def _spawn(target: str | Path, folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"rank{env['RANK']}.log").open("wb") as log:
        return subprocess.Popen(_command(target, folder), cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def wait(job: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit codes. When one process fails, the others get two seconds; all are gone on return.

    Raises `LaunchError` when time is up, after each process has written its stacks to its log.
    """
    until = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in job):
            if any(process.poll() for process in job):
                until = min(until, time.monotonic() + 2)
            if time.monotonic() > until:
                break
            time.sleep(0.02)
    finally:
        late = stop(job)
    codes = [process.returncode for process in job]
    if late and not any(code > 0 for code in codes):
        raise LaunchError(f"not ended after {timeout:g} s: processes {late}, exit codes {codes}")
    return codes


def stop(job: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Kill those that still run, after they have dumped their stacks; their ranks."""
    late = [rank for rank, process in enumerate(job) if process.poll() is None]
    for rank in late:
        job[rank].send_signal(signal.SIGUSR1)
    if late:
        time.sleep(0.5)
    for rank in late:
        job[rank].kill()
    for process in job:
        process.wait()
    return late


def outputs(folder: Path, processes: int, tail: int = 4000) -> str:
    """The ends of the processes' outputs, one after another."""
    texts = []
    for rank in range(processes):
        text = (folder / f"rank{rank}.log").read_text(errors="replace")
        texts.append(f"--- rank {rank}\n{text[-tail:]}")
    return "\n".join(texts)


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(target: str | Path, folder: Path) -> list[str]:
    if isinstance(target, Path):
        return [sys.executable, "-X", "faulthandler", str(target), str(folder)]
    return [sys.executable, "-m", "tests.support.launch", target, str(folder)]


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        # Several processes share few cores: threads of each would fight for them.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def _result(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    """Entry of a started process: call the function, leave its result."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    target, folder = sys.argv[1], Path(sys.argv[2])
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    # A function may take the variables away, to be a plain script.
    path = folder / f"result{os.environ['RANK']}.json"
    result = function(json.loads((folder / "args.json").read_text()), folder)
    path.with_suffix(".tmp").write_text(json.dumps(result))
    path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()
