"""Finding runs in folders, naming them, opening them once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from gradtap.errors import (
    DamagedError,
    FormatVersionError,
    NotARunError,
    RunNotFoundError,
    StoreError,
    UsageError,
)
from gradtap.read.catalog import MOST_WITH_FILES, Catalog
from gradtap.read.discover import RUN_SLUG, discover, slug_of, told_apart
from gradtap.store.runfile import create_run
from tests.support.synthetic import Job


def make(path: Path) -> str:
    """An empty run at a path; its id."""
    return create_run(path).run


def catalog(*stores: Path) -> Catalog:
    """A catalog that looks anew each time."""
    return Catalog(stores, every=0.0)


def slugs(found: Catalog) -> list[str]:
    """The names, in the catalog's order."""
    return [entry.slug for entry in found.entries()]


def test_a_run_is_a_store(tmp_path: Path) -> None:
    """A folder that is a run itself is served as that one run, without `.gradtap`."""
    run = make(tmp_path / "mine.gradtap")
    (entry,) = catalog(tmp_path / "mine.gradtap").entries()
    assert (entry.slug, entry.id, entry.error, entry.folder) == ("mine", run, None, False)


def test_runs_are_found_three_folders_down(tmp_path: Path) -> None:
    """Runs lie up to three folders below a store; one at a fourth is not found, nor one in a hidden folder."""
    for place in ("a", "b/c", "d/e/f", "g/h/i/j", ".k/l"):
        make(tmp_path / f"{place}.gradtap")
    assert slugs(catalog(tmp_path)) == ["a", "c", "f"]


def test_nothing_is_looked_for_within_a_run(tmp_path: Path) -> None:
    """A run within a run's folder is not listed."""
    make(tmp_path / "outer.gradtap")
    make(tmp_path / "outer.gradtap" / "inner.gradtap")
    assert slugs(catalog(tmp_path)) == ["outer"]


def test_a_store_may_be_empty(tmp_path: Path) -> None:
    """A folder without runs is a store without runs, and no error."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("x")
    found = catalog(tmp_path)
    found.check()
    assert found.entries() == ()
    with pytest.raises(RunNotFoundError, match="no run 'x'; there is none yet"):
        found.find("x")


@pytest.mark.parametrize(
    ("folder", "slug"),
    [
        ("mine.gradtap", "mine"),
        ("my run (2)", "my-run-2-"),
        ("..odd", "odd"),
        ("äöü", "run"),
        ("v1.2_x-y", "v1.2_x-y"),
        ("a" * 200, "a" * 96),
        (".gradtap", "run"),
    ],
)
def test_slugs_fit_an_address(tmp_path: Path, folder: str, slug: str) -> None:
    """A slug is the folder's name with odd characters replaced, and always fits the pattern."""
    assert slug_of(tmp_path / folder) == slug
    assert re.fullmatch(RUN_SLUG, slug)


def test_two_runs_of_one_name_get_their_ids(tmp_path: Path) -> None:
    """Runs of one name are told apart by 8 digits of their ids; the name alone is not found and names both."""
    a, b = make(tmp_path / "a" / "mine.gradtap"), make(tmp_path / "b" / "mine.gradtap")
    make(tmp_path / "other.gradtap")
    found = catalog(tmp_path)
    both = [f"mine-{a[:8]}", f"mine-{b[:8]}"]
    assert slugs(found) == [*both, "other"]
    assert [found.open(name).id for name in both] == [a, b]
    with pytest.raises(RunNotFoundError, match="2 runs go by 'mine'") as caught:
        found.find("mine")
    assert caught.value.facts == {"did_you_mean": both}


def test_a_copied_run_is_told_apart_by_its_path(tmp_path: Path) -> None:
    """Copies share their id, so their paths tell them apart, and the id alone names both."""
    run = make(tmp_path / "a" / "mine.gradtap")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = catalog(tmp_path)
    names = slugs(found)
    assert len(set(names)) == 2
    assert not any(name.endswith(run[:8]) for name in names)
    with pytest.raises(RunNotFoundError) as caught:
        found.open(run)
    assert caught.value.facts["did_you_mean"] == names
    assert [found.open(name).path.parent.name for name in names] == ["a", "b"]


