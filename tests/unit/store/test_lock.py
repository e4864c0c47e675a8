"""The run's lock: who is alive, taking over the dead, and races."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gradtap.errors import DamagedError, LockedError, StoreError
from gradtap.store import lock
from gradtap.store.lock import REBOOT, RunLock, is_alive, process_start, read_lock


def leave(run_dir: Path, **changes: Any) -> Path:
    """A lock file as another job would leave it: this process, unless changed."""
    holder = {
        "nonce": "dead",
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid": os.getpid(),
        "start": process_start(os.getpid()),
        "space": os.readlink("/proc/self/ns/pid"),
        "since": 1000.0,
        "heartbeat": 2000.0,
    }
    path = run_dir / "lock"
    path.write_text(json.dumps(holder | changes))
    return path


def gone() -> int:
    """A process number that was in use and is free now."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_lock_is_written_and_released(tmp_path: Path) -> None:
    """The lock names this process while it is held, and the folder is empty afterwards."""
    held = RunLock.acquire(tmp_path / "run", "n1", stale_after=60)
    holder = read_lock(tmp_path / "run")
    assert holder is not None
    assert (holder.nonce, holder.pid, holder.host) == ("n1", os.getpid(), socket.gethostname())
    assert holder.start == process_start(os.getpid())
    assert is_alive(holder, 60)
    held.release()
    held.release()
    assert read_lock(tmp_path / "run") is None
    assert os.listdir(tmp_path / "run") == []


def test_a_live_job_keeps_the_run(tmp_path: Path) -> None:
    """A second job is told host, process, since when, the last heartbeat, and what to do."""
    leave(tmp_path)
    with pytest.raises(LockedError) as caught:
        RunLock.acquire(tmp_path, "n2", stale_after=0)
    message = str(caught.value)
    for part in (
        f"process {os.getpid()} on {socket.gethostname()}",
        "since 1970-01-01 00:16:40 UTC",
        "last heartbeat 1970-01-01 00:33:20 UTC",
        "record to another path",
        f"delete {tmp_path}/lock",
    ):
        assert part in message
    holder = read_lock(tmp_path)
    assert holder is not None and holder.nonce == "dead"


def test_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    """A holder whose process is gone loses the run, however fresh its heartbeat."""
    leave(tmp_path, pid=gone(), heartbeat=time.time())
    held = RunLock.acquire(tmp_path, "n2", stale_after=1e9)
    holder = read_lock(tmp_path)
    assert holder is not None and holder.nonce == "n2"
    assert os.listdir(tmp_path) == ["lock"]
    held.release()


def test_a_reused_process_number_is_not_the_holder(tmp_path: Path) -> None:
    """A process with the holder's number but another start is another process."""
    leave(tmp_path, start=(process_start(os.getpid()) or 0) + 1)
    RunLock.acquire(tmp_path, "n2", stale_after=1e9).release()


def test_a_zombie_does_not_hold_a_run(tmp_path: Path) -> None:
    """A killed process that its parent has not waited for counts as dead."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = process_start(child.pid)
    leave(tmp_path, pid=child.pid, start=start)
    holder = read_lock(tmp_path)
    assert holder is not None and is_alive(holder, 60)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(holder, 60)
    child.wait()


def test_another_boot_of_this_host_is_dead(tmp_path: Path) -> None:
    """A lock from before the host started anew is taken over; one too young for that is another machine's."""
    path = leave(tmp_path, boot="another")
    with pytest.raises(LockedError):
        RunLock.acquire(tmp_path, "n2", stale_after=1e9)
    old = path.stat().st_mtime - REBOOT - 1
    os.utime(path, (old, old))
    RunLock.acquire(tmp_path, "n2", stale_after=1e9).release()


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"space": "pid:[1]"}])
def test_elsewhere_the_age_of_the_lock_file_decides(tmp_path: Path, changes: dict[str, str]) -> None:
    """Of another host or container, only the lock file's age counts, not the times that it holds."""
    path = leave(tmp_path, pid=gone(), heartbeat=time.time() + 1e6, **changes)
    holder = read_lock(tmp_path)
    assert holder is not None and is_alive(holder, 60)
    with pytest.raises(LockedError):
        RunLock.acquire(tmp_path, "n2", stale_after=60)
    old = path.stat().st_mtime - 61
    os.utime(path, (old, old))
    assert not is_alive(holder, 60)
    RunLock.acquire(tmp_path, "n2", stale_after=60).release()
    assert os.listdir(tmp_path) == []


def test_the_age_does_not_trust_this_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong clock of this process does not make a live job on another host look dead."""
    leave(tmp_path, host="elsewhere")
    holder = read_lock(tmp_path)
    assert holder is not None
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert is_alive(holder, 60)


def test_a_read_only_folder_can_still_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be written, a reader falls back on its clock instead of failing."""
    path = leave(tmp_path, host="elsewhere")
    holder = read_lock(tmp_path)
    assert holder is not None

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lock.files, "open_temp", refuse)
    assert is_alive(holder, 60)
    os.utime(path, (1, 1))
    assert not is_alive(holder, 60)


def test_heartbeat_renews_the_file(tmp_path: Path) -> None:
    """A heartbeat moves the file's time and the time in it, and keeps everything else."""
    held = RunLock.acquire(tmp_path, "n1", stale_after=60)
    before = read_lock(tmp_path)
    os.utime(tmp_path / "lock", (1, 1))
    held.heartbeat()
    after = read_lock(tmp_path)
    assert before is not None and after is not None
    assert (tmp_path / "lock").stat().st_mtime > 1e6
    assert after.heartbeat >= before.heartbeat and after.since == before.since and after.nonce == "n1"
    held.release()


