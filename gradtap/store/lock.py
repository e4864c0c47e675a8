"""One live job for a run: the file `lock` in the run's folder, its heartbeat, and taking over what a dead job left.

On one host a holder is alive when its process is. From another host only the heartbeat shows: the age of the lock
file against a file written just now in the same folder, so that no two clocks are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gradtap.errors import DamagedError, LockedError, StoreError
from gradtap.store import files

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "lock"

DECIDING = 5.0
"""Seconds to wait for another process that is deciding about the lock. The exclusive create guards what follows."""

REBOOT = 30.0
"""Seconds in which no machine is down and up again: a younger lock of another boot is another machine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """Who holds a run. `start` is in clock ticks since boot, `since` and `heartbeat` in Unix seconds by its clock.

    `space` names the holder's process number space (two containers of one host number processes apart); empty
    where it is not known. `path` is the lock file.
    """

    nonce: str
    host: str
    boot: str
    pid: int
    start: int
    space: str
    since: float
    heartbeat: float
    path: Path

    def describe(self) -> str:
        """Host, process, since when and the last heartbeat, for a message."""
        return f"process {self.pid} on {self.host}, since {_stamp(self.since)}, last heartbeat {_stamp(self.heartbeat)}"


class RunLock:
    """The lock of a run, held by this process. Made by `acquire`."""

    def __init__(self, run_dir: Path, holder: LockHolder) -> None:
        """Stand for a lock file that is already in place. Use `acquire`."""
        self.run_dir = run_dir
        self.holder = holder
        self._held = True

    @classmethod
    def acquire(cls, run_dir: Path, nonce: str, *, stale_after: float) -> RunLock:
        """Take the run for this process; the folder is made where it is missing.

        A lock that a dead job left behind is taken over; `stale_after` is the seconds without a heartbeat after
        which a job on another host counts as dead. Raises `LockedError` saying who holds the run, `StoreError`
        where the folder cannot be written, `DamagedError` for a lock file that cannot be read.
        """
        files.make_dirs(run_dir)
        ours = _ourselves(run_dir, nonce)
        with _deciding(run_dir):
            holder = _read_or_explain(run_dir)
            if holder is not None:
                if is_alive(holder, stale_after):
                    raise _locked(holder)
                _remove(holder)
            created = files.create_new(ours.path, _encode(ours), sync=True)
            found = read_lock(run_dir)
        if not created or found is None or found.nonce != nonce:
            raise _locked(found) if found else StoreError(f"{ours.path} vanished while it was taken; try again")
        return cls(run_dir, ours)

    def heartbeat(self) -> None:
        """Show that this job lives. Raises `LockedError` when the lock is no longer ours, `StoreError` on failure."""
        with _deciding(self.run_dir):
            self._check_ours()
            self.holder = replace(self.holder, heartbeat=time.time())
            files.write_atomic(self.holder.path, _encode(self.holder))

    def release(self) -> None:
        """Give the run back; a second call does nothing.

        Raises `LockedError` when the lock is no longer ours (it is then left alone), `StoreError` on failure.
        """
        if not self._held:
            return
        with _deciding(self.run_dir):
            self._held = False
            self._check_ours()
            with files.naming("remove", self.holder.path):
                self.holder.path.unlink()

    def _check_ours(self) -> None:
        found = read_lock(self.run_dir)
        if found is None:
            raise LockedError(
                f"{self.holder.path} was removed while this job was writing the run; another job may have begun. "
                "Stop one of them, then run `gradtap verify`"
            )
        if found.nonce != self.holder.nonce:
            raise LockedError(
                f"the lock of {self.run_dir} was taken over while this job was writing the run, by {found.describe()}. "
                "Stop one of them, then run `gradtap verify`"
            )


def read_lock(run_dir: Path) -> LockHolder | None:
    """Who holds the run, or None for nobody. Whether the holder is alive: `is_alive`.

    Raises `StoreError` for a lock that cannot be read, `DamagedError` for one that is not what gradtap writes.
    """
    path = run_dir / LOCK_NAME
    try:
        data = files.read_object(path)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    return LockHolder(
        nonce=files.field_of(data, "nonce", str, path),
        host=files.field_of(data, "host", str, path),
        boot=files.field_of(data, "boot", str, path),
        pid=files.field_of(data, "pid", int, path),
        start=files.field_of(data, "start", int, path),
        space=files.field_of({"space": "", **data}, "space", str, path),
        since=files.field_of({"since": data.get("heartbeat"), **data}, "since", float, path),
        heartbeat=files.field_of(data, "heartbeat", float, path),
        path=path,
    )


