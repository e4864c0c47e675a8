from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import typer

from gradtap.cli.app import main
from gradtap.cli.exits import guarded
from gradtap.errors import PROBLEMS, GradtapError


def raising(error: BaseException) -> Any:
    """A verb that ends with an error."""

    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize("kind", list(PROBLEMS), ids=lambda kind: kind.__name__)
def test_each_error_has_its_code_and_says_its_message(
    kind: type[GradtapError], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row of the table becomes its exit code, with the message on stderr and nothing on stdout."""
    assert guarded(raising(kind("what to do")), []) == PROBLEMS[kind].exit_code
    assert capsys.readouterr() == ("", "gradtap: what to do\n")


def test_an_error_under_json_is_a_problem_object(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json` the error is one problem object on stderr."""
    for kind, problem in PROBLEMS.items():
        guarded(raising(kind("why")), ["ls", "x", "--json"])
        out, err = capsys.readouterr()
        body = json.loads(err)
        assert out == ""
        assert (body["status"], body["exit_code"], body["detail"]) == (problem.status, problem.exit_code, "why")
        assert body["type"] == f"/problems/{problem.slug}"


def test_interrupt_is_130() -> None:
    """Ctrl-C ends with 128 + SIGINT."""
    assert guarded(raising(KeyboardInterrupt()), []) == 130


def test_a_verb_may_leave_with_its_own_code() -> None:
    """A check that found something leaves with 1 without an error message."""
    assert guarded(raising(typer.Exit(1)), []) == 1


def test_a_bug_keeps_its_traceback() -> None:
    """An exception that is no user's fault is not turned into a message."""
    with pytest.raises(ZeroDivisionError):
        guarded(raising(ZeroDivisionError()), [])


def test_closed_output_is_141() -> None:
    """A reader that leaves early ends the command with 128 + SIGPIPE, and without a traceback."""
    script = (
        "import sys\n"
        "from gradtap.cli.exits import guarded\n"
        "from gradtap.cli.output import Answer, emit, table\n"
        "rows = [['x' * 60] for i in range(3000)]\n"
        "answer = Answer(verb='x', rows=[{'a': 1}] * 30000, rows_name='r', pictures=[table({'a': 'left'}, rows)])\n"
        "sys.exit(guarded(lambda: emit(answer, sys.argv[1]), []))\n"
    )
    for form in ("table", "jsonl"):
        child = subprocess.Popen(
            [sys.executable, "-c", script, form], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stdout and child.stderr
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == ""
        child.stderr.close()
        assert child.wait(timeout=60) == 141


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt verb is a usage error that offers what was meant."""
    assert main(["verfy", "runs/x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "'verfy'" in err
    assert "did you mean verify" in err


def test_a_far_verb_gets_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """A word like no verb is answered with all of them."""
    assert main(["qqqq"]) == 2
    assert "demo, info, ls, steps, show, verify" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ls"], ["ls", "x", "--nonsense"], ["show", "x", "1"], ["ls", "x", "--step", "y"]])
def test_wrong_words_are_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Missing arguments, unknown options and values that do not parse end with 2 and a message."""
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("gradtap: ")


def test_usage_error_under_json_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """The parser's own errors take the same form."""
    assert main(["ls", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["title"] == "usage"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version`, `--help` and `-h` end with 0; help names every verb and the exit codes."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gradtap 0.")
    for flag in ("--help", "-h"):
        assert main([flag]) == 0
        text = capsys.readouterr().out
        assert all(verb in text for verb in ("demo", "info", "ls", "show", "steps", "verify", "Exit codes"))


def test_no_words_show_the_help() -> None:
    """`gradtap` alone is a usage error that shows the help."""
    assert main([]) == 2
