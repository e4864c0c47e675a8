"""One row for each run: the same facts as the run's own page has, without a look at its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradtap.query.info import info
from gradtap.query.runs import named, run_row
from gradtap.read import open_run
from gradtap.read.catalog import Catalog
from gradtap.store.runfile import create_run
from tests.support.synthetic import Job


def test_a_row_says_what_the_run_s_page_says(tmp_path: Path) -> None:
    """State, engine, world, steps and bytes of a row are those of `info`, over several sessions too."""
    Job(run=tmp_path / "mine", world=2).steps(range(3)).close()
    Job(run=tmp_path / "mine", world=2).steps(range(2, 5)).kill()
    catalog = Catalog([tmp_path])
    row = run_row(catalog, catalog.find("mine"))
    about = info(open_run(tmp_path / "mine")).body()
    same = ("run", "state", "engine", "world", "raw_bytes", "stored_bytes", "ratio")
    assert {key: row[key] for key in same} == {key: about[key] for key in same}
    assert row["steps"] == {key: about["steps"][key] for key in ("first", "last", "count")}


def test_a_row_lists_no_folder_of_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row, and what a run knows of its sessions, takes no walk through the run's files."""
    Job(run=tmp_path / "mine", world=1).steps(range(3)).close()
    catalog = Catalog([tmp_path])
    entry = catalog.find("mine")
    walked: list[str] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (walked.append(os.fspath(path)), real(path))[1])
    assert run_row(catalog, entry)["steps"]["count"] == 3
    assert catalog.open("mine").sessions[0].captures == 3
    gradients = [path for path in walked if "embed" in path]
    assert gradients == []
    catalog.open("mine").info()
    assert [path for path in walked if "embed" in path] != []


def test_a_row_of_an_empty_run(tmp_path: Path) -> None:
    """A run without sessions has no engine, no steps and no ratio."""
    run = create_run(tmp_path / "mine").run
    catalog = Catalog([tmp_path])
    assert run_row(catalog, catalog.find("mine")) == {
        "name": "mine",
        "run": run,
        "state": "empty",
        "damaged": {},
        "engine": None,
        "world": None,
        "steps": {"first": None, "last": None, "count": 0},
        "raw_bytes": 0,
        "stored_bytes": 0,
        "ratio": None,
    }


def test_a_row_of_what_does_not_open(tmp_path: Path) -> None:
    """A run that does not open is unreadable, with the slug and status of its problem."""
    create_run(tmp_path / "mine")
    (tmp_path / "mine" / "run.json").write_text("{")
    catalog = Catalog([tmp_path])
    row = run_row(catalog, catalog.find("mine"))
    assert (row["state"], row["error"]["slug"], row["error"]["status"]) == ("unreadable", "damaged", 500)


def test_names_are_chosen_by_text_pattern_or_id(tmp_path: Path) -> None:
    """A text is looked for anywhere in the name, a pattern fits it whole, an id may be cut short; names ascend."""
    ids = {name: create_run(tmp_path / name).run for name in ("c1", "a1", "b2")}
    entries = Catalog([tmp_path]).entries()
    assert [e.slug for e in named(entries)] == ["a1", "b2", "c1"]
    assert [e.slug for e in named(entries, "1")] == ["a1", "c1"]
    assert [e.slug for e in named(entries, "c*")] == ["c1"]
    assert [e.slug for e in named(entries, ids["b2"])] == ["b2"]