def is_alive(holder: LockHolder, stale_after: float, *, may_write: bool = True) -> bool:
    """Whether the holder still runs, as far as can be told from here.

    Same host and boot: its process is there, with the same start. Another host (or container): alive until its lock
    file is `stale_after` seconds old. The same host's name with another boot is most often a machine that was started
    anew, yet may be another machine of that name: alive for `REBOOT` seconds at most. Ages are by the clock of the file
    system, which takes writing a file beside the lock; `may_write=False`, for readers, makes do with this host's clock.
    Raises `StoreError` for a lock file that cannot be looked at.
    """
    same_space = not holder.space or holder.space == _process_space()
    if holder.host == socket.gethostname() and holder.boot and _boot():
        if holder.boot != _boot():
            stale_after = min(stale_after, REBOOT)
            same_space = False
        if same_space:
            return process_start(holder.pid) == holder.start
    # Far in the future is no sign of life either: the clock was set back since.
    return abs(_age(holder.path, may_write=may_write)) <= stale_after


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where it is gone, or dead and only not yet waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def _ourselves(run_dir: Path, nonce: str) -> LockHolder:
    now = time.time()
    return LockHolder(
        nonce=nonce,
        host=socket.gethostname(),
        boot=_boot(),
        pid=os.getpid(),
        start=process_start(os.getpid()) or 0,
        space=_process_space(),
        since=now,
        heartbeat=now,
        path=run_dir / LOCK_NAME,
    )


def _encode(holder: LockHolder) -> bytes:
    fields = asdict(holder)
    del fields["path"]
    return json.dumps(fields).encode() + b"\n"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _process_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _age(path: Path, *, may_write: bool) -> float:
    try:
        written = path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
    except OSError as error:
        raise files.store_error("look at", path, error) from error
    return (_folder_now(path) if may_write else time.time()) - written


def _folder_now(path: Path) -> float:
    try:
        fd, temp = files.open_temp(path)
    except OSError:
        # A reader of a folder that is not writable has nothing better than its own clock.
        return time.time()
    try:
        # Written, not only created: some servers stamp a new file with the client's clock.
        os.write(fd, b"\n")
        os.fsync(fd)
        return os.fstat(fd).st_mtime
    except OSError as error:
        raise files.store_error("write", temp, error) from error
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            temp.unlink()


@contextlib.contextmanager
def _deciding(run_dir: Path) -> Iterator[None]:
    with files.naming("open run", run_dir):
        fd = os.open(run_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Network file systems may refuse this on a folder. The exclusive create and the nonces still hold then.
        with contextlib.suppress(OSError):
            _wait_for(fd)
        yield
    finally:
        # A process forked meanwhile (a data loader's worker) holds a copy of the descriptor, and with it the lock,
        # for as long as it lives: closing ours would not let go.
        with contextlib.suppress(OSError):
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _wait_for(fd: int) -> None:
    """The folder's lock, or none where somebody keeps it for longer than any decision takes: a stopped process, say."""
    deadline = time.monotonic() + DECIDING
    while fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _remove(dead: LockHolder) -> None:
    # Moved away first and looked at then: where the folder cannot be locked, another job may have taken over already.
    aside = dead.path.with_name(f".{LOCK_NAME}.{dead.nonce[:16]}.{os.getpid()}.tmp")
    with files.naming("take over", dead.path), contextlib.suppress(FileNotFoundError):
        os.rename(dead.path, aside)
        taken = files.field_of(files.read_object(aside), "nonce", str, aside)
        if taken != dead.nonce:
            files.publish_new(aside, dead.path)
        aside.unlink(missing_ok=True)


def _read_or_explain(run_dir: Path) -> LockHolder | None:
    try:
        return read_lock(run_dir)
    except DamagedError as error:
        raise DamagedError(
            f"{error}; who holds the run cannot be told. If no job writes it, delete that file"
        ) from error


def _locked(holder: LockHolder) -> LockedError:
    return LockedError(
        f"{holder.path.parent} is being written by another job: {holder.describe()}. Wait for it to end, stop it, or "
        f"record to another path. If that job is certainly gone, delete {holder.path}"
    )


def _stamp(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"
