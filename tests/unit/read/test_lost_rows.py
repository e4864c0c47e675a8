"""A row array's file that is gone: its rows come from elsewhere or are an error, and are never the fill."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gradtap.errors import DamagedError
from gradtap.read import open_run, verify
from gradtap.read.summaries import SUMMARY_STATS
from gradtap.store.ledger_fields import LEDGER_FIELDS, RANK_FIELDS
from tests.support.synthetic import Job

NAMES = [field.name for field in LEDGER_FIELDS]
FACTS = {"k": 3, "clip_limit": float("nan"), "micro_seen": 4}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(run=tmp_path_factory.mktemp("sound") / "run.gradtap", k=3).steps([1, 2, 3], **FACTS)
    job.step(4, untouched=["mlp.bias"], **FACTS)
    job.close()
    return job


@pytest.fixture
def wounded(sound: Job, tmp_path: Path) -> Path:
    shutil.copytree(sound.run, tmp_path / "run.gradtap")
    return tmp_path / "run.gradtap"


def lose(run: Path, *arrays: str) -> None:
    for array in arrays:
        gone = list((run / "sessions/0000/gradients.zarr" / array).glob("c.*"))
        assert gone, array
        for file in gone:
            file.unlink()


def ranks_of(kind: str, name: str) -> list[str]:
    return [f"_{kind}/r{rank:05d}/{name}" for rank in range(3)]


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_column_is_made_again_or_named(wounded: Path, sound: Job, name: str) -> None:
    """The ranks' own rows have the same values; flags, which have more in the merged rows, are an error."""
    lose(wounded, f"_ledger/{name}")
    ledger = open_run(wounded).ledger
    if name == "flags":
        with pytest.raises(DamagedError, match="_ledger/flags.*missing"):
            ledger[name]
        with pytest.raises(DamagedError, match="_ledger/flags.*missing"):
            open_run(wounded).grad("mlp.bias", 4)
    else:
        assert np.array_equal(ledger[name], open_run(sound.run).ledger[name], equal_nan=name not in ("record", "state"))
    assert not verify(wounded).sound


@pytest.mark.parametrize("name", [field.name for field in RANK_FIELDS if field.name not in ("step", "state")])
def test_a_column_lost_everywhere_is_an_error(wounded: Path, name: str) -> None:
    """With the ranks' own rows gone too there is nothing left to read, which is no value."""
    lose(wounded, f"_ledger/{name}", *ranks_of("ledger", name))
    with pytest.raises(DamagedError, match=f"{name}.*missing"):
        open_run(wounded).ledger[name]


def test_rows_that_no_rank_has_are_an_error(wounded: Path) -> None:
    """The ranks have lost the column that says which rows there are: what was published cannot be made again."""
    lose(wounded, "_ledger/k", *ranks_of("ledger", "step"))
    with pytest.raises(DamagedError, match="_ledger/k.*missing"):
        open_run(wounded).ledger["k"]


@pytest.mark.parametrize("stat", [stat for stat in SUMMARY_STATS if stat != "hist"])
def test_a_lost_statistic_is_made_again_or_named(wounded: Path, sound: Job, stat: str) -> None:
    """From the ranks' own rows; without those it is an error."""
    lose(wounded, f"_summary/{stat}")
    assert np.allclose(open_run(wounded).norms(stat=stat).values, open_run(sound.run).norms(stat=stat).values)
    lose(wounded, *ranks_of("summary", stat))
    with pytest.raises(DamagedError, match=f"{stat}.*lacks row 0"):
        open_run(wounded).norms(stat=stat)


def test_a_lost_histogram_is_made_again_or_named(wounded: Path, sound: Job) -> None:
    """As the other statistics."""
    lose(wounded, "_summary/hist")
    want = open_run(sound.run).hist("mlp.weight", 2).histogram.counts
    assert np.array_equal(open_run(wounded).hist("mlp.weight", 2).histogram.counts, want)
    lose(wounded, *ranks_of("summary", "hist"))
    with pytest.raises(DamagedError, match="hist.*lacks row 1"):
        open_run(wounded).hist("mlp.weight", 2)


@pytest.mark.parametrize("name", [field.name for field in RANK_FIELDS])
def test_verify_finds_a_rank_s_lost_column(wounded: Path, name: str) -> None:
    """Whatever values it had, its file is missed."""
    lose(wounded, ranks_of("ledger", name)[1])
    assert not verify(wounded).sound
