"""How a verb ends: every error becomes one message on stderr and one exit code.

The codes come from the table in `gradtap.errors`; this file adds only what is no gradtap error
(a usage error of the parser, an interrupt, a reader that closed the pipe). A bug keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence

import typer

from gradtap.cli.output import visible
from gradtap.errors import GradtapError, UsageError, problem_body, problem_of
from gradtap.query.answer import plain

DAMAGED = 5
"""Stored bytes are not what was committed."""

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

OUTPUT_CLOSED = 141
"""128 + SIGPIPE, as shells report a writer whose reader left; also for an output that takes no more."""

VERBS = {
    "run.params": "ls",
    "run.steps": "steps",
    "run.sessions": "info",
    "`params` of the run": "ls",
    "`steps` of the run": "steps",
    "`sessions` of the run": "info",
}
"""What shows on the command line what an error's text calls by its name in Python, or at a server."""

OUTPUT_ERRORS = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a write to an output ends with that is closed, full or gone."""


def guarded(run: Callable[[], object], arguments: Sequence[str]) -> int:
    """Run `run` and give the process's exit code. `arguments` are the user's words: they say how to print errors."""
    if sys.stdout is None:
        _say("gradtap: standard output is closed, so there is nowhere to write the answer to")
        return OUTPUT_CLOSED
    try:
        run()
        sys.stdout.flush()
        return 0
    except typer.Exit as leave:
        return _flushed(leave.exit_code)
    except GradtapError as error:
        return _report(error, in_verbs(str(error), arguments), arguments)
    except typer.TyperException as error:
        return _report(UsageError(error.format_message()), error.format_message(), arguments)
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    except OSError as error:
        if not _of_output(error):
            raise
        return _closed(error)


def escaping_streams() -> None:
    """Have stdout and stderr escape what their encoding lacks: a name of any bytes must not end a verb."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def in_verbs(text: str, arguments: Sequence[str]) -> str:
    """An error's text with the verbs that show what its Python names would."""
    store = shlex.quote(arguments[1]) if len(arguments) > 1 and not arguments[1].startswith("-") else "STORE"
    for flag, name in itertools.pairwise(arguments):
        if flag in ("--run", "-r"):
            store += f" --run {shlex.quote(name)}"
    for name, verb in VERBS.items():
        shown = f"`gradtap {verb} {store}`"
        text = re.sub(rf"(?<![\w.`]){re.escape(name)}(?![\w(])", shown.replace("\\", r"\\"), text)
    return re.sub(r"\bpartial=(True|1)\b", "`gradtap grad --partial`", text)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        return _closed(error)
    return code


def _of_output(error: OSError) -> bool:
    # What gradtap reads and writes by itself becomes a StoreError, which names the file.
    return error.filename is None and error.errno in OUTPUT_ERRORS


def _closed(error: OSError) -> int:
    # The interpreter flushes stdout once more at exit; without this that would print a second error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        _say(f"gradtap: cannot write to standard output: {error.strerror}; the answer is not whole")
    return OUTPUT_CLOSED


def _say(text: str) -> None:
    # Where stderr is lost too, the exit code alone has to do.
    with contextlib.suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(visible(text) + "\n")


def _report(error: GradtapError, detail: str, arguments: Sequence[str]) -> int:
    # What follows -- is another program's.
    own = set(itertools.takewhile(lambda word: word != "--", arguments))
    if own & {"--json", "--jsonl"}:
        _say(json.dumps(problem_body(error, detail=detail, facts=plain(error.facts))))
    elif detail:
        # The help that answers no words at all is no message of an error.
        _say(detail if detail.startswith("Usage: ") else f"gradtap: {detail}")
    return problem_of(error).exit_code
