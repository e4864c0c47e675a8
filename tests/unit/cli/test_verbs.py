from __future__ import annotations

import csv
import io
import json
import re
from importlib import import_module
from typing import Any

import pytest

from gradtap.cli.app import main
from gradtap.cli.exits import in_verbs
from gradtap.errors import NotARunError
from gradtap.read.verify import Damage, VerifyReport
from tests.unit.cli.fake_run import PARAMS, FakeRun, session


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """A run in memory that every verb opens instead of a folder."""
    fake = FakeRun()
    monkeypatch.setattr("gradtap.read.open", lambda path: fake)
    return fake


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON object that a command line prints."""
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    body: dict[str, Any] = json.loads(out)
    assert body["schema"] == f"gradtap.{words[0].replace('ls', 'params')}/1"
    return body


def test_info_counts_what_there_is(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """`info` names state, engine, steps with the gap, parameters by status, dtypes and sizes."""
    body = answer(capsys, "info", "x")
    assert (body["state"], body["engine"], body["world"], body["format"]) == ("closed", "deepspeed-zero2", 2, 1)
    assert body["steps"] == {"first": 1, "last": 5, "count": 4, "gaps": [4]}
    assert body["parameters"] == {
        "total": 4, "stored": 3, "frozen": 1, "unoptimized": 0, "not_selected": 0, "empty": 0, "elements": 23,
        "dtypes": {"bfloat16": 1, "float32": 2},
    }  # fmt: skip
    assert (body["raw_bytes"], body["stored_bytes"], body["ratio"]) == (3000, 1500, 2.0)
    assert [s["name"] for s in body["sessions"]] == ["0000"]


def test_info_fits_one_screen(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The form for eyes is short and says the same."""
    assert main(["info", "x"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert "1 to 5, 4 complete" in out
    assert "1 due but not complete: 4" in out
    assert "ratio 2.00" in out


def test_info_of_a_run_without_steps(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that has just begun has no first step and no ratio, and is not an error."""
    run.steps = ()
    run.sessions = (session(state="live", closed=None, captures=0),)
    body = answer(capsys, "info", "x")
    assert body["steps"] == {"first": None, "last": None, "count": 0, "gaps": []}
    assert body["ratio"] is None
    assert main(["info", "x"]) == 0
    assert "none complete yet" in capsys.readouterr().out


def test_ls_lists_in_model_order(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` has one row a parameter in model order, with pieces, chunk and the norm of the last step."""
    body = answer(capsys, "ls", "x")
    assert body["step"] == 5
    assert [row["name"] for row in body["parameters"]] == [p.name for p in PARAMS]
    assert [row["arrays"] for row in body["parameters"]] == [2, 1, 0, 1]
    assert [row["norm"] for row in body["parameters"]] == [1.0, 2.0, None, 3.0]
    assert body["parameters"][0]["chunk"] == [5]
    assert body["parameters"][2]["status"] == "frozen"


def test_what_is_not_selected_is_no_capture(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter that the selection leaves out has that status and no norm, and is not counted as stored."""
    run.out = frozenset({"embed.weight"})
    row = answer(capsys, "ls", "x")["parameters"][0]
    assert (row["status"], row["norm"]) == ("not selected", None)
    counted = answer(capsys, "info", "x")["parameters"]
    assert (counted["stored"], counted["not_selected"], counted["elements"]) == (2, 1, 11)
    assert main(["info", "x"]) == 0
    assert "2 stored, 1 not selected" in capsys.readouterr().out


def test_listings_fold_nothing_where_it_is_narrow(
    run: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow terminal loses columns in order, and no name is cut or folded; piped lines end without blanks."""
    heads = []
    for width in ("80", "56", "10"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(["ls", "x"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[3:]] == [p.name for p in PARAMS]
        assert all(line == line.rstrip() for line in lines)
        heads.append(lines[1].split())
    assert heads[0] == ["name", "shape", "dtype", "arrays", "chunk", "norm", "status"]
    assert heads[1] == ["name", "shape", "dtype", "chunk", "norm", "status"]
    assert heads[2] == ["name", "shape", "norm", "status"]
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["steps", "x"]) == 0
    assert re.search(r"  \d\d:\d\d:\d\d  ", capsys.readouterr().out)


def test_info_lists_sessions_when_there_are_more(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sessions are a table, with first step and captures of each."""
    run.sessions = (session(), session(name="0001", first_step=4, captures=7))
    assert main(["info", "x"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0001", "closed", "deepspeed-zero2", "2", "4", "7"] in [line[:6] for line in lines]


def test_errors_name_verbs_not_python(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """What an error calls by its Python name is a verb with the store on the command line."""
    assert in_verbs("see run.params", ["show", "a b", "1", "w"]) == "see `gradtap ls 'a b'`"
    assert in_verbs("See run.steps", ["--json"]) == "See `gradtap steps STORE`"


def test_show_of_an_attempt(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """`--attempt` reaches the reader."""
    assert answer(capsys, "show", "x", "2", "temperature", "--attempt", "2")["attempt"] == 2


def test_a_range_of_nothing_says_so(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A range without a step is no error, and a word on stderr."""
    assert main(["steps", "x", "--steps", "90:"]) == 0
    assert "selects no step; the run has steps 1 to 5" in capsys.readouterr().err


@pytest.mark.parametrize(("pattern", "count"), [("layers", 2), ("*.weight", 2), ("weight", 2), ("temp*", 1)])
def test_ls_takes_a_part_or_a_pattern(
    run: FakeRun, capsys: pytest.CaptureFixture[str], pattern: str, count: int
) -> None:
    """A pattern is part of a name, or with wildcards the whole of it."""
    assert len(answer(capsys, "ls", "x", pattern)["parameters"]) == count


def test_ls_without_a_match_names_the_nearest(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """No match is exit code 4 with near names."""
    assert main(["ls", "x", "embed.wieght"]) == 4
    assert "did you mean embed.weight" in capsys.readouterr().err


def test_ls_at_an_unknown_step(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The norms of a step that is not there are exit code 4, not blanks."""
    assert main(["ls", "x", "--step", "4"]) == 4
    assert capsys.readouterr() == ("", "gradtap: no step 4; the nearest are 3 and 5\n")


def test_ls_prints_names_as_they_are(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that looks like markup is printed, not interpreted."""
    run.params = (PARAMS[0], *PARAMS[1:3])
    object.__setattr__(run.params[2], "name", "[bold]x[/bold]")
    try:
        assert main(["ls", "x"]) == 0
        assert "[bold]x[/bold]" in capsys.readouterr().out
    finally:
        object.__setattr__(PARAMS[2], "name", "layers.0.frozen")


def test_steps_tell_complete_from_dropped(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """`steps` shows every step of the ledger, and which are not complete and why."""
    body = answer(capsys, "steps", "x")
    assert [row["step"] for row in body["steps"]] == [1, 2, 3, 4, 5]
    assert [row["complete"] for row in body["steps"]] == [True, True, True, False, True]
    assert [row["attempt"] for row in body["steps"]] == [1, 2, 1, None, 1]
    assert body["steps"][3]["record"] == "dropped"
    assert body["steps"][4]["flags"] == ["inexact-unscale", "untouched"]
    assert body["nonfinite"] == {"nan": 1, "posinf": 0, "neginf": 0}


def test_steps_for_eyes(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the reason of an incomplete step."""
    assert main(["steps", "x"]) == 0
    out = capsys.readouterr().out
    assert "no (dropped)" in out
    assert "skipped-overflow" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", [1, 2, 3, 4, 5]), ("2:4", [2, 3]), ("1::2", [1, 3, 5]), (":3", [1, 2]), ("4", [4]), ("3:", [3, 4, 5])],
)
def test_steps_in_a_range(run: FakeRun, capsys: pytest.CaptureFixture[str], text: str, expected: list[int]) -> None:
    """`--steps a:b:c` takes steps from a up to, not including, b, every c-th."""
    assert [row["step"] for row in answer(capsys, "steps", "x", "--steps", text)["steps"]] == expected


@pytest.mark.parametrize("text", ["a", "1:2:3:4", "1:2:0", "1:2:-1", "1.5"])
def test_a_bad_range_is_refused(run: FakeRun, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Anything that is not a range names the value and an example, before a store is opened."""
    assert main(["steps", "x", "--steps", text]) == 2
    assert "100:200:10" in capsys.readouterr().err


def test_steps_as_csv(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """`--csv` is read back by any CSV reader."""
    assert main(["steps", "x", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[4]["flags"] == "inexact-unscale untouched"


def test_show_gives_header_summary_values_and_histogram(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` has the facts, exact statistics, the first values in C order and counts by sign and power of two."""
    body = answer(capsys, "show", "x", "3", "layers.0.weight")
    assert (body["shape"], body["dtype"], body["dtype_captured"], body["step"]) == ([2, 5], "float32", "float32", 3)
    assert body["values"] == [0, -1, 2, -3, 4, -5, 6, -7]
    assert (body["values_shown"], body["values_total"]) == (8, 10)
    assert body["summary"]["l1"] == 45.0
    assert body["summary"]["zeros"] == 1
    assert body["histogram"] == {
        "negative": {"3": 1, "2": 2, "1": 1, "0": 1}, "zero": 1, "positive": {"1": 1, "2": 2, "3": 1}
    }  # fmt: skip
    assert body["flags"] == ["untouched"]


def test_show_for_eyes(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The form for eyes names the flags and a factor that is not 1, and draws the histogram."""
    assert main(["show", "x", "last", "embed.weight"]) == 0
    out = capsys.readouterr().out
    assert "captured as bfloat16" in out
    assert "untouched" in out
    assert "not applied here" in out
    assert "4 more" in out
    assert "a row for each power of two" in out


@pytest.mark.parametrize(
    ("slice", "shape", "values"), [("1,::2", [3], [-5, -7, -9]), ("0,0", [], [0]), ("0:0", [0, 5], [])]
)
def test_show_of_a_slice(
    run: FakeRun, capsys: pytest.CaptureFixture[str], slice: str, shape: list[int], values: list[float]
) -> None:
    """`--slice` has NumPy's grammar, down to one element and to none."""
    body = answer(capsys, "show", "x", "1", "layers.0.weight", "--slice", slice)
    assert (body["shape"], body["values"]) == (shape, [abs(v) if v == 0 else v for v in values] if values else [])
    assert main(["show", "x", "1", "layers.0.weight", "--slice", slice]) == 0


@pytest.mark.parametrize(("word", "step"), [("first", 1), ("last", 5), ("2", 2)])
def test_show_takes_first_and_last(run: FakeRun, capsys: pytest.CaptureFixture[str], word: str, step: int) -> None:
    """STEP is a number, or the first or last complete step."""
    assert answer(capsys, "show", "x", word, "temperature")["step"] == step


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "x", "1", "embed.wieght"], 4, "did you mean embed.weight"),
        (["show", "x", "4", "embed.weight"], 4, "the nearest are 3 and 5"),
        (["show", "x", "latest", "embed.weight"], 2, "'latest'"),
        (["show", "x", "1", "embed.weight", "--slice", "9,9"], 2, "(3, 4)"),
        (["show", "x", "1", "embed.weight", "--json", "--csv"], 2, "exclude each other"),
    ],
)
def test_show_refuses(run: FakeRun, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str) -> None:
    """Unknown names, unknown steps, bad words and bad slices have their codes and say what would do."""
    assert main(words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_last_step_of_an_empty_run(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without steps has no last one: exit code 4."""
    run.steps = ()
    run.sessions = (session(state="live", closed=None, captures=0),)
    assert main(["show", "x", "last", "temperature"]) == 4
    assert "no complete step yet" in capsys.readouterr().err
    run.sessions = (session(captures=0),)
    assert main(["show", "x", "last", "temperature"]) == 4
    assert "no complete step, so" in capsys.readouterr().err


def test_a_store_that_is_no_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb that opens a store ends with 3 where there is none."""

    def refuse(path: str) -> None:
        raise NotARunError(f"{path} holds no run")

    monkeypatch.setattr("gradtap.read.open", refuse)
    for words in (["info"], ["ls"], ["steps"], ["show", "1", "w"]):
        assert main([words[0], "nowhere", *words[1:]]) == 3
        assert "nowhere holds no run" in capsys.readouterr().err


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`demo` hands its options to the launcher and leaves with the launcher's code."""
    seen: list[Any] = []

    def launched(options: Any) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr("gradtap.demo.launch.run_demo", launched)
    words = ["--store", "s", "--steps", "7", "--processes", "1", "--stage", "1", "--engine", "ddp", "--seed", "3"]
    assert main(["demo", *words, "--json"]) == 1
    options = seen[0]
    assert (options.store, options.steps, options.processes, options.stage) == ("s", 7, 1, 1)
    assert (options.engine, options.seed, options.json) == ("ddp", 3, True)
    assert main(["demo", "--engine", "jax"]) == 2


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Damage]:
    """What `verify` will find; a test adds to it."""
    found: list[Damage] = []

    def check(path: str, deep: bool, progress: Any) -> VerifyReport:
        progress(1, 2)
        note = Damage(file="lock", param=None, step=None, what="left behind", cure="nothing to do")
        return VerifyReport(
            path=path, deep=deep, findings=tuple(found), notes=(note,), checked={"sessions": 1, "chunks": 9}
        )

    # The package's attribute of this name is the function, so the module is taken from where imports look.
    monkeypatch.setattr(import_module("gradtap.read.verify"), "verify", check)
    return found


DAMAGE = Damage(file="sessions/0000/x/c.0", param="w", step=7, what="expected 1, found 2", cure="restore it")


def test_verify_of_a_sound_run(checked: list[Damage], capsys: pytest.CaptureFixture[str]) -> None:
    """No finding is exit code 0, what was checked is counted, and notes are no damage."""
    body = answer(capsys, "verify", "x")
    assert (body["sound"], body["findings"], body["checked"]) == (True, [], {"sessions": 1, "chunks": 9})
    assert body["notes"][0]["what"] == "left behind"
    assert main(["verify", "x"]) == 0
    out, err = capsys.readouterr()
    assert "sound as far as looked at: 1 session, 9 chunks in place" in out
    assert "(--deep reads and decodes it)" in out
    assert err == ""


@pytest.mark.parametrize("flags", [[], ["--deep"]])
def test_verify_of_damage(checked: list[Damage], capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    """Damage is exit code 5, with file, parameter, step and cure."""
    checked.append(DAMAGE)
    assert main(["verify", "x", *flags]) == 5
    out = capsys.readouterr().out
    for part in (
        "1 finding;",
        "sessions/0000/x/c.0",
        "parameter w",
        "step 7",
        "expected 1, found 2",
        "cure: restore it",
    ):
        assert part in out
    assert main(["verify", "x", *flags, "--json"]) == 5
    body = json.loads(capsys.readouterr().out)
    assert body["deep"] is bool(flags)
    assert body["findings"] == [
        {"file": DAMAGE.file, "param": "w", "step": 7, "what": DAMAGE.what, "cure": "restore it"}
    ]
