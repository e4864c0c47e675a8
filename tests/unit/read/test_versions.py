"""Stores of other versions: other sizes, arrays less, arrays more, a newer format."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import gradtap
from gradtap.encode.summary import summarize
from gradtap.read import open_run, verify
from gradtap.store import chunk_writer, row_specs, rows
from tests.support.synthetic import MODEL, NEVER, SMALL, Job
from tests.support.versions import GROUP, add_array, drop_array
from tests.unit.read.test_verify import edit, snapshot

STEPS = tuple(range(1, 41))
OTHER = {"REPLACE_BYTES": 96, "INNER_BYTES": 48}


@pytest.fixture(scope="module", params=["closed", "killed"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Forty steps written with other sizes of everything, then closed or killed; read with today's."""
    path = tmp_path_factory.mktemp("foreign") / "r"

    def nine_bins(values: Any, level: str) -> Any:
        found = summarize(values, level)
        return None if found is None or found.hist is None else replace(found, hist=found.hist[96:105])

    with pytest.MonkeyPatch.context() as patch:
        for name, size in OTHER.items():
            patch.setattr(rows, name, size)
        patch.setattr(row_specs, "BINS", 9)
        patch.setattr(chunk_writer, "summarize", nine_bins)
        settings = replace(SMALL if request.param == "closed" else NEVER, max_time=2)
        job = Job(run=path, world=2, settings=settings).steps(STEPS)
        job.close() if request.param == "closed" else job.kill()
    return job


def test_other_sizes_are_read_from_the_metadata(foreign: Job) -> None:
    """Rows of a file, chunks and bins of another writer read as they were written: steps, ledger, norms, gradients."""
    run = open_run(foreign.run)
    assert run.steps == STEPS
    ledger = run.ledger
    assert ledger.steps == STEPS
    assert ledger["time"].tolist() == [1.0e9 + step for step in STEPS]
    assert ledger["touched"].shape == (len(STEPS), len(MODEL))
    wanted = [np.linalg.norm(foreign.expected("mlp.weight", step).astype(np.float64)) for step in STEPS]
    np.testing.assert_allclose(run.norms("mlp.weight").values[0], wanted, rtol=1e-12)
    np.testing.assert_array_equal(run.grad("mlp.weight", 33).values, foreign.expected("mlp.weight", 33))


def test_other_sizes_are_really_other(foreign: Job) -> None:
    """The store differs from what this version writes, and plain Zarr reads it."""
    group = zarr.open_group(foreign.paths.zarr, mode="r")
    assert group["_step"].chunks[0] < 4096
    assert group["_summary/hist"].shape[2] == 9
    assert group["_summary/hist"].chunks[1] < group["_summary/hist"].shape[1]
    assert zarr.open_array(foreign.paths.zarr / "_ledger/r00000/touched", mode="r").shards[0] == 2
    assert (group["_step"][:][: len(STEPS)].tolist() == list(STEPS)) == (open_run(foreign.run).info().state == "closed")


def test_other_sizes_are_no_damage(foreign: Job) -> None:
    """`verify` goes by the metadata too."""
    report = verify(foreign.run, deep=True)
    assert report.sound, report.findings