def test_names_made_to_collide_stay_apart(tmp_path: Path) -> None:
    """A folder named as another run's long name does not take it over."""
    a, b = make(tmp_path / "a" / "mine"), make(tmp_path / "b" / "mine")
    make(tmp_path / f"mine-{a[:8]}")
    found = catalog(tmp_path)
    assert len(set(slugs(found))) == 3
    assert found.open(f"mine-{a[:8]}").path.name == f"mine-{a[:8]}"
    assert found.open(b).id == b


def test_same_paths_in_two_stores_stay_apart(tmp_path: Path) -> None:
    """Copies at one and the same path within two stores have two names."""
    make(tmp_path / "x" / "mine")
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    assert len(set(slugs(catalog(tmp_path / "x", tmp_path / "y")))) == 2


def test_one_folder_by_two_ways_is_one_run(tmp_path: Path) -> None:
    """A run that two stores reach, or a link, is listed once."""
    make(tmp_path / "runs" / "mine.gradtap")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs" / "mine.gradtap")
    found = catalog(tmp_path, tmp_path / "runs", tmp_path / "runs" / "mine.gradtap")
    assert len(found.entries()) == 1


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    """A link back to the store is no endless search."""
    make(tmp_path / "mine.gradtap")
    (tmp_path / "up").symlink_to(tmp_path)
    assert slugs(catalog(tmp_path)) == ["mine"]


def test_lookup_by_id(tmp_path: Path) -> None:
    """A run is found by its id, wherever its folder was moved to."""
    run = make(tmp_path / "mine.gradtap")
    assert catalog(tmp_path).open(run).id == run


@pytest.mark.parametrize("name", ["", ".", "..", "../mine", "mine/..", "/etc", "mine.gradtap", "\0", "MINE"])
def test_a_name_is_never_a_path(tmp_path: Path, name: str) -> None:
    """What is no run's name is not found, whatever it would be as a path."""
    make(tmp_path / "store" / "mine.gradtap")
    make(tmp_path / "mine")
    with pytest.raises(RunNotFoundError):
        catalog(tmp_path / "store").open(name)


def test_typo_is_answered_with_near_names(tmp_path: Path) -> None:
    """A run that is not there is answered with the nearest names."""
    for name in ("baseline", "sweep"):
        make(tmp_path / name)
    with pytest.raises(RunNotFoundError, match="did you mean baseline") as caught:
        catalog(tmp_path).find("baselin")
    assert caught.value.facts == {"did_you_mean": ["baseline"]}


def test_a_run_is_opened_once(tmp_path: Path) -> None:
    """The run that was opened is kept, by whichever name it is asked for."""
    run = make(tmp_path / "mine")
    found = catalog(tmp_path)
    assert found.open("mine") is found.open("mine") is found.open(run)


def test_new_runs_are_seen_after_a_moment(tmp_path: Path) -> None:
    """The folders are looked over again once the interval has passed, not before."""
    now = [0.0]
    make(tmp_path / "a")
    found = Catalog([tmp_path], every=1.0, clock=lambda: now[0])
    assert slugs(found) == ["a"]
    make(tmp_path / "b")
    now[0] = 0.9
    assert slugs(found) == ["a"]
    now[0] = 1.0
    assert slugs(found) == ["a", "b"]


def test_a_run_in_the_place_of_another_is_another(tmp_path: Path) -> None:
    """A folder that was removed and written anew is opened anew."""
    make(tmp_path / "mine")
    found = catalog(tmp_path)
    first = found.open("mine")
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(RunNotFoundError):
        found.open("mine")
    new = make(tmp_path / "mine")
    assert found.open("mine").id == new != first.id


def test_files_do_not_pile_up(tmp_path: Path) -> None:
    """However many runs were read, only a few hold files open, and all of them still read."""
    for i in range(MOST_WITH_FILES + 6):
        Job(run=tmp_path / f"r{i}", world=1).steps([0]).close()
    found = catalog(tmp_path)
    counts = []
    for entry in found.entries() * 2:
        run = found.open(entry.slug)
        run.grad("norm.scale", 0)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[MOST_WITH_FILES]
    assert found.open("r0").grad("norm.scale", 0).complete
    before = len(os.listdir("/proc/self/fd"))
    found.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_vanished_run_lets_go_of_its_files(tmp_path: Path) -> None:
    """A run whose folder is gone is closed at the next look."""
    Job(run=tmp_path / "mine", world=1).steps([0]).close()
    found = catalog(tmp_path)
    idle = len(os.listdir("/proc/self/fd"))
    found.open("mine").grad("norm.scale", 0)
    assert len(os.listdir("/proc/self/fd")) > idle
    shutil.rmtree(tmp_path / "mine")
    assert found.entries() == ()
    assert len(os.listdir("/proc/self/fd")) == idle


