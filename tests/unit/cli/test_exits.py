from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from gradtap.cli.app import main
from gradtap.cli.exits import OUTPUT_CLOSED, guarded
from gradtap.errors import PROBLEMS, GradtapError
from gradtap.store.runfile import create_run
from tests.support.synthetic import Job, spec


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


def test_an_error_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in a message, which may be a server's, are shown and not obeyed."""
    assert guarded(raising(GradtapError("a\x1b[2J\x07b\nc\x9bd")), []) == 1
    assert capsys.readouterr().err == "gradtap: a\\x1b[2J\\x07b\nc\\x9bd\n"


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
        "from gradtap.cli.output import Listing, emit\n"
        "from gradtap.query.answer import Answer\n"
        "rows = [['x' * 60] for i in range(3000)]\n"
        "picture = Listing(columns={'a': 'left'}, rows=rows)\n"
        "answer = Answer(query='x', rows=[{'a': 1}] * 30000, rows_name='r')\n"
        "sys.exit(guarded(lambda: emit(answer, sys.argv[1], pictures=[picture]), []))\n"
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
    assert (
        "demo, info, ls, steps, show, grad, norms, hist, audit, verify, watch, serve, get, doctor"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [["ls"], ["ls", "x", "--nonsense"], ["show", "x", "1"], ["ls", "x", "--step"]])
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


def shell(line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `$G` is gradtap; the exit code is that of the first command of a pipe."""
    command = f"{sys.executable} -m gradtap"
    environment = os.environ | {"G": command} | more
    return subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        errors="surrogateescape",
    )


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run whose parameters have names that few encodings hold, one of them no encoding at all."""
    params = (spec("w\u00e9ights.\U0001f600", 3), spec("lone.\udcff", 4))
    job = Job(run=tmp_path_factory.mktemp("strange") / "r.gradtap", params=params, world=1, kind="whole").steps([1, 2])
    job.close()
    return job.run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", ["info {}", "ls {} --json", "verify {} --json", "--help"])
def test_an_output_that_is_full_is_one_line(words: str, strange: Path) -> None:
    """A full disk behind stdout ends with one line on stderr, a code other than 0, and no traceback."""
    done = shell(f"$G {words.format(strange)} > /dev/full")
    assert done.returncode == OUTPUT_CLOSED
    assert "cannot write to standard output" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_output_that_is_closed_is_one_line(strange: Path) -> None:
    """Without a stdout there is one line on stderr; without a stderr too, the code alone."""
    done = shell(f"$G info {strange} >&-")
    assert done.returncode == OUTPUT_CLOSED
    assert done.stderr == "gradtap: standard output is closed, so there is nowhere to write the answer to\n"
    assert shell(f"$G info {strange} >&- 2>&-").returncode == OUTPUT_CLOSED


@pytest.mark.parametrize(
    "words", ["ls {}", "ls {} --csv", "info {}", "show {} 1 lone.w", "steps {}", "ls {} nothing-like-it"]
)
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_an_encoding_lacks_are_escaped(words: str, encoding: str, strange: Path) -> None:
    """No name ends a verb, whatever the terminal's encoding."""
    done = shell(f"$G {words.format(strange)}", LC_ALL="C", PYTHONIOENCODING=encoding)
    assert "Traceback" not in done.stderr
    assert done.returncode == (4 if "nothing" in words or "show" in words else 0), done.stderr
    if words == "ls {}":
        assert "lone.\\udcff" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_stays_json_in_any_encoding(encoding: str, strange: Path) -> None:
    """Names come back from JSON as they were."""
    done = shell(f"$G ls {strange} --json", LC_ALL="C", PYTHONIOENCODING=encoding)
    names = [row["name"] for row in json.loads(done.stdout)["parameters"]]
    assert names == ["w\u00e9ights.\U0001f600", "lone.\udcff"]


def test_a_reader_that_takes_one_byte(tmp_path: Path) -> None:
    """A large answer into `head -c 1` ends with 128 + SIGPIPE and says nothing."""
    params = tuple(spec(f"layers.{i}.{'x' * 100}.weight", 1) for i in range(1000))
    job = Job(run=tmp_path / "r", params=params, world=1, kind="whole").steps([1])
    job.close()
    done = shell(f"$G ls {job.run} | head -c 1")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("verb", ["info", "ls", "steps", "verify"])
def test_a_file_is_no_run(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file where a folder belongs is exit code 3 with a word on what to give."""
    file = tmp_path / "passwd"
    file.write_text("x")
    assert main([verb, str(file)]) == 3
    assert "is a file" in capsys.readouterr().err


def test_ls_before_the_first_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without sessions has nothing to list, and `ls` says why."""
    create_run(tmp_path / "r")
    assert main(["ls", str(tmp_path / "r")]) == 0
    assert "no session yet" in capsys.readouterr().out