@pytest.fixture(params=["closed", "unclosed"])
def harmed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a run, merged by rank 0 or not."""
    job: Job = request.getfixturevalue(request.param)
    return Path(shutil.copytree(job.run, tmp_path / "copy"))


def test_what_an_older_writer_did_not_have(harmed: Path) -> None:
    """A column that the store lacks is no column, a statistic is an error that says so, and nothing is damage."""
    for kind, name in (("ledger", "wait_seconds"), ("ledger", "touched"), ("summary", "std")):
        drop_array(harmed, kind, name)
    run = open_run(harmed)
    assert not {"wait_seconds", "touched"} & set(run.ledger.columns)
    with pytest.raises(gradtap.NotFoundError, match="no column 'touched'"):
        run.ledger["touched"]
    assert run.ledger.row(3)["seconds"] == 0.25
    with pytest.raises(gradtap.IncompleteError, match="stored 'std'"):
        run.norms(stat="std")
    assert not np.isnan(run.norms(stat="mean").values).any()
    assert run.grad("mlp.bias", 3).flags == ()
    report = verify(harmed)
    assert report.sound, report.findings


def test_factor_and_flags_of_an_older_writer_are_unknown(harmed: Path) -> None:
    """Without the ledger fields that go with a gradient, its factor is unknown, not 1."""
    for name in ("factor", "flags", "capture"):
        drop_array(harmed, "ledger", name)
    got = open_run(harmed).grad("mlp.bias", 3)
    assert np.isnan(got.factor[0])
    assert got.flags == ()


def test_what_a_newer_writer_added(harmed: Path) -> None:
    """An unknown field is a column, an unknown statistic is passed by; both are noted, neither is damage."""
    add_array(harmed, "ledger", "seconds", "joules")
    add_array(harmed, "ledger", "learning_rate", "momentum")
    add_array(harmed, "summary", "l2", "l3")
    shutil.copytree(harmed / GROUP / "_ledger/seconds", harmed / GROUP / "_micro/blocks/0")
    edit(harmed / GROUP / "zarr.json", lambda d: d["attributes"].update(later={"micro": 1}))
    edit(harmed / GROUP / "mlp.bias/zarr.json", lambda d: d["attributes"].update(factor_note="in other words"))
    edit(harmed / "sessions/0000/session.json", lambda d: d.update(summary="lavish", later=1))
    run = open_run(harmed)
    ledger = run.ledger
    assert ledger.columns[-2:] == ("joules", "momentum")
    published = run.info().state == "closed"
    assert (ledger["joules"] == 0.25).all() == published
    assert np.isnan(ledger["joules"]).all() != published
    assert ledger["momentum"].shape == (9, 2)
    assert not np.isnan(run.norms().values).any()
    report = verify(harmed)
    assert report.sound, report.findings
    noted = {note.file.removeprefix(f"{GROUP}/") for note in report.notes if "does not know" in note.what}
    known = {"_ledger/joules", "_ledger/momentum", "_summary/l3", "_micro"}
    assert known | {"_ledger/r*/joules", "_ledger/r*/momentum", "_summary/r*/l3"} == noted


def test_an_unknown_column_that_does_not_read_is_passed_by(harmed: Path) -> None:
    """A later layout of a field that nobody here knows hides nothing else."""
    add_array(harmed, "ledger", "seconds", "joules")
    edit(harmed / GROUP / "_ledger/joules/zarr.json", lambda d: d["codecs"].append({"name": "zip"}))
    assert "joules" not in open_run(harmed).ledger.columns
    assert verify(harmed).sound


@pytest.mark.parametrize("path", ["_step", "_ledger/step", "_ledger/r00001/flags", "mlp.bias", "_ledger/factor"])
def test_metadata_that_went_missing_is_damage(copy: Path, path: str) -> None:
    """What is always there, and what lost its metadata and kept its rows, is damage and no older writer."""
    (copy / GROUP / path / "zarr.json").unlink()
    assert [f.file for f in verify(copy).findings] == [str(GROUP / path / "zarr.json")]
    run = open_run(copy)
    assert run.steps == tuple(range(1, 10))
    if path == "_ledger/factor":
        with pytest.raises(gradtap.DamagedError, match="missing, though rows lie beside it"):
            run.grad("mlp.bias", 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[2**50, 6]),
        lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[0, 6]),
        lambda d: d["codecs"][0]["configuration"].update(chunk_shape=[1, 0]),
        lambda d: d["codecs"][0]["configuration"].update(chunk_shape=[1, 2**40]),
        lambda d: d["codecs"][0]["configuration"].update(index_location="end"),
        lambda d: d["codecs"][0]["configuration"].update(codecs=[{"name": "zip"}]),
        lambda d: d.update(data_type="object"),
        lambda d: d.update(data_type="float32"),
        lambda d: d.update(shape=[9, 2**40]),
        lambda d: d.update(shape=[9]),
        lambda d: d.update(fill_value=0.0),
        lambda d: d.update(fill_value=[]),
        lambda d: d.update(dimension_names=None),
        lambda d: d["attributes"].update(params=[1]),
        lambda d: d["attributes"].update(params=["x"]),
        lambda d: d.update(attributes=None),
        lambda d: d.clear(),
    ],
)
def test_hostile_metadata(copy: Path, change: Any) -> None:
    """Whatever the metadata of a row array says, reading it is an error of gradtap's at once, and `verify` reports."""
    edit(copy / GROUP / "_summary/l2/zarr.json", change)
    with pytest.raises(gradtap.DamagedError, match="_summary/l2/zarr.json"):
        open_run(copy).norms()
    assert str(GROUP / "_summary/l2/zarr.json") in {f.file for f in verify(copy).findings}


