"""One session of a run: its plan, its paths, and whether it is live, closed or unclosed.

Here: `session.json`, read and checked before anything is allocated from it. Not here: which captures are complete
(`captures`), and the bytes of a chunk (`chunks`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradtap.config import Settings
from gradtap.encode.codecs import CODECS
from gradtap.errors import DamagedError, FormatVersionError
from gradtap.plan.chunks import array_chunks, param_arrays
from gradtap.plan.schedule import Schedule
from gradtap.store.lock import is_alive, read_lock
from gradtap.store.paths import SESSION_NAME, SessionPaths
from gradtap.store.row_specs import by_path, merged_specs, rank_specs
from gradtap.store.rows import RowSpec
from gradtap.store.schedule_log import read_schedule
from gradtap.store.session import SessionHead, read_head
from gradtap.types import ChunkPlan, SessionPlan

SessionState = Literal["live", "closed", "unclosed"]
Signature = tuple[int, int, int]

MOST_CHUNK_BYTES = 2**30
MOST_INDEX_ENTRIES = 2**24
MOST_GROUPS = 10**6
MOST_ROWS = 2**20
SUMMARY_LEVELS = ("none", "basic", "full")

CURE = "run `gradtap verify` on the run for the whole picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """What is said of one session, as of the moment it was asked for.

    `state`: "live" (a job holds it now), "closed" (ended in order), "unclosed" (its job is gone without closing).
    `created`, `closed`: seconds since 1970-01-01 UTC. `captures` counts the complete ones.
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


def file_signature(path: Path | str) -> Signature | None:
    """What changes when a file does (inode, size, time of change); None where there is no file."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Session:
    """One session folder, opened for reading. Cheap to make: reads `session.json` alone.

    Raises `StoreError` where the folder cannot be read and `DamagedError` where `session.json` is not sound.
    """

    def __init__(self, run: Path, name: str) -> None:
        if not (name.isascii() and SESSION_NAME.fullmatch(name)):
            raise DamagedError(f"{run / 'run.json'} names a session {name!r}; a session is four to nine digits; {CURE}")
        self.run = run
        self.name = name
        self.paths = SessionPaths(run, name)
        self._lock = threading.Lock()
        self._schedule: tuple[Signature | None, Schedule | None] | None = None
        self._signature = file_signature(self.paths.session_json)
        self.head = self._read_head()
        self.plan = self.head.plan
        self.nonce = self.head.nonce
        check_head(self.head, self.paths.session_json)
        check_plan(self.plan, self.paths.session_json)
        # Caches of this session alone: one on the class would keep the plans of closed runs alive.
        self.rank_rows = functools.lru_cache(maxsize=64)(self._rank_rows)
        self.chunks_of = functools.lru_cache(maxsize=1024)(self._chunks_of)
        self.by_name = {alias: i for i, p in enumerate(self.plan.params) for alias in p.aliases}
        self.by_name |= {p.name: i for i, p in enumerate(self.plan.params)}

    def _read_head(self) -> SessionHead:
        try:
            return read_head(self.paths)
        except (AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise DamagedError(
                f"{self.paths.session_json} is not a session's description ({error!r}); {CURE}"
            ) from error

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
                    self.head, self._signature = self._read_head(), seen
            return self.head.closed

    @property
    def state(self) -> SessionState:
        """`live`, `closed` or `unclosed`, asked anew each time."""
        if self.closed is not None:
            return "closed"
        try:
            holder = read_lock(self.run)
        except DamagedError:
            return "unclosed"
        if holder is None or holder.nonce != self.nonce:
            return "unclosed"
        stale = float(self.head.settings.get("lock_stale", Settings().lock_stale))
        return "live" if is_alive(holder, stale, may_write=False) else "unclosed"

    @property
    def schedule(self) -> Schedule | None:
        """The schedule as of now; None before the session's first step."""
        path = self.paths.schedule_log
        with self._lock:
            seen = file_signature(path)
            if self._schedule is None or self._schedule[0] != seen:
                self._schedule = seen, (read_schedule(path) if seen else None)
            return self._schedule[1]

    @property
    def first_step(self) -> int | None:
        """The step of ledger row 0; None before the session's first step."""
        schedule = self.schedule
        return None if schedule is None else schedule.first_step

    @functools.cached_property
    def rows(self) -> dict[str, RowSpec]:
        """The merged row arrays, by path."""
        return by_path(merged_specs(self.head.layout))

    def _rank_rows(self, rank: int) -> dict[str, RowSpec]:
        """One rank's row arrays, by path."""
        return by_path(rank_specs(self.head.layout, rank))

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
    """Refuses a codec or summary level that this version does not know, and sizes that no writer makes.

    Raises `FormatVersionError`, `DamagedError`.
    """
    for what, value, known in (("codec", head.codec, CODECS), ("summary level", head.summary, SUMMARY_LEVELS)):
        if value not in known:
            raise FormatVersionError(
                f"{file}: the {what} is {value!r}, this gradtap knows {', '.join(known)}; install a newer one: "
                "pip install --upgrade gradtap"
            )
    try:
        layout = head.layout
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{file}: engine or settings do not read ({error!r}); {CURE}") from error
    if not (0 <= layout.groups <= MOST_GROUPS and 1 <= layout.max_time <= MOST_ROWS):
        raise DamagedError(
            f"{file}: {layout.groups} parameter groups or {layout.max_time} rows a file are out of range; {CURE}"
        )


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
