from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from gradtap.demo.processes import CAPACITY, rank_variables, run_group, warnings_said
from gradtap.errors import CaptureError, problem_of

FAILS = """
import os, sys, time
work = sys.argv[1]
rank = os.environ["RANK"]
open(f"{work}/pid-{rank}", "w").write(str(os.getpid()))
if rank == "1":
    while not os.path.exists(f"{work}/pid-0"):
        time.sleep(0.01)
    sys.exit("rank one fell over")
time.sleep(60)
"""

WAITS = FAILS.replace('sys.exit("rank one fell over")', "pass")
SUCCEEDS = "import os, sys; open(f'{sys.argv[1]}/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"


def _environment(tmp_path: Path, source: str) -> dict[str, str]:
    (tmp_path / "fake_train.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_runs_and_the_group_ends_when_all_have(tmp_path: Path) -> None:
    """Three processes, each told its rank and the world."""
    run_group("fake_train", tmp_path, world=3, poll=lambda: None, environment=_environment(tmp_path, SUCCEEDS))
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3", "3", "3"]


def test_one_failing_process_ends_the_others_and_its_words_are_shown(tmp_path: Path) -> None:
    """The error carries the failing rank's standard error and exit code 10; rank 0 does not sleep on."""
    began = time.monotonic()
    with pytest.raises(CaptureError, match="process 1 of 2") as caught:
        run_group("fake_train", tmp_path, world=2, poll=lambda: None, environment=_environment(tmp_path, FAILS))
    assert "rank one fell over" in str(caught.value)
    assert problem_of(caught.value).exit_code == 10
    assert time.monotonic() - began < 30
    assert not _alive(int((tmp_path / "pid-0").read_text()))


@pytest.mark.parametrize(("number", "leaves"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_no_process_behind(tmp_path: Path, number: signal.Signals, leaves: type[BaseException]) -> None:
    """Ctrl-C or a time limit in the parent ends every child before it goes on up, and puts the handlers back."""
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]

    def interrupt_once_running() -> None:
        if all((tmp_path / f"pid-{rank}").exists() for rank in range(2)):
            os.kill(os.getpid(), number)

    with pytest.raises(leaves):
        run_group(
            "fake_train", tmp_path, world=2, poll=interrupt_once_running, environment=_environment(tmp_path, WAITS)
        )
    assert not any(_alive(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(2))
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == handlers


def test_a_killed_process_is_named_with_its_signal(tmp_path: Path) -> None:
    """The out-of-memory killer leaves no words, so the signal must be said."""
    source = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(CaptureError, match="SIGKILL"):
        run_group("fake_train", tmp_path, world=1, poll=lambda: None, environment=_environment(tmp_path, source))


def test_the_ranks_get_the_demos_small_capacity_and_no_outer_launchers_settings() -> None:
    """A shell's Accelerate settings would change the training; capacity 64 makes growth visible."""
    first, second = rank_variables({"ACCELERATE_MIXED_PRECISION": "bf16", "RANK": "7", "HOME": "/home"}, 2)
    assert "ACCELERATE_MIXED_PRECISION" not in first
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["GRADTAP_CAPACITY"] == first["GRADTAP_MAX_TIME"] == str(CAPACITY) == "64"
    assert first["HOME"] == "/home"


def test_what_gradtap_warned_of_is_found_among_what_others_said(tmp_path: Path) -> None:
    """Each message once, whatever stands before it on the line, whichever rank said it."""
    (tmp_path / "rank-0.err").write_text("[INFO] loading\n[WARNING] gradtap: slow disk\n")
    (tmp_path / "rank-1.err").write_text("gradtap: slow disk\ngradtap: late\n")
    assert warnings_said(tmp_path, 2) == ["gradtap: slow disk", "gradtap: late"]
