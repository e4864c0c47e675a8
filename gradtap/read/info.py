"""Facts about a run for people and for the command line: sessions, parameters, steps, sizes on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtap.errors import StoreError
from gradtap.read.assemble import SessionReader
from gradtap.read.session import SessionView
from gradtap.store.files import naming
from gradtap.store.runfile import RunFile

CAPTURED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run holds. Sizes in bytes.

    `elements` counts those of one full gradient; `captured_bytes` is what all complete captures take in the engine's
    own dtype (a selection is not taken off), `stored_bytes` what the gradient arrays take on disk, `other_bytes` all
    else (summaries, ledger, journals). `ratio` is captured to stored, NaN where nothing is stored.
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
    elements: int
    captured_bytes: int
    stored_bytes: int
    other_bytes: int

    @property
    def state(self) -> str:
        """State of the newest session: live, closed, unclosed or damaged; "empty" where there is none."""
        return self.sessions[-1].state if self.sessions else "empty"

    @property
    def ratio(self) -> float:
        """Bytes captured for each byte of gradient arrays on disk."""
        return self.captured_bytes / self.stored_bytes if self.stored_bytes else float("nan")


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
    views = tuple(view(reader) for reader in readers)
    everything = {seen.name: seen for seen in views} | {name: _lost(name, why) for name, why in damaged.items()}
    params = readers[-1].session.plan.params if readers else ()
    stored = other = captured = 0
    for reader, seen in zip(readers, views, strict=True):
        gradients, rest = _sizes(reader)
        stored, other = stored + gradients, other + rest
        own = [p for p in reader.session.plan.params if p.stored]
        captured += seen.captures * sum(p.numel * CAPTURED_BYTES.get(p.dtype, 4) for p in own)
    return RunInfo(
        path=path,
        name=file.name,
        id=file.run,
        tags=file.tags,
        gradtap=file.gradtap,
        sessions=tuple(everything[name] for name in file.sessions if name in everything),
        steps=len(steps),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        params=sum(p.status == "captured" for p in params),
        frozen=sum(p.status == "frozen" for p in params),
        unoptimized=sum(p.status == "unoptimized" for p in params),
        elements=sum(p.numel for p in params if p.stored),
        captured_bytes=captured,
        stored_bytes=stored,
        other_bytes=other,
    )


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
