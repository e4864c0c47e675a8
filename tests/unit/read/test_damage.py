from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import gradtap
from gradtap.encode.checksum import with_crc
from gradtap.read import open_run, verify
from tests.support.synthetic import Job
from tests.support.wounds import PAIR, WOUNDS, flip, put, spot

NAME, CAPTURE = "mlp.weight", 5
STEP = CAPTURE + 1


@pytest.mark.parametrize("wound", WOUNDS)
def test_damage_is_never_served(copy: Path, closed: Job, wound: str) -> None:
    """Whatever is done to a chunk, reading it raises an error that names file, parameter, step and cure; `verify`
    finds it; other parameters and other shards still read right.
    """
    place = spot(copy, NAME, CAPTURE)
    WOUNDS[wound](place)
    run = open_run(copy)
    with pytest.raises(gradtap.DamagedError) as caught:
        run.grad(NAME, STEP)
    for word in (str(place.path), repr(NAME), f"step {STEP}", "gradtap verify"):
        assert word in str(caught.value)
    with pytest.raises(gradtap.DamagedError):
        run.grad(NAME, steps=slice(1, 10), partial=True)
    np.testing.assert_array_equal(run.grad(NAME, 1).values, closed.expected(NAME, 1))
    np.testing.assert_array_equal(run.grad("mlp.bias", STEP).values, closed.expected("mlp.bias", STEP))
    found = verify(copy, deep=True)
    files = {finding.file for finding in found.findings}
    assert files == {str(place.path.relative_to(copy))}
    assert any(f.param == NAME and (f.step == STEP or wound == "lose_file") for f in found.findings)
    assert all(f.cure for f in found.findings)


@pytest.mark.parametrize("wound", WOUNDS)
def test_damage_within_a_slice_only(copy: Path, closed: Job, wound: str) -> None:
    """A slice that does not touch the damaged chunk reads; one that does raises."""
    WOUNDS[wound](spot(copy, "embed.weight", CAPTURE, chunk=0, piece=0))
    run = open_run(copy)
    whole = closed.expected("embed.weight", STEP)
    np.testing.assert_array_equal(run.grad("embed.weight", STEP, slice="-1").values, whole[-1])
    with pytest.raises(gradtap.DamagedError):
        run.grad("embed.weight", STEP, slice="0")


def test_expected_and_found_are_named(copy: Path) -> None:
    """A wrong checksum is reported as found and as committed."""
    place = spot(copy, NAME, CAPTURE)
    committed = int.from_bytes(place.body()[-4:], "little")
    WOUNDS["flip_body"](place)
    with pytest.raises(gradtap.DamagedError, match=f"committed was {committed:08x}"):
        open_run(copy).grad(NAME, STEP)


def test_misdirected_entry(copy: Path) -> None:
    """Two entries of one shard exchanged: each chunk is sound by itself, and neither is served for the other."""
    one, two = spot(copy, NAME, 4), spot(copy, NAME, CAPTURE)
    put(one.path, one.entry_at, PAIR.pack(two.offset, two.nbytes))
    put(two.path, two.entry_at, PAIR.pack(one.offset, one.nbytes))
    run = open_run(copy)
    for step in (5, STEP):
        with pytest.raises(gradtap.DamagedError, match="committed was"):
            run.grad(NAME, step)
    assert {f.step for f in verify(copy).findings} >= {5, STEP}


@pytest.mark.parametrize("pair", [(("mlp.bias", 0), ("mlp.bias", 4)), (("mlp.bias", 1), ("norm.scale", 1))])
def test_swapped_files(copy: Path, pair: tuple[tuple[str, int], tuple[str, int]]) -> None:
    """Two shard files exchanged, of two windows or of two parameters, are found out."""
    one, two = (spot(copy, name, capture).path for name, capture in pair)
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    run = open_run(copy)
    for name, capture in pair:
        with pytest.raises(gradtap.DamagedError):
            run.grad(name, capture + 1)
    assert not verify(copy).sound


def test_a_shard_of_another_run(copy: Path, closed: Job, tmp_path: Path) -> None:
    """A file taken from another run of the same model, sound in itself, is not served as this run's."""
    other = Job(run=tmp_path / "other", seed=99).steps(range(1, 10))
    other.close()
    shutil.copyfile(spot(other.run, NAME, CAPTURE).path, spot(copy, NAME, CAPTURE).path)
    with pytest.raises(gradtap.DamagedError):
        open_run(copy).grad(NAME, STEP)


def test_a_damaged_record(copy: Path, closed: Job) -> None:
    """A journal record that is not what was written makes its capture an error, and no other."""
    journal = copy / "sessions/0000/journal/r00002"
    size = int.from_bytes(journal.read_bytes()[16:20], "little")
    flip(journal, 128 + CAPTURE * size + 70)
    run = open_run(copy)
    assert STEP in run.steps
    with pytest.raises(gradtap.DamagedError, match="r00002"):
        run.grad("mlp.bias", STEP)
    np.testing.assert_array_equal(run.grad("mlp.bias", 5).values, closed.expected("mlp.bias", 5))
    assert {f.file for f in verify(copy).findings} == {"sessions/0000/journal/r00002"}


def test_a_step_that_the_journals_do_not_know(copy: Path) -> None:
    """Where `_step` says another step than the journals, with a checksum that holds, nothing is served for it."""
    file = copy / "sessions/0000/gradients.zarr/_step/c.0"
    body = bytearray(file.read_bytes()[:-4])
    body[16:24] = (77).to_bytes(8, "little")
    file.write_bytes(with_crc(bytes(body))[0])
    run = open_run(copy)
    for step in (3, 77):
        with pytest.raises(gradtap.GradtapError):
            run.grad(NAME, step)
    with pytest.raises(gradtap.DamagedError, match="published as step 77"):
        run.grad(NAME, 77, partial=False)


def test_a_live_chunk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a live session a chunk that does not read is tried once more before it counts as damaged."""
    from gradtap.read import chunks
    from tests.support.synthetic import NEVER

    job = Job(run=tmp_path / "r", settings=NEVER).steps([1])
    job.flush()
    place = spot(job.run, NAME, 0)
    entry = place.path.read_bytes()[place.entry_at : place.entry_at + 16]
    put(place.path, place.entry_at, b"\xff" * 16)
    monkeypatch.setattr(chunks.time, "sleep", lambda _: put(place.path, place.entry_at, entry))
    np.testing.assert_array_equal(open_run(job.run).grad(NAME, 1).values, job.expected(NAME, 1))
    job.kill()
