from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradtap.cli.app import app, main
from gradtap.cli.completion import params_of, runs_of, steps_of
from gradtap.cli.exits import in_verbs
from gradtap.errors import MissingExtraError, UsageError
from gradtap.query.cast import DTYPES
from gradtap.query.formats import FORMATS
from gradtap.read.histogram import SCALES
from gradtap.read.norms import STATS
from gradtap.store.runfile import create_run
from tests.server.serving import serving
from tests.support.synthetic import Job


@pytest.fixture
def runs(tmp_path: Path, store: Path) -> Path:
    """A folder of two runs: the recorded one by a link, and one without a session."""
    (tmp_path / "demo.gradtap").symlink_to(store)
    create_run(tmp_path / "other.gradtap")
    return tmp_path


def test_a_run_is_chosen_in_a_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--run and -r choose; none chosen is exit code 2 with the names, a misspelt one 4 with the nearest."""
    assert main(["info", str(runs), "--run", "demo"]) == 0
    assert str(runs / "demo.gradtap") in capsys.readouterr().out
    assert main(["info", str(runs), "-r", "other"]) == 0
    assert main(["info", str(runs)]) == 2
    assert "demo, other" in capsys.readouterr().err
    assert main(["ls", str(runs), "-r", "dmeo"]) == 4
    assert "did you mean demo" in capsys.readouterr().err


def test_the_only_run_needs_no_choice(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with one run is as good as the run; a run's own folder takes its own name alone."""
    (runs / "demo.gradtap").unlink()
    assert main(["info", str(runs)]) == 0
    assert main(["info", str(runs / "other.gradtap"), "-r", "other"]) == 0
    assert main(["info", str(runs / "other.gradtap"), "-r", "demo"]) == 4


def test_a_folder_without_runs_is_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to choose from is no readable run."""
    for words in ([str(tmp_path)], [str(tmp_path / "absent")], [str(tmp_path / "absent"), "-r", "x"]):
        assert main(["info", *words]) == 3


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """An address without a host, or of another kind of store, is a usage error."""
    assert main(["info", "http://"]) == 2
    assert main(["info", "s3://bucket/run"]) == 2


def test_hints_name_the_run_too() -> None:
    """What an error proposes can be typed as it is."""
    words = ["show", "runs", "1", "w", "--run", "a b"]
    assert in_verbs("see run.params", words) == "see `gradtap ls runs --run 'a b'`"
    assert in_verbs("see `params` of the run", ["ls", "http://h"]) == "see `gradtap ls http://h`"
    assert in_verbs("read it with partial=True", words) == "read it with `gradtap grad --partial`"
    assert in_verbs("with partial=1", words) == "with `gradtap grad --partial`"
    assert in_verbs("see run.steps", ["ls", "a\\b"]) == "see `gradtap steps 'a\\b'`"


def context(**params: object) -> typer.Context:
    """What a shell's question comes with."""
    command = typer.main.get_command(app)
    made = command.make_context("gradtap", ["ls", "x"], resilient_parsing=True)
    made.params = dict(params)
    return made  # type: ignore[return-value]


def test_names_complete_from_metadata(runs: Path, recorded: Job) -> None:
    """Runs, steps and parameters, by what has been typed of them; from a server as well."""
    with serving(runs) as server:
        for store in (str(runs), server.url):
            assert runs_of(context(store=store), "") == ["demo", "other"]
            assert runs_of(context(store=store), "o") == ["other"]
            assert steps_of(context(store=store, run="demo"), "") == ["first", "last", "1", "2", "3", "5", "6"]
            assert params_of(context(store=store, run="demo"), "mlp.") == ["mlp.weight", "mlp.bias"]


