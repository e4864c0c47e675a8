"""run.json: made once, adopted, refused when damaged or newer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradtap.errors import DamagedError, FormatVersionError, NotARunError
from gradtap.store.runfile import add_session, create_run, read_run


def test_a_run_is_made_and_then_adopted(tmp_path: Path) -> None:
    """The second creation returns the first one's run, name and id."""
    made = create_run(tmp_path / "deep" / "bert.gradtap")
    assert (made.format, made.name, made.sessions, dict(made.tags)) == (1, "bert", (), {})
    assert len(made.run) == 32
    assert create_run(tmp_path / "deep" / "bert.gradtap", "other") == made
    assert read_run(tmp_path / "deep" / "bert.gradtap") == made
    assert create_run(tmp_path / "named", "mine").name == "mine"


def test_sessions_are_added_in_order(tmp_path: Path) -> None:
    """Each session is listed once, after those before it; the file holds what the format says."""
    made = create_run(tmp_path, "r")
    assert add_session(tmp_path, "0000").sessions == ("0000",)
    assert add_session(tmp_path, "0001").sessions == ("0000", "0001")
    assert add_session(tmp_path, "0001").sessions == ("0000", "0001")
    assert json.loads((tmp_path / "run.json").read_text()) == {
        "format": 1,
        "run": made.run,
        "name": "r",
        "tags": {},
        "sessions": ["0000", "0001"],
        "gradtap": made.gradtap,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"run": 3},
        {"name": None},
        {"tags": []},
        {"sessions": {}},
        {"sessions": [1]},
        {"sessions": ["../../etc"]},
        {"sessions": ["0000", "0000"]},
        {"format": "1"},
        {"format": True},
        {"format": 0},
    ],
)
def test_each_field_is_checked(tmp_path: Path, change: dict[str, Any]) -> None:
    """A field of the wrong type or content is damage that names file and field."""
    create_run(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedError, match="run.json: .*" + next(iter(change))[:7]):
        read_run(tmp_path)


def test_a_missing_field_and_broken_json_are_damage(tmp_path: Path) -> None:
    """A run.json that is cut is never taken as an empty or new run, not by creation either."""
    create_run(tmp_path)
    for text in ("", "{", "{}", '{"format": 1}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(DamagedError, match=r"run\.json"):
            read_run(tmp_path)
        with pytest.raises(DamagedError):
            create_run(tmp_path)


def test_a_newer_format_says_what_to_install(tmp_path: Path) -> None:
    """Format 2 is refused before its fields are looked at."""
    (tmp_path / "run.json").write_text('{"format": 2, "gradtap": "3.1"}')
    with pytest.raises(FormatVersionError, match=r"format 2.*reads format 1.*pip install --upgrade 'gradtap>=3\.1'"):
        read_run(tmp_path)


def test_what_is_not_a_run_says_where_to_point(tmp_path: Path) -> None:
    """A missing folder, a file, a parent of runs and a folder inside a run each get their own advice."""
    with pytest.raises(NotARunError, match=r"nowhere does not exist; point at"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(NotARunError, match=r"holds no run\.json"):
        read_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotARunError, match=r"file is a file"):
        read_run(tmp_path / "file")
    for name in ("b", "a"):
        create_run(tmp_path / name)
    with pytest.raises(NotARunError, match=r"not a run, but holds some: .*/a, .*/b; point at one"):
        read_run(tmp_path)
    inside = tmp_path / "a" / "sessions" / "0000" / "gradients.zarr"
    inside.mkdir(parents=True)
    with pytest.raises(NotARunError, match=rf"is inside of a run; point at {tmp_path}/a$"):
        read_run(inside)