@pytest.mark.parametrize("call", ["heartbeat", "release"])
def test_a_lost_lock_is_noticed_and_left_alone(tmp_path: Path, call: str) -> None:
    """A lock that another job took, or that was removed, is an error, and the other job's lock stays."""
    held = RunLock.acquire(tmp_path, "n1", stale_after=60)
    leave(tmp_path, nonce="other", pid=4321)
    with pytest.raises(LockedError, match=r"taken over .* by process 4321 on"):
        getattr(held, call)()
    holder = read_lock(tmp_path)
    assert holder is not None and holder.nonce == "other"
    (tmp_path / "lock").unlink()
    held = RunLock.acquire(tmp_path, "n1", stale_after=60)
    (tmp_path / "lock").unlink()
    with pytest.raises(LockedError, match="was removed"):
        getattr(held, call)()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"nonce": 3}'])
def test_a_lock_that_does_not_read_is_never_free(tmp_path: Path, text: str) -> None:
    """A damaged lock is an error for who wants to take it, not a free run."""
    (tmp_path / "lock").write_text(text)
    with pytest.raises(DamagedError, match="lock"):
        RunLock.acquire(tmp_path, "n1", stale_after=0)
    assert (tmp_path / "lock").read_text() == text


def test_a_run_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the place of the folder is a StoreError naming it."""
    (tmp_path / "run").touch()
    with pytest.raises(StoreError, match="/run"):
        RunLock.acquire(tmp_path / "run", "n1", stale_after=60)


def test_of_two_jobs_that_take_over_at_once_one_wins(tmp_path: Path) -> None:
    """Two processes race over 40 dead locks: each gets one winner, and the lock is the winner's."""
    dead = gone()
    for i in range(40):
        (tmp_path / f"run{i}").mkdir()
        leave(tmp_path / f"run{i}", pid=dead)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gradtap.errors import LockedError\n"
        "from gradtap.store.lock import RunLock\n"
        "folder, me = Path(sys.argv[1]), sys.argv[2]\n"
        "(folder / f'ready{me}').touch()\n"
        "while not (folder / 'ready0').exists() or not (folder / 'ready1').exists():\n"
        "    pass\n"
        "for i in range(40):\n"
        "    try:\n"
        "        RunLock.acquire(folder / f'run{i}', f'nonce{me}', stale_after=60)\n"
        "        print(1)\n"
        "    except LockedError:\n"
        "        print(0)\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    # Both must live until both have tried: a winner that ended would rightly lose its lock.
    lines = [[racer.stdout.readline().strip() for _ in range(41)] for racer in racers if racer.stdout]
    holders = [read_lock(tmp_path / f"run{i}") for i in range(40)]
    for racer in racers:
        racer.communicate(timeout=60)
    assert [one[-1] for one in lines] == ["done", "done"]
    wins = [[int(word) for word in one[:-1]] for one in lines]
    assert [a + b for a, b in zip(*wins, strict=True)] == [1] * 40
    for i, holder in enumerate(holders):
        assert holder is not None and holder.nonce == ("nonce0" if wins[0][i] else "nonce1")
        assert os.listdir(tmp_path / f"run{i}") == ["lock"]


def test_a_takeover_without_folder_locks_spares_a_newer_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders cannot be locked, a job that judged an old lock does not remove its successor's."""

    def refuse(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    leave(tmp_path, pid=gone())
    real, calls = lock.is_alive, 0

    def overtaken(holder: lock.LockHolder, stale_after: float) -> bool:
        nonlocal calls
        calls += 1
        alive = real(holder, stale_after)
        leave(tmp_path, nonce="faster")
        return alive

    monkeypatch.setattr(lock, "is_alive", overtaken)
    with pytest.raises(LockedError):
        RunLock.acquire(tmp_path, "n2", stale_after=60)
    holder = read_lock(tmp_path)
    assert calls == 1 and holder is not None and holder.nonce == "faster"
    assert os.listdir(tmp_path) == ["lock"]


def test_deciding_waits_for_another_that_decides(tmp_path: Path) -> None:
    """While another job holds the folder to decide, acquiring waits, and then goes on."""
    folder = os.open(tmp_path, os.O_RDONLY)
    lock.fcntl.flock(folder, lock.fcntl.LOCK_EX)
    taken = threading.Event()

    def attempt() -> None:
        RunLock.acquire(tmp_path, "n1", stale_after=60)
        taken.set()

    thread = threading.Thread(target=attempt)
    thread.start()
    assert not taken.wait(0.2)
    assert os.listdir(tmp_path) == []
    os.close(folder)
    thread.join(timeout=30)
    assert taken.is_set()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    """Of eight threads one gets the run: a lock of this very process is alive."""
    outcomes: list[str] = []

    def attempt(i: int) -> None:
        try:
            RunLock.acquire(tmp_path, f"n{i}", stale_after=60)
            outcomes.append("held")
        except LockedError:
            outcomes.append("locked")

    threads = [threading.Thread(target=attempt, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held"] + ["locked"] * 7


def test_a_child_forked_within_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    """A data loader's worker has a copy of the descriptor and outlives the block; others can decide all the same."""
    stop, waiting = os.pipe()
    with lock._deciding(tmp_path):
        child = os.fork()
        if child == 0:  # pragma: no cover
            os.close(waiting)
            os.read(stop, 1)
            os._exit(0)
    try:
        folder = os.open(tmp_path, os.O_RDONLY)
        lock.fcntl.flock(folder, lock.fcntl.LOCK_EX | lock.fcntl.LOCK_NB)
        os.close(folder)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child lives"
    finally:
        os.close(waiting)
        os.waitpid(child, 0)
        os.close(stop)
