"""Checks the rows of a session: that they read, that what was published is what the journals and the ranks say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from gradtap import words
from gradtap.errors import DamagedError, GradtapError
from gradtap.read.report import Findings
from gradtap.read.session import Session
from gradtap.read.verify_held import check_held
from gradtap.read.verify_journals import Journals
from gradtap.store.journal import JournalReader
from gradtap.store.row_metadata import RANK_PATH
from gradtap.store.row_specs import STEP_PATH, rank_prefix
from gradtap.store.rows import RowSpec

COPY = "restore it from a copy of the run"
BLOCK_BYTES = 32 * 2**20
BLOCK_ROWS = 4096
SHOWN = 8


class Published:
    """`_step` as it was before anything else was looked at: a capture published later is not missing."""

    def __init__(self, session: Session) -> None:
        self.steps: NDArray[np.int64] = np.empty(0, np.int64)
        try:
            self.spec = session.arrays.get(STEP_PATH)
            if self.spec is not None:
                self.steps = np.array(session.read(self.spec, 0, _most_captures(session)), np.int64)
        except GradtapError:
            # Said by the checks of metadata and of rows.
            self.spec = None

    def reach(self, extent: int) -> int:
        """The highest capture published + 1, of those that the journals know."""
        there = np.flatnonzero(self.steps[:extent] >= 0)
        return int(there[-1]) + 1 if there.size else 0


def _most_captures(session: Session) -> int:
    """How many captures any journal has room for now."""
    most = 0
    for rank in range(session.plan.world):
        if session.paths.journal(rank).exists():
            try:
                with JournalReader(session.paths.journal(rank)) as journal:
                    most = max(most, journal.slots)
            except GradtapError:
                continue
    return most


def check_rows(
    session: Session, journals: Journals, published: Published, specs: Mapping[str, RowSpec], found: Findings
) -> None:
    """All rows of the arrays in `specs`."""
    for spec in specs.values():
        length = journals.extent if spec.axis == "capture" else journals.rows
        for number in range(-(-length // spec.rows)):
            _check_file(session, spec, number, min(length, (number + 1) * spec.rows), found)
    check_held(session, journals, specs, found)
    _check_published(session, journals, published, found)
    if journals.closed and "_ledger/step" in specs:
        _check_ledger(session, journals.rows, specs, found)


def _check_file(session: Session, spec: RowSpec, number: int, stop: int, found: Findings) -> None:
    block = max(1, BLOCK_BYTES // max(1, spec.row_bytes))
    try:
        for start in range(number * spec.rows, stop, block):
            session.read(spec, start, min(stop, start + block))
    except GradtapError as error:
        own = RANK_PATH.fullmatch(spec.path) is not None
        cure = "these rows are lost" if own else "it repeats what the ranks' own rows and journals hold"
        found.damage(spec.file(session.paths.zarr, number), str(error), f"{cure}; {COPY}")


def _check_published(session: Session, journals: Journals, published: Published, found: Findings) -> None:
    spec = published.spec
    if spec is None:
        return
    steps = published.steps[: len(journals.steps)]
    for capture in np.flatnonzero(steps != journals.steps[: len(steps)]):
        step, says = int(journals.steps[capture]), int(steps[capture])
        file = spec.file(session.paths.zarr, int(capture) // spec.rows)
        if says >= 0 and journals.whole and capture not in journals.unreadable:
            what = f"capture {capture} is published as step {says}, the journals say " + (
                f"step {step}" if step >= 0 else "that it is not complete"
            )
            found.damage(file, what, COPY, step=says)
        elif says < 0 and journals.closed:
            what = f"capture {capture} (step {step}) is complete and not published"
            found.damage(file, what, f"gradtap reads it; for other Zarr readers, {COPY}", step=step)


def _check_ledger(session: Session, rows: int, specs: Mapping[str, RowSpec], found: Findings) -> None:
    """Which rows the merged ledger of a closed session has, and which the ranks have."""
    merged = specs["_ledger/step"]
    ranks = [specs.get(f"{rank_prefix('ledger', rank)}/step") for rank in range(session.plan.world)]
    lacking: dict[tuple[int, ...], list[int]] = {}
    for start in range(0, rows, BLOCK_ROWS):
        stop = min(rows, start + BLOCK_ROWS)
        try:
            held = session.read(merged, start, stop)
            own = [None if spec is None else session.read(spec, start, stop) for spec in ranks]
        except DamagedError:
            # Rows that do not read have been found already.
            continue
        if any(steps is None for steps in own):
            continue
        for at in _not_alike(held, np.array(own)):
            row, steps = start + at, [int(steps[at]) for steps in own if steps is not None]
            file = merged.file(session.paths.zarr, row // merged.rows)
            if absent := tuple(rank for rank, step in enumerate(steps) if step < 0):
                lacking.setdefault(absent, []).append(max(steps))
            elif held[at] < 0:
                cure = f"gradtap reads the ranks' own rows in its place; for other Zarr readers, {COPY}"
                found.damage(file, f"ledger row {row} is missing, though every rank has it", cure, step=steps[0])
            else:
                what = f"ledger row {row} is of step {held[at]}, the ranks' own are of {sorted(set(steps))}"
                found.damage(file, what, COPY, step=int(held[at]))
    for absent, missing in lacking.items():
        shown = ", ".join(map(str, missing[:SHOWN])) + (f" and {len(missing) - SHOWN} more" if missing[SHOWN:] else "")
        what = f"{words.ranks(absent)} wrote no ledger row for steps {shown}"
        found.note(session.paths.zarr / "_ledger", what, "nothing to do: what the other ranks wrote is served")


def _not_alike(merged: NDArray[np.int64], ranks: NDArray[np.int64]) -> Iterator[int]:
    some = (ranks >= 0).any(axis=0)
    yield from np.flatnonzero(some & ((ranks != merged).any(axis=0))).tolist()