def test_completion_is_silent_about_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No store, a store that is none, a choice to be made, nobody there: nothing to offer, and not a word."""
    for complete in (runs_of, steps_of, params_of):
        for store in (None, str(tmp_path / "absent"), "http://127.0.0.1:1", "http://"):
            assert complete(context(store=store), "") == []
    assert capfd.readouterr() == ("", "")


def test_a_shell_gets_the_names(store: Path) -> None:
    """The question as bash asks it."""
    environment = {"_GRADTAP_COMPLETE": "complete_bash", "COMP_WORDS": f"gradtap show {store} 3 mlp", "COMP_CWORD": "4"}
    done = CliRunner().invoke(app, [], prog_name="gradtap", env=os.environ | environment)
    assert done.output.split() == ["mlp.weight", "mlp.bias"]


def test_serve_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said on the command line goes before the environment; the rest is the environment's."""
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(
        "gradtap_server.launch.serve", lambda stores, **options: seen.append({"stores": stores, **options})
    )
    (tmp_path / "token").write_text("sesame\n")
    monkeypatch.setenv("GRADTAP_SERVER_TOKEN", "other")
    monkeypatch.setenv("GRADTAP_SERVER_CHUNKS", "7")
    words = ["--host", "0.0.0.0", "--port", "0", "--token-file", str(tmp_path / "token"), "--root-path", "/g"]
    assert main(["serve", "a", "b", *words, "--hosts", "x,y", "--insecure-no-auth", "--log-level", "info"]) == 0
    made = seen[0]
    settings = made.pop("settings")
    assert made == {
        "stores": ["a", "b"],
        "host": "0.0.0.0",
        "port": 0,
        "root_path": "/g",
        "log_level": "info",
        "on_ready": None,
    }
    assert (settings.token, settings.chunks, settings.host_names) == ("sesame", 7, {"x", "y"})  # type: ignore[attr-defined]
    assert settings.insecure_no_auth is True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "no store to serve"),
        (["a", "--log-level", "inof"], 2, "did you mean info"),
        (["a", "--token-file", "/nowhere/token"], 3, "/nowhere/token"),
        (["/nowhere/run"], 3, "/nowhere/run"),
    ],
)
def test_serve_refuses(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it listens: no store, a misspelt level, a token that does not read, a store that is not there."""
    assert main(["serve", *words]) == code
    assert said in capsys.readouterr().err


def test_serve_says_where_it_is(store: Path) -> None:
    """With --json the address of a free port is an object on stdout; Ctrl-C ends it in order."""
    command = [sys.executable, "-m", "gradtap", "serve", str(store), "--port", "0", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout and child.stderr
    try:
        url = json.loads(child.stdout.readline())["url"]
        assert main(["info", url, "--json"]) == 0
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
        assert child.stderr.read() == ""
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()


@pytest.mark.parametrize("words", [["serve", "{}"], ["get", "{}", "runs"]])
def test_without_the_server_extra_it_is_eight(
    words: list[str], store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs a package that is not installed says which, and the command that installs it."""
    from gradtap.cli.extras import needing

    class Missing:
        """An import hook: a server without its packages."""

        def find_spec(self, name: str, *_: object) -> None:
            """None of them is there."""
            if name.split(".")[0] == "gradtap_server":
                raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    for name in [name for name in sys.modules if name.split(".")[0] == "gradtap_server"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert main([word.format(store) for word in words]) == 8
    err = capsys.readouterr().err
    assert "needs fastapi" in err and "pip install 'gradtap[server]'" in err
    with pytest.raises(MissingExtraError), needing("server", "x"):
        raise ModuleNotFoundError("no", name="uvicorn.config")
    with pytest.raises(ModuleNotFoundError), needing("server", "x"):
        raise ModuleNotFoundError("no", name="gradtap.absent")


def test_usage_errors_carry_their_facts(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt verb under --json has the near names for a program too."""
    assert main(["stesp", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["did_you_mean"][0] == "steps"
    assert issubclass(UsageError, ValueError)


def test_an_address_without_its_scheme_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    """It is no folder; what to write is said."""
    assert main(["info", "127.0.0.1:8000"]) == 2
    assert "http://127.0.0.1:8000" in capsys.readouterr().err


def test_a_misspelt_folder_is_answered_with_its_neighbours(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs beside it that are called nearly so."""
    there = next(path for path in sorted(runs.iterdir()) if (path / "run.json").is_file())
    assert main(["info", str(there.with_name(there.name[:-1]))]) == 3
    assert f"did you mean {there.name}" in capsys.readouterr().err


def test_words_of_options_are_those_that_there_are() -> None:
    """What a shell offers for --stat, --scale, --format and --dtype is what the queries take."""
    for verb, option, words in (
        ("norms", "stat", STATS),
        ("hist", "scale", SCALES),
        ("grad", "format", FORMATS),
        ("grad", "dtype", DTYPES),
    ):
        command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
        (found,) = [param for param in command.params if param.name == option]
        offered = found.shell_complete(typer.Context(command), "")
        assert sorted(item.value for item in offered) == sorted(words), verb


def test_a_line_that_does_not_parse_yet_completes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `--run` nothing is parsed; the store is found among the words."""
    monkeypatch.setenv("COMP_WORDS", f"gradtap norms {runs} --run ")
    context = typer.Context(typer.main.get_command(app))
    assert runs_of(context, "") != []