def newer(run: Path) -> None:
    """Have a run be of a newer format."""
    path = run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


def test_newer_format_is_listed_and_named(tmp_path: Path) -> None:
    """A run in a newer format is listed with its error, which it raises when it is asked for."""
    make(tmp_path / "new")
    newer(tmp_path / "new")
    found = catalog(tmp_path)
    (entry,) = found.entries()
    assert isinstance(entry.error, FormatVersionError)
    with pytest.raises(FormatVersionError, match="format 99"):
        found.open("new")


def test_a_damaged_session_is_listed_after_a_try(tmp_path: Path) -> None:
    """A run whose only session does not read raises that, is listed with it, and opens once it is repaired."""
    Job(run=tmp_path / "mine", world=1).steps([0]).close()
    path = tmp_path / "mine" / "sessions" / "0000" / "session.json"
    good = path.read_bytes()
    path.write_bytes(good[:-20])
    found = catalog(tmp_path)
    with pytest.raises(DamagedError):
        found.open("mine")
    assert isinstance(found.entries()[0].error, DamagedError)
    path.write_bytes(good)
    assert found.open("mine").steps == (0,)
    assert found.entries()[0].error is None


def test_a_lost_run_json_is_no_absence(tmp_path: Path) -> None:
    """A folder with sessions and without run.json is listed, and says what is lost."""
    Job(run=tmp_path / "mine", world=1).steps([0]).close()
    (tmp_path / "mine" / "run.json").unlink()
    found = catalog(tmp_path)
    assert slugs(found) == ["mine"]
    with pytest.raises(DamagedError, match=r"run\.json is lost"):
        found.open("mine")


def test_a_lost_store_is_no_missing_run(tmp_path: Path) -> None:
    """A store that is gone is named by `check` and by every look-up that finds nothing, and seen when it is back."""
    make(tmp_path / "a" / "mine")
    make(tmp_path / "b" / "other")
    found = catalog(tmp_path / "a", tmp_path / "b")
    found.check()
    (tmp_path / "a").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="a is not there"):
        found.check()
    with pytest.raises(StoreError, match="there may be a run 'mine'"):
        found.find("mine")
    assert found.open("other").name == "other"
    assert [(e.slug, e.folder) for e in found.entries()] == [("a", True), ("other", False)]
    (tmp_path / "away").rename(tmp_path / "a")
    found.check()
    assert found.open("mine").name == "mine"


def test_a_folder_that_does_not_list_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed folder may hold runs: it is listed with its error, and a miss names it."""
    make(tmp_path / "mine")
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def refusing(path: object) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refusing)
    found = catalog(tmp_path)
    found.check()
    assert [(e.slug, e.folder) for e in found.entries()] == [("closed", True), ("mine", False)]
    with pytest.raises(StoreError, match="cannot list .*closed: Permission denied"):
        found.find("hidden")
    with pytest.raises(StoreError, match="cannot list"):
        found.open("closed")
    assert found.open("mine").name == "mine"


@pytest.mark.parametrize("target", ["ring", "nowhere"])
def test_a_link_that_leads_nowhere_hides_nothing(tmp_path: Path, target: str) -> None:
    """A link in a ring, or to what is gone, is no folder: the runs beside it are listed, without an error."""
    make(tmp_path / "mine")
    (tmp_path / "ring").symlink_to(tmp_path / target)
    found = catalog(tmp_path)
    found.check()
    assert [(e.slug, e.error) for e in found.entries()] == [("mine", None)]
    assert found.open("mine").name == "mine"


def test_a_link_to_a_closed_place_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that may not be followed is an entry with its error; the runs beside it are listed as ever."""
    make(tmp_path / "mine")
    (tmp_path / "other").mkdir()
    scan, stat = os.scandir, os.stat

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self._entry = entry.name, entry

        def is_dir(self) -> bool:
            if self.name == "other":
                raise PermissionError(13, "Permission denied")
            return self._entry.is_dir()

    @contextlib.contextmanager
    def scanning(path: Any) -> Any:
        with scan(path) as entries:
            yield [Entry(entry) for entry in entries]

    def looking(path: Any, **options: Any) -> os.stat_result:
        if f"{os.sep}other" in str(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "scandir", scanning)
    monkeypatch.setattr(os, "stat", looking)
    found = catalog(tmp_path)
    assert [(e.slug, e.folder, e.error is None) for e in found.entries()] == [
        ("mine", False, True),
        ("other", True, False),
    ]


