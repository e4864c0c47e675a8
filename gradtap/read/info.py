"""Facts about a run for people and for the command line: sessions, parameters, steps, sizes on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtap.errors import DamagedError, StoreError
from gradtap.read.assemble import SessionReader
from gradtap.read.session import Session, SessionView
from gradtap.store.files import naming
from gradtap.store.runfile import RunFile

SIZES = ("raw_bytes", "stored_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run holds. Sizes in bytes.

    `elements` counts those of one capture, without the `not_selected` parameters that the selection in force at the
    newest step leaves out. `raw_bytes` and `stored_bytes` are those of the chunks of all complete captures, before and
    after encoding (raw: in the store's dtype, 4 or 8 bytes an element); `ratio` is raw to stored, NaN where nothing is
    stored. `index_bytes` is what the gradient arrays take on disk beside the chunks (shard indexes, room made ahead,
    metadata), `other_bytes` all else (summaries, ledger, journals).
    """

    path: Path
    name: str
    id: str
    tags: Mapping[str, Any]
    gradtap: str
    sessions: tuple[SessionView, ...]
    steps: int
    first_step: int | None
    last_step: int | None
    params: int
    frozen: int
    unoptimized: int
    not_selected: int
    elements: int
    raw_bytes: int
    stored_bytes: int
    index_bytes: int
    other_bytes: int

    @property
    def state(self) -> str:
        """State of the newest session: live, closed, unclosed or damaged; "empty" where there is none."""
        return self.sessions[-1].state if self.sessions else "empty"

    @property
    def ratio(self) -> float:
        """Raw bytes for each byte of stored chunks."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else float("nan")


def describe(
    path: Path,
    file: RunFile,
    readers: Sequence[SessionReader],
    steps: Sequence[int],
    damaged: Mapping[str, StoreError],
) -> RunInfo:
    """The facts of a run that is open; `damaged` has the sessions that do not read, and why.

    Raises `StoreError` where its folders cannot be listed.
    """
    params = readers[-1].session.plan.params if readers else ()
    out = left_out(readers[-1].session, steps[-1] if steps else None) if readers else frozenset()
    raw = stored = index = other = 0
    for reader in readers:
        before, after = chunk_bytes(reader)
        gradients, rest = _sizes(reader)
        raw, stored = raw + before, stored + after
        # A chunk may have been written since the folders were listed.
        index, other = index + max(0, gradients - after), other + rest
    return RunInfo(
        path=path,
        name=file.name,
        id=file.run,
        tags=file.tags,
        gradtap=file.gradtap,
        sessions=session_views(file, readers, damaged),
        steps=len(steps),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        params=sum(p.status == "captured" for p in params),
        frozen=sum(p.status == "frozen" for p in params),
        unoptimized=sum(p.status == "unoptimized" for p in params),
        not_selected=len(out),
        elements=sum(p.numel for p in params if p.stored and p.name not in out),
        raw_bytes=raw,
        stored_bytes=stored,
        index_bytes=index,
        other_bytes=other,
    )


def left_out(session: Session, step: int | None) -> frozenset[str]:
    """Stored parameters that the selection in force at a step leaves out; None for the session's first step.

    None of them where the schedule log does not read: the gradients themselves are read without it.
    """
    try:
        schedule = session.schedule
    except DamagedError:
        return frozenset()
    if schedule is None:
        return frozenset()
    select = schedule.change_at(schedule.first_step if step is None else step).select
    if not isinstance(select, list | tuple):
        return frozenset()
    return frozenset(p.name for p in session.plan.params if p.stored and p.name not in select)


def session_views(
    file: RunFile, readers: Sequence[SessionReader], damaged: Mapping[str, StoreError]
) -> tuple[SessionView, ...]:
    """What is known of each session in force, oldest first; looks at journals, and at no other file."""
    views = [view(reader) for reader in readers]
    everything = {seen.name: seen for seen in views} | {name: _lost(name, why) for name, why in damaged.items()}
    return tuple(everything[name] for name in file.sessions if name in everything)


def view(reader: SessionReader) -> SessionView:
    """What is known of one session now."""
    session, captures = reader.session, reader.captures
    captures.refresh()
    complete = int(np.count_nonzero(captures.steps >= 0))
    return SessionView(
        name=session.name,
        state=session.state,
        engine=str(session.head.engine.get("name", "")),
        world=session.plan.world,
        groups=session.groups,
        settings=session.head.engine.get("settings", {}),
        codec=session.head.codec,
        summary=session.head.summary,
        created=session.head.created,
        closed=session.closed,
        captures=complete,
        incomplete=captures.begun - complete,
        first_step=session.first_step,
        versions=session.head.versions,
    )


def _lost(name: str, error: StoreError) -> SessionView:
    return SessionView(
        name=name,
        state="damaged",
        engine="",
        world=0,
        groups=0,
        settings={},
        codec="",
        summary="",
        created=float("nan"),
        closed=None,
        captures=0,
        incomplete=0,
        first_step=None,
        versions={},
        error=str(error),
    )


def chunk_bytes(reader: SessionReader) -> tuple[int, int]:
    """Bytes of the chunks of all complete captures, before and after encoding."""
    first, steps = reader.session.first_step, reader.captures.steps
    rows = steps[steps >= 0] - (first or 0)
    if not rows.size:
        return 0, 0
    if first is not None and rows.min() >= 0:
        start, stop = int(rows.min()), int(rows.max()) + 1
        try:
            # The ledger repeats what the journals say, and reads in bulk.
            raw, stored = (reader.ledger.column(name, start, stop)[rows - start] for name in SIZES)
            return int(raw.sum()), int(stored.sum())
        except DamagedError:
            pass
    return _journaled_bytes(reader)


def _journaled_bytes(reader: SessionReader) -> tuple[int, int]:
    raw = stored = 0
    for capture in np.flatnonzero(reader.captures.steps >= 0).tolist():
        for rank in range(reader.session.plan.world):
            try:
                record = reader.captures.record(rank, capture)
            except StoreError:
                continue
            if record is not None:
                raw, stored = raw + record.raw_bytes, stored + record.stored_bytes
    return raw, stored


def _sizes(reader: SessionReader) -> tuple[int, int]:
    paths = reader.session.paths
    gradients = sum(_folder(paths.zarr / array.name) for array in reader.session.plan.arrays)
    return gradients, _folder(paths.root) - gradients


def _folder(root: Path) -> int:
    total = 0
    pending = [os.fspath(root)]
    while pending:
        folder = pending.pop()
        try:
            with naming("list", folder), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            # A temporary file or a folder may be gone since it was listed.
            if not isinstance(error.__cause__ or error, FileNotFoundError):
                raise
    return total
