"""What a store's place is like: space, file system, how fast it writes, reads and syncs, which runs are there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gradtap.errors import ERRORS, GradtapError, NotARunError, StoreError, problem_of

PROBE = 16 * 2**20
"""Bytes that the speed is measured with: a second on a slow disk, and more than a disk's own buffer takes at once."""

SMALL = 4096
SYNCS = 8


def store_facts(store: str) -> dict[str, Any]:
    """Facts of a folder of a run or of several; `error` where it is not there or cannot be looked into."""
    path = Path(store)
    facts: dict[str, Any] = {"store": store, "error": None, "exit_code": 0}
    try:
        if not path.exists():
            raise StoreError(f"{store} is not there; check that it is mounted, or give another folder")
        if not path.is_dir():
            raise StoreError(f"{store} is a file; give the folder of a run, or a folder of runs")
        usage = shutil.disk_usage(path)
        facts |= {
            "readable": os.access(path, os.R_OK | os.X_OK),
            "writable": os.access(path, os.W_OK | os.X_OK),
            "total_bytes": usage.total,
            "free_bytes": usage.free,
            "file_system": file_system(path),
        }
        return facts | {"speed": speed(_beside(path))} | _runs_facts(store)
    except OSError as error:
        code = problem_of(error).exit_code if isinstance(error, GradtapError) else problem_of(StoreError()).exit_code
        return facts | {"error": str(error), "exit_code": code}


def speed(folder: Path) -> dict[str, Any]:
    """Bytes a second of writing (with the sync at the end) and reading, and the median seconds of one small sync.

    Measured with a file that is gone afterwards. `error` where the folder cannot be written to.
    """
    block = os.urandom(PROBE)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".gradtap-doctor-") as file:
            started = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - started
            _forget(file.fileno())
            file.seek(0)
            started = time.perf_counter()
            whole = file.read() == block
            read = time.perf_counter() - started
            syncs = [_sync(file) for _ in range(SYNCS)]
    except OSError as error:
        return {"error": f"cannot write a file into {folder}: {error.strerror or error}"}
    if not whole:
        return {"error": f"what was written into {folder} came back changed"}
    return {
        "error": None,
        "write_bytes_per_s": PROBE / written,
        "read_bytes_per_s": PROBE / read,
        "fsync_seconds": statistics.median(syncs),
    }


def file_system(path: Path) -> str | None:
    """The type of the file system that a path is on, such as `ext4` or `nfs4`; None where that is not known."""
    try:
        where = os.path.realpath(path)
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    best, kind = "", None
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), before.split()[4])
        inside = mount == "/" or where == mount or where.startswith(mount + "/")
        # Of two on the same place the later one hides the other.
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def _beside(path: Path) -> Path:
    """Where a file disturbs nobody: beside a run, within a folder of runs."""
    from gradtap.read.discover import is_run

    with contextlib.suppress(OSError):
        if is_run(path) and os.access(path.absolute().parent, os.W_OK | os.X_OK):
            return path.absolute().parent
    return path


def _runs_facts(store: str) -> dict[str, Any]:
    """The runs, and the first error among them."""
    rows = _runs(store)
    facts: dict[str, Any] = {"runs": rows}
    for row in rows:
        if "error" in row:
            code = problem_of(ERRORS[row["error"]["slug"]]()).exit_code
            return facts | {"error": f"{row['name']}: {row['error']['detail']}", "exit_code": code}
    if not rows:
        error = NotARunError(f"there is no run in {store}")
        return facts | {"error": str(error), "exit_code": problem_of(error).exit_code}
    return facts


def _runs(store: str) -> list[dict[str, Any]]:
    from gradtap.query.runs import run_row
    from gradtap.read.catalog import Catalog

    catalog = Catalog([store])
    try:
        return [run_row(catalog, entry) for entry in catalog.entries()]
    finally:
        catalog.close()


def _sync(file: Any) -> float:
    started = time.perf_counter()
    file.write(b"\0" * SMALL)
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - started


def _forget(descriptor: int) -> None:
    # Else what is read back comes from memory.
    advise = getattr(os, "posix_fadvise", None)
    if advise is not None:
        with contextlib.suppress(OSError):
            advise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
