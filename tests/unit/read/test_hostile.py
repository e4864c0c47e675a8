from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradtap
from gradtap.read import open_run, verify
from gradtap.read.session import Session

SESSION = "sessions/0000/session.json"


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("name", ["../0000", "..", "/etc", "12", "0000/../0000", "\u0660" * 4, "0000\n", ""])
def test_session_names(copy: Path, name: str) -> None:
    """A session name that is not four digits or more never becomes a path."""
    edit(copy / "run.json", lambda d: d.update(sessions=[name]))
    with pytest.raises(gradtap.DamagedError):
        open_run(copy)
    with pytest.raises(gradtap.DamagedError):
        Session(copy, name)
    assert not verify(copy).sound


def array(key: str, value: Any) -> Callable[[Any], None]:
    """Set a field of the first array of the plan."""
    return lambda d: d["plan"]["arrays"][0].update({key: value})


@pytest.mark.parametrize(
    "change",
    [
        array("name", "../../../etc/passwd"),
        array("name", "_step"),
        array("name", ""),
        array("time", 2**40),
        array("time", 0),
        array("time", -4),
        array("shape", [2**62]),
        array("chunk", [2**40]),
        array("chunk", [0]),
        array("owners", [[7, 1]]),
        array("owners", [[-1, 1]]),
        array("param", 99),
        array("param", "x"),
        array("start", 5),
        array("dtype", "object"),
        lambda d: d["plan"].pop("params"),
        lambda d: d["plan"].update(world=0),
        lambda d: d["plan"].update(world="many"),
        lambda d: d["plan"].update(arrays=d["plan"]["arrays"][1:]),
        lambda d: d.update(plan=[]),
        lambda d: d.update(codec="rot13"),
        lambda d: d.update(created="yesterday"),
        lambda d: d.pop("nonce"),
        lambda d: d.clear(),
    ],
)
def test_session_files(copy: Path, change: Callable[[Any], object]) -> None:
    """Whatever a session file says, reading answers with an error of gradtap's, at once and without a great deal of
    memory, and `verify` reports.
    """
    edit(copy / SESSION, change)
    with pytest.raises(gradtap.GradtapError):
        open_run(copy).grad("embed.weight", 3)
    assert not verify(copy).sound


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\x00", '{"format": 1e400}', "[" * 100_000])
@pytest.mark.parametrize("file", ["run.json", SESSION])
def test_json_that_is_none(copy: Path, file: str, text: str) -> None:
    """Head files of any content end in an error of gradtap's."""
    (copy / file).write_text(text)
    with pytest.raises(gradtap.StoreError):
        open_run(copy)


@pytest.mark.parametrize("file", ["sessions/0000/journal/r00000", "sessions/0000/schedule.log"])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 127, 128, 200])
def test_short_files(copy: Path, file: str, size: int) -> None:
    """Journals and logs cut at any length end in an error of gradtap's, or in less to read, never in wrong numbers."""
    os.truncate(copy / file, size)
    run = open_run(copy)
    try:
        run.grad("embed.weight", 3)
    except gradtap.GradtapError:
        pass
    else:
        assert "schedule" in file
    if "journal" in file:
        assert not verify(copy).sound


def test_newer_format(copy: Path) -> None:
    """A run of a newer format is refused with what to install."""
    edit(copy / "run.json", lambda d: d.update(format=2))
    with pytest.raises(gradtap.FormatVersionError, match="pip install"):
        open_run(copy)


def test_a_replaced_run_file_is_seen(copy: Path) -> None:
    """An open run follows its run.json: an error that appears there appears, and goes again."""
    run = open_run(copy)
    whole = (copy / "run.json").read_text()
    assert len(run.steps) == 9
    edit(copy / "run.json", lambda d: d.update(sessions=[]))
    assert run.steps == ()
    assert run.params == ()
    with pytest.raises(gradtap.ParamNotFoundError, match="no session"):
        run.grad("mlp.bias", 1)
    (copy / "run.json").write_text("{")
    with pytest.raises(gradtap.DamagedError):
        _ = run.steps
    (copy / "run.json").write_text(whole)
    assert len(run.steps) == 9
