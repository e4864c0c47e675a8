"""The parent of `gradtap run`: starts the command with gradtap's start-up hook, waits, and says what was recorded.

The command keeps its own standard streams. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradtap.config import Settings
from gradtap.errors import CaptureError, UsageError
from gradtap.options import check_options
from gradtap.runner.orders import VARIABLE, Orders, heard

SITE = Path(__file__).parent / "site"
PASSED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WAYS = "Accelerate (prepare of a model and its optimizer), HF Trainer (train) or Lightning (fit)"


def run_command(command: Sequence[str], store: str, options: Mapping[str, Any]) -> int:
    """Run `command`, recording its training into `store`; its exit code, 128 + N where signal N ended it.

    options: of `gradtap.attach`, JSON values. Raises `UsageError` for a wrong option or a command that is not there,
    `CaptureError` (exit code 10) where nothing was recorded though the command ended well, or because gradtap refused.
    """
    checked = check_options(
        store,
        **{"select": None, "every": 1, "codec": "exact", "summary": "full", "on_full": "wait", "on_error": "warn"}
        | {"budget": None, "keep": 0, "micro": False, "first_step": None}
        | dict(options),
    )
    Settings.from_environment()
    program = _program(command)
    with tempfile.TemporaryDirectory(prefix="gradtap-run-") as folder:
        orders = Orders(store=str(checked.store), work=folder, options=dict(options))
        code = _wait(_started([program, *command[1:]], environment(orders)))
        return _judge(heard(Path(folder)), code)


def environment(orders: Orders) -> dict[str, str]:
    """The command's environment: this one, gradtap's start-up hook first on PYTHONPATH, and the orders."""
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, VARIABLE: orders.dump()}


def _program(command: Sequence[str]) -> str:
    if not command:
        raise UsageError("no command to run; give it after --, such as `-- accelerate launch train.py`")
    found = shutil.which(command[0])
    if found is None:
        raise UsageError(f"there is no program {command[0]!r} on PATH; the command after -- is started as it is")
    return found


def _started(words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(words, env=environment)
    except OSError as error:
        raise UsageError(f"cannot start {words[0]}: {error.strerror}; it must be a program") from error


def _wait(child: subprocess.Popen[bytes]) -> int:
    with _passing_signals(child):
        code = child.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _passing_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """What a supervisor sends to this process goes to the command. A terminal's Ctrl-C reaches both by itself."""

    def hand_on(number: int, frame: object) -> None:
        if number != signal.SIGINT or not _in_foreground():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (*PASSED, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _judge(events: list[dict[str, Any]], code: int) -> int:
    """The command's exit code. Raises `CaptureError` where nothing was recorded and the command did not fail itself."""
    kinds = {event["event"] for event in events}
    if "attached" in kinds:
        return code
    reason = _reason(events, kinds)
    if code == 0 or "refused" in kinds:
        raise CaptureError(f"nothing was recorded: {reason}")
    sys.stderr.write(f"gradtap: the command ended with exit code {code}, and nothing was recorded: {reason}\n")
    return code


def _reason(events: list[dict[str, Any]], kinds: set[str]) -> str:
    def first(kind: str) -> dict[str, Any]:
        return next(event for event in events if event["event"] == kind)

    if "refused" in kinds:
        return f"{first('refused')['model']}: {first('refused')['error']}"
    if "missing" in kinds:
        event = first("missing")
        return f"{event['python']} has no gradtap ({event['error']}); install gradtap there, and run its own `gradtap`"
    if "prepared" in kinds:
        return f"Accelerate prepared {first('prepared')['model']}, which then was not called in training mode"
    if "imported" in kinds:
        return (
            f"no process trained through {WAYS}, which is what `gradtap run` records; for any other loop call "
            "gradtap.attach in the script"
        )
    return (
        f"no Python process of the command imported one of {WAYS}; for any other loop call gradtap.attach in the "
        "script. (python -I, -E and -S keep gradtap's start-up hook out.)"
    )
