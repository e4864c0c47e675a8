"""What a caller may hand in, and what is said of a run whose head files are gone or wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from gradtap.errors import DamagedError, GradtapError, NotARunError, UsageError
from gradtap.read import verify
from tests.support.synthetic import Job


@pytest.mark.parametrize("path", [None, b"x", "a\0b", 3, ""])
@pytest.mark.parametrize("way", [gradtap.open, verify])
def test_no_path(path: Any, way: Callable[[Any], object]) -> None:
    """What is no path is a usage error that shows it."""
    with pytest.raises(UsageError, match="the path of a run is"):
        way(path)


@pytest.mark.parametrize("way", [gradtap.open, verify])
def test_a_file(tmp_path: Path, way: Callable[[Any], object]) -> None:
    """A file, and a path below a file, are no runs."""
    file = tmp_path / "passwd"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(NotARunError):
            way(path)


def test_arguments_of_a_wrong_type(closed: Job) -> None:
    """Names, attempts and columns of a wrong type are usage errors."""
    run = gradtap.open(closed.run)
    calls: list[Callable[[], object]] = [
        lambda: run.grad("mlp.bias", 1, attempt="1"),  # type: ignore[arg-type]
        lambda: run.grad("mlp.bias", 1, attempt=1.0),  # type: ignore[arg-type]
        lambda: run.grad(["mlp.bias"], 1),  # type: ignore[arg-type]
        lambda: run.ledger[1],  # type: ignore[index]
        lambda: run.ledger.row("1"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    assert np.asarray(run.grad("mlp.bias", 1, attempt=np.int64(1))).shape == (29,)


def test_another_working_folder(closed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run opened by a relative path is still read after a change of folder, and shows the path as given."""
    monkeypatch.chdir(closed.run.parent)
    run = gradtap.open(closed.run.name)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(np.asarray(run.grad("mlp.bias", 3)), closed.expected("mlp.bias", 3))
    assert run.steps == tuple(range(1, 10))
    assert run.path == Path(closed.run.name)


def test_a_lost_run_json(copy: Path) -> None:
    """Sessions without a run.json: open says what is lost and what to do, verify checks the sessions all the same."""
    (copy / "run.json").unlink()
    with pytest.raises(DamagedError, match=r"run.json is lost; 1 session is \(0000\).*attach"):
        gradtap.open(copy)
    report = verify(copy)
    (finding,) = report.findings
    assert finding.file == "run.json"
    assert "1 session is (0000)" in finding.what and "attach" in finding.cure
    assert report.checked["chunks"] > 0


def spoilt(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A JSON document with one value replaced."""
    place = document
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    return document


FIELDS: list[tuple[Any, ...]] = [
    ("session",),
    ("nonce",),
    ("created",),
    ("closed",),
    ("codec",),
    ("summary",),
    ("engine",),
    ("engine", "name"),
    ("engine", "groups"),
    ("settings",),
    ("versions",),
    ("plan",),
    ("plan", "world"),
    ("plan", "params"),
    ("plan", "params", 0, "name"),
    ("plan", "params", 0, "shape"),
    ("plan", "params", 0, "dtype"),
    ("plan", "params", 0, "status"),
    ("plan", "params", 0, "aliases"),
    ("plan", "params", 0, "aliases", 0),
    ("plan", "arrays", 0, "name"),
    ("plan", "arrays", 0, "param"),
    ("plan", "arrays", 0, "start"),
    ("plan", "arrays", 0, "shape"),
    ("plan", "arrays", 0, "dtype"),
    ("plan", "arrays", 0, "time"),
    ("plan", "arrays", 0, "owners"),
]


@pytest.mark.parametrize("at", FIELDS, ids=lambda at: ".".join(map(str, at)))
def test_session_json_with_a_value_of_another_type(copy: Path, at: tuple[Any, ...]) -> None:
    """A value of a wrong type anywhere in session.json is damage that names the file, never another error."""
    file = copy / "sessions/0000/session.json"
    text = file.read_text()
    values: list[Any] = ["soon"] if at in {("created",), ("closed",)} else [1.5, [[]]]
    for value in values:
        file.write_text(json.dumps(spoilt(json.loads(text), at, value)))
        with pytest.raises(DamagedError, match=r"session\.json"):
            gradtap.open(copy)
    assert [Path(f.file).name for f in verify(copy).findings] == ["session.json"]


@pytest.mark.parametrize("at", FIELDS, ids=lambda at: ".".join(map(str, at)))
def test_any_other_value_in_session_json(copy: Path, at: tuple[Any, ...]) -> None:
    """Whatever stands in session.json, opening and reading give an answer or an error of gradtap's own."""
    file = copy / "sessions/0000/session.json"
    text = file.read_text()
    for value in (5, -1, True, None, "x", 1e400, {"a": 1}):
        file.write_text(json.dumps(spoilt(json.loads(text), at, value)))
        with contextlib.suppress(GradtapError):
            run = gradtap.open(copy)
            run.info()
            run.grad("mlp.bias", 3)
    verify(copy)
