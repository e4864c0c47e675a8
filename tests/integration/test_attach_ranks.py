"""attach on two ranks that do it wrong: each hears of it at once, and nothing half made is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from tests.support.launch import launch

TIMEOUT = 6.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meeting")


@pytest.fixture(scope="module")
def heard(place: Path) -> list[dict[str, Any]]:
    env = {"GRADTAP_ATTACH_TIMEOUT": str(TIMEOUT), "GRADTAP_MAX_TIME": "4", "GRADTAP_CAPACITY": "4"}
    return launch("tests.support.meeting:run", processes=2, folder=place, env=env, timeout=150)


@pytest.mark.parametrize(
    ("case", "words", "quick"),
    [
        ("not shared", "shared file system", False),
        ("cannot be written", "file", True),
        ("one rank has another optimizer", "LBFGS", True),
        ("one rank asks for something else", "no.such", True),
        ("one rank plans another layout", "another layout", True),
        ("other steps", "another every", True),
        ("other parameters", "another select", True),
    ],
)
def test_both_ranks_hear_why(heard: list[dict[str, Any]], case: str, words: str, quick: bool) -> None:
    """The rank that sees the fault and the one that does not raise the same reason; at once where no wait is needed."""
    for rank in (0, 1):
        kind, message, seconds = heard[rank][case]
        assert words in message, f"rank {rank} heard {kind}: {message}"
        assert seconds < (TIMEOUT / 2 if quick else TIMEOUT * 2)


def test_nothing_is_left_of_a_failed_attach(heard: list[dict[str, Any]], place: Path) -> None:
    """No session and no lock stay behind where the ranks did not meet."""
    assert heard
    for name in ("b", "c", "d", "g", "s", "t", "rank0/a"):
        store = place / f"{name}.gradtap"
        assert not list(store.glob("sessions/*")), name
        assert not (store / "lock").exists(), name


def test_attach_on_the_main_rank_only(heard: list[dict[str, Any]]) -> None:
    """Rank 0 says that it is alone, and why that usually is."""
    kind, message, _ = heard[0]["main rank only"]
    assert kind == "RendezvousError" and "main rank only" in message and "rank 1" in message


def test_attach_not_on_the_main_rank(heard: list[dict[str, Any]]) -> None:
    """The other rank does not wait for ever either."""
    kind, message, _ = heard[1]["not on the main rank"]
    assert kind == "RendezvousError" and "rank 0" in message


def test_a_right_attach_works_after_all_that(heard: list[dict[str, Any]], place: Path) -> None:
    """Failed attaches leave the ranks able to attach."""
    assert [each["right"] for each in heard] == [None, None]
    assert heard[0]["left"] == ["0000"]
    run = gradtap.open(place / "f.gradtap")
    assert list(run.steps) == [1, 2, 3]
    mean = np.full((3, 5), 2 * (2 + 0.5), np.float32)
    assert np.array_equal(np.asarray(run.grad("weight", 3)), mean)


def test_no_collective_while_capturing(heard: list[dict[str, Any]]) -> None:
    """Over attach, steps and close gradtap calls no collective; DDP's own were counted, so counting works."""
    for each in heard:
        assert each["calls"]["seen"] == []
        assert each["calls"]["all"] > 0