@pytest.mark.parametrize("pieces", [None, [[0, 0]], [["x", 0, 1]], [[99, 0, 1]] * 4, [[0, 5, 1]] * 4])
def test_hostile_pieces(unclosed: Job, tmp_path: Path, pieces: Any) -> None:
    """The map from columns to parameters is checked before it is used."""
    run = Path(shutil.copytree(unclosed.run, tmp_path / "copy"))
    edit(run / GROUP / "_summary/r00001/l2/zarr.json", lambda d: d["attributes"].update(pieces=pieces))
    with pytest.raises(gradtap.DamagedError, match="r00001/l2/zarr.json"):
        open_run(run).norms()
    assert not verify(run).sound


def test_pieces_come_from_the_attribute(tmp_path: Path) -> None:
    """Columns of a rank's summary in another order are still those of their parameters."""
    job = Job(run=tmp_path / "r", kind="whole", world=1, settings=NEVER).steps([1, 2])
    job.kill()
    run = job.run
    file = run / GROUP / "_summary/r00000/l2/zarr.json"
    pieces = json.loads(file.read_text())["attributes"]["pieces"]
    before = open_run(run).norms()
    names = [MODEL[param].name for param, _, _ in pieces]
    whole = [i for i, (param, start, stop) in enumerate(pieces) if stop - start == MODEL[param].numel]
    one, other = whole[:2]
    edit(file, lambda d: d["attributes"]["pieces"].__setitem__(slice(None), _swapped(pieces, one, other)))
    after = open_run(run).norms()
    np.testing.assert_array_equal(after[names[one]], before[names[other]])
    np.testing.assert_array_equal(after[names[other]], before[names[one]])


def _swapped(values: list[Any], one: int, other: int) -> list[Any]:
    made = list(values)
    made[one], made[other] = made[other], made[one]
    return made


def test_a_newer_session_is_refused(copy: Path) -> None:
    """A session of format 2 is refused by `open` and reported by `verify`; nothing is changed."""
    edit(
        copy / "sessions/0000/session.json",
        lambda d: d.update(format=2, plan="other", versions={"gradtap": "9.1"}),
    )
    before = snapshot(copy)
    with pytest.raises(gradtap.FormatVersionError, match=r"format 2.*gradtap>=9\.1"):
        open_run(copy)
    (finding,) = verify(copy).findings
    assert finding.file == "sessions/0000/session.json"
    assert "newer" in finding.cure
    assert snapshot(copy) == before


@pytest.mark.parametrize("value", [0, "1", None, 1.0, True])
def test_a_format_that_is_none(copy: Path, value: Any) -> None:
    """A format that is no whole number from 1 on is damage, not a newer version."""
    edit(copy / "sessions/0000/session.json", lambda d: d.update(format=value))
    with pytest.raises(gradtap.DamagedError, match="format"):
        open_run(copy)
