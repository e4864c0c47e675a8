"""One session of a run: its plan, its paths, and whether it is live, closed or unclosed.

Here: `session.json`, read and checked before anything is allocated from it. Not here: which captures are complete
(`captures`), and the bytes of a chunk (`chunks`).
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradtap.config import Settings
from gradtap.encode.codecs import CODECS
from gradtap.errors import DamagedError, FormatVersionError, StoreError
from gradtap.plan.chunks import array_chunks, param_arrays
from gradtap.plan.schedule import Schedule
from gradtap.read.row_arrays import RowArrays
from gradtap.store.files import naming
from gradtap.store.lock import is_alive, read_lock
from gradtap.store.paths import SESSION_NAME, SessionPaths
from gradtap.store.rows import RowSpec, read_rows
from gradtap.store.schedule_log import read_schedule
from gradtap.store.session import SessionHead, read_head
from gradtap.types import ChunkPlan, SessionPlan

SessionState = Literal["live", "closed", "unclosed", "damaged"]
Signature = tuple[int, int, int]

MOST_CHUNK_BYTES = 2**30
MOST_INDEX_ENTRIES = 2**24
MOST_GROUPS = 10**6
MOST_STEPS = 2**62

CURE = "run `gradtap verify` on the run for the whole picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """What is said of one session, as of the moment it was asked for.

    `state`: "live" (a job holds it now), "closed" (ended in order), "unclosed" (its job is gone without closing).
    "damaged": its session.json does not read, so that nothing else is known and none of its steps are listed; `error`
    says why. `created`, `closed`: seconds since 1970-01-01 UTC. `captures` counts the complete ones.
    """

    name: str
    state: SessionState
    engine: str
    world: int
    groups: int
    settings: Mapping[str, Any]
    codec: str
    summary: str
    created: float
    closed: float | None
    captures: int
    incomplete: int
    first_step: int | None
    versions: Mapping[str, str]
    error: str | None = None


def file_signature(path: Path | str) -> Signature | None:
    """What changes when a file does (inode, size, time of change); None where there is no file.

    Raises `StoreError` where that cannot be told.
    """
    try:
        with naming("look at", path):
            stat = os.stat(path)
    except StoreError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Session:
    """One session folder, opened for reading. Cheap to make: reads `session.json` alone.

    Raises `StoreError` where the folder cannot be read and `DamagedError` where `session.json` is not sound.
    """

    def __init__(self, run: Path, name: str) -> None:
        if not SESSION_NAME.fullmatch(name):
            raise DamagedError(f"{run / 'run.json'} names a session {name!r}; a session is four to nine digits; {CURE}")
        self.run = run
        self.name = name
        self.paths = SessionPaths(run, name)
        self._lock = threading.Lock()
        self._schedule: tuple[Signature | None, Schedule | None] | None = None
        self._signature = file_signature(self.paths.session_json)
        self.head = read_head(self.paths)
        self.plan = self.head.plan
        self.nonce = self.head.nonce
        check_head(self.head, self.paths.session_json)
        check_plan(self.plan, self.paths.session_json)
        # Caches of this session alone: one on the class would keep the plans of closed runs alive.
        self.chunks_of = functools.lru_cache(maxsize=1024)(self._chunks_of)
        self.by_name = {alias: i for i, p in enumerate(self.plan.params) for alias in p.aliases}
        self.by_name |= {p.name: i for i, p in enumerate(self.plan.params)}
        self.arrays = RowArrays(self.paths, self.plan, self.groups)

    @property
    def world(self) -> int:
        """Number of ranks that write this session."""
        return self.plan.world

    @property
    def closed(self) -> float | None:
        """When the session was closed; None for one that is live, or whose job is gone."""
        with self._lock:
            if self.head.closed is None:
                seen = file_signature(self.paths.session_json)
                if seen != self._signature:
                    self.head, self._signature = read_head(self.paths), seen
            return self.head.closed

    @property
    def state(self) -> SessionState:
        """`live`, `closed` or `unclosed`, asked anew each time."""
        if self.closed is not None:
            return "closed"
        if self._held():
            return "live"
        # It may have been closed, and its lock given back, since the first look.
        return "closed" if self.closed is not None else "unclosed"

    def _held(self) -> bool:
        try:
            holder = read_lock(self.run)
        except DamagedError:
            return False
        if holder is None or holder.nonce != self.nonce:
            return False
        stale = self.head.settings.get("lock_stale")
        seconds = float(stale) if isinstance(stale, int | float) else Settings().lock_stale
        return is_alive(holder, seconds, may_write=False)

    @property
    def groups(self) -> int:
        """Number of the optimizer's parameter groups."""
        return int(self.head.engine["groups"])

    @property
    def capacity(self) -> int:
        """Captures for which the writer made room at first; 0 where it does not say."""
        value = self.head.settings.get("capacity")
        return value if type(value) is int and 0 < value <= MOST_INDEX_ENTRIES else 0

    def read(self, spec: RowSpec, start: int, stop: int) -> NDArray[Any]:
        """Rows `start` to `stop` of a row array; the fill where none is stored.

        Raises `DamagedError` for what does not read; in an open session only when it does not a moment later either.
        """
        return read_rows(self.paths.zarr, spec, start, stop, retry=self.head.closed is None)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule as of now; None before the session's first step. Raises `DamagedError`."""
        path = self.paths.schedule_log
        with self._lock:
            seen = file_signature(path)
            if self._schedule is None or self._schedule[0] != seen:
                found = read_schedule(path) if seen else None
                if found is not None and not 0 <= found.first_step < MOST_STEPS:
                    raise DamagedError(f"{path}: {found.first_step} is no step to begin with; {CURE}")
                self._schedule = seen, found
            return self._schedule[1]

    @property
    def first_step(self) -> int | None:
        """The step of ledger row 0; None before the session's first step."""
        schedule = self.schedule
        return None if schedule is None else schedule.first_step

    def _chunks_of(self, param: int) -> tuple[ChunkPlan, ...]:
        """All chunks of one parameter in the order of their elements.

        Raises `DamagedError` where they do not cover it exactly once: a hole would be read as uninitialised memory.
        """
        found = [c for array in param_arrays(self.plan, param) for c in array_chunks(self.plan, array)]
        found.sort(key=lambda c: c.start)
        at = 0
        for chunk in found:
            if chunk.start != at or chunk.stop <= at:
                break
            at = chunk.stop
        spec = self.plan.params[param]
        if at != spec.numel:
            raise DamagedError(
                f"{self.paths.session_json}: the arrays of {spec.name!r} do not cover it from element {at}; {CURE}"
            )
        return tuple(found)


