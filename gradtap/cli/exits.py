"""How a verb ends: every error becomes one message on stderr and one exit code.

The codes come from the table in `gradtap.errors`; this file adds only what is no gradtap error
(a usage error of the parser, an interrupt, a reader that closed the pipe). A bug keeps its traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

import typer

from gradtap.errors import PROBLEMS, GradtapError, Problem, UsageError, problem_of

DAMAGED = 5
"""Stored bytes are not what was committed."""

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

OUTPUT_CLOSED = 141
"""128 + SIGPIPE, as shells report a writer whose reader left."""


def guarded(run: Callable[[], object], arguments: Sequence[str]) -> int:
    """Run `run` and give the process's exit code. `arguments` are the user's words: they say how to print errors."""
    try:
        run()
        sys.stdout.flush()
        return 0
    except typer.Exit as leave:
        return _flushed(leave.exit_code)
    except GradtapError as error:
        return _report(problem_of(error), str(error), arguments)
    except typer.TyperException as error:
        return _report(PROBLEMS[UsageError], error.format_message(), arguments)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        return _closed()


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed()
    return code


def _closed() -> int:
    # The interpreter flushes stdout once more at exit; without this that would print a second error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OUTPUT_CLOSED


def _report(problem: Problem, detail: str, arguments: Sequence[str]) -> int:
    if "--json" in arguments or "--jsonl" in arguments:
        body = {
            "schema": "gradtap.problem/1",
            "type": f"/problems/{problem.slug}",
            "title": problem.slug.replace("-", " "),
            "status": problem.status,
            "exit_code": problem.exit_code,
            "detail": detail,
        }
        sys.stderr.write(json.dumps(body) + "\n")
    elif detail:
        sys.stderr.write(f"gradtap: {detail}\n")
    return problem.exit_code