def test_one_look_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a look for runs hangs, others get what the last one found; what is open stays within reach."""
    make(tmp_path / "mine")
    found = Catalog([tmp_path], every=0.0)
    assert [e.slug for e in found.entries()] == ["mine"]
    begun, gate, looks = threading.Event(), threading.Event(), []

    def hanging(store: Path) -> Any:
        looks.append(store)
        begun.set()
        assert gate.wait(20)
        return discover(store)

    monkeypatch.setattr("gradtap.read.catalog.discover", hanging)
    make(tmp_path / "newer")
    looking = threading.Thread(target=found.entries)
    looking.start()
    try:
        assert begun.wait(20)
        for _ in range(3):
            assert [e.slug for e in found.entries()] == ["mine"]
        assert found.open("mine").name == "mine"
        assert len(looks) == 1
    finally:
        gate.set()
        looking.join(20)
    assert [e.slug for e in found.known()] == ["mine", "newer"]


def test_a_file_system_s_own_folder_is_passed_over(tmp_path: Path) -> None:
    """`lost+found`, which no ordinary user may list, is no reason for errors."""
    (tmp_path / "lost+found").mkdir()
    make(tmp_path / "lost+found" / "x")
    assert catalog(tmp_path).entries() == ()


def test_a_file_is_no_store(tmp_path: Path) -> None:
    """A file where a store should be is an error that names it."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file"):
        catalog(tmp_path / "file").check()


@pytest.mark.parametrize("store", ["s3://bucket/runs", "", 3])
def test_what_is_no_path_is_refused(store: object) -> None:
    """An address, nothing, or a number is no store."""
    with pytest.raises(UsageError):
        Catalog([store])  # type: ignore[list-item]


def test_one_path_is_not_a_list(tmp_path: Path) -> None:
    """A path in place of a list of paths is refused, not taken for its letters."""
    with pytest.raises(UsageError, match="give a list"):
        Catalog(str(tmp_path))


def test_only_needs_no_name_for_one_run(tmp_path: Path) -> None:
    """The only run is meant where none is named."""
    make(tmp_path / "mine")
    assert catalog(tmp_path).only().slug == "mine"
    assert catalog(tmp_path / "mine").only("mine").slug == "mine"


def test_only_lists_several(tmp_path: Path) -> None:
    """Of several runs one must be named; the error lists them."""
    make(tmp_path / "a")
    make(tmp_path / "b")
    with pytest.raises(UsageError, match="2 runs are there: a, b; choose one with --run") as caught:
        catalog(tmp_path).only()
    assert caught.value.facts == {"runs": ["a", "b"]}
    assert catalog(tmp_path).only("b").slug == "b"


def test_only_says_where_no_run_is(tmp_path: Path) -> None:
    """A folder without runs is no run; one that is not there is a lost store."""
    with pytest.raises(NotARunError, match=r"holds no run\.json"):
        catalog(tmp_path).only()
    with pytest.raises(StoreError, match="is not there"):
        catalog(tmp_path / "nowhere").only()


def test_many_threads_share_one_run(tmp_path: Path) -> None:
    """Threads that ask at the same time all get the one run."""
    make(tmp_path / "mine")
    found = catalog(tmp_path)
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(found.open("mine"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_discovery_is_in_order(tmp_path: Path) -> None:
    """Runs come in the order of their names, whatever order the disk has."""
    for name in ("c", "a", "b"):
        make(tmp_path / name)
    assert [entry.within for entry in told_apart(discover(tmp_path))] == ["a", "b", "c"]


def test_a_link_round_to_the_store_lists_no_run_twice(tmp_path: Path) -> None:
    """A run that is reached by a link too is listed once, by the way that has none, whatever the names' order."""
    store = tmp_path / "store"
    for name in ("a", "z/deep"):
        create_run(store / name)
    (store / "loop").symlink_to(store, target_is_directory=True)
    entries = Catalog([store]).entries()
    assert sorted(entry.within for entry in entries) == ["a", "z/deep"]
    assert sorted(entry.slug for entry in entries) == ["a", "deep"]