def check_head(head: SessionHead, file: Path) -> None:
    """Refuses a codec that this version does not know, and numbers that no writer makes.

    The summary level and the settings are the writer's alone: the arrays themselves say what there is. Raises
    `FormatVersionError`, `DamagedError`.
    """
    if head.codec not in CODECS:
        raise FormatVersionError(
            f"{file}: the codec is {head.codec!r}, this gradtap knows {', '.join(CODECS)}; install a newer one: "
            "pip install --upgrade gradtap"
        )
    groups = head.engine.get("groups")
    if not (type(groups) is int and 0 <= groups <= MOST_GROUPS):
        raise DamagedError(f"{file}: {groups!r} is no number of parameter groups; {CURE}")
    name, settings = head.engine.get("name"), head.engine.get("settings", {})
    if not (isinstance(name, str) and isinstance(settings, dict)):
        raise DamagedError(f"{file}: {name!r} is no name of an engine, or {settings!r} not its settings; {CURE}")


def check_plan(plan: SessionPlan, file: Path) -> None:
    """Refuses a plan that no writer makes before its numbers size an allocation or its names reach a path.

    Raises `DamagedError`.
    """
    if plan.world < 1:
        raise DamagedError(f"{file}: a world of {plan.world} ranks; {CURE}")
    for array in plan.arrays:
        name = array.name
        if not name or "/" in name or "\\" in name or "\0" in name or name.startswith((".", "_")):
            raise DamagedError(f"{file}: an array is called {name!r}, which no writer makes; {CURE}")
        if array.dtype not in ("float32", "float64"):
            raise DamagedError(f"{file}: array {name!r} is of dtype {array.dtype!r}, which no writer makes; {CURE}")
        if not 0 <= array.param < len(plan.params):
            raise DamagedError(
                f"{file}: array {name!r} belongs to parameter {array.param}, which is not listed; {CURE}"
            )
        if min((array.time, *array.shape, *array.shard, *array.chunk)) < 1:
            raise DamagedError(f"{file}: array {name!r} has an extent below 1; {CURE}")
        if any(s % c for s, c in zip(array.shard, array.chunk, strict=True)):
            raise DamagedError(f"{file}: the chunks of {name!r} do not divide its shards; {CURE}")
        raw = array.chunk_numel * np.dtype(array.dtype).itemsize
        if raw > MOST_CHUNK_BYTES or array.entries * array.time > MOST_INDEX_ENTRIES:
            raise DamagedError(f"{file}: array {name!r} has chunks of {raw} bytes, {array.entries} a capture; {CURE}")
        if any(not 0 <= owner < plan.world for owner in array.owners):
            raise DamagedError(f"{file}: array {name!r} has an owner outside the {plan.world} ranks; {CURE}")
