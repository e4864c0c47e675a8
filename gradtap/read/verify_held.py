"""Checks that the columns of one table hold the same rows: a file that is gone reads as the fill, whatever it held.

The columns of a row are written together, so that what one of them holds the others must hold too. A replace array
says no more than that a chunk is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import GradtapError
from gradtap.read.report import Findings
from gradtap.read.session import Session
from gradtap.read.verify_journals import Journals
from gradtap.store.ledger_fields import FIELDS_BY_NAME
from gradtap.store.rows import RowSpec, held_rows

BLOCK_ROWS = 4096
COPY = "restore it from a copy of the run"

Tables = Mapping[str, list[RowSpec]]


def check_held(session: Session, journals: Journals, specs: Mapping[str, RowSpec], found: Findings) -> None:
    """All tables of a session that is closed. While one is written, or after a kill, some columns may be ahead."""
    if not journals.closed:
        return
    for columns in _tables(specs.values()).values():
        length = journals.extent if columns[0].axis == "capture" else journals.rows
        for start in range(0, length, BLOCK_ROWS):
            _check_block(session, columns, start, min(length, start + BLOCK_ROWS), found)


def _tables(specs: Iterable[RowSpec]) -> Tables:
    """The columns that are written together, by where they lie and whether they are written late."""
    tables: dict[str, list[RowSpec]] = {}
    for spec in specs:
        folder, _, name = spec.path.rpartition("/")
        field = FIELDS_BY_NAME.get(name)
        late = folder.startswith("_ledger") and field is not None and (field.late or field.merge == "merged")
        if folder:
            tables.setdefault(f"{folder} late" if late else folder, []).append(spec)
    return tables


def _check_block(session: Session, columns: list[RowSpec], start: int, stop: int, found: Findings) -> None:
    held: dict[str, NDArray[np.bool_]] = {}
    for spec in columns:
        try:
            held[spec.path] = held_rows(session.paths.zarr, spec, start, stop)
        except GradtapError:
            # What does not read is found where the rows themselves are.
            continue
    if not held:
        return
    wanted = np.logical_or.reduce(list(held.values()))
    for spec in columns:
        missing = np.flatnonzero(wanted & ~held[spec.path]) if spec.path in held else np.empty(0, int)
        for number in sorted({(start + int(at)) // spec.rows for at in missing}):
            rows = [start + int(at) for at in missing if (start + int(at)) // spec.rows == number]
            own = "/r" in spec.path
            cure = "these rows are lost" if own else "it repeats what the ranks' own rows hold, but for labels"
            file = spec.file(session.paths.zarr, number)
            what = f"rows {rows[0]} to {rows[-1]} are not there, though other columns of the same rows are"
            found.damage(file, what, f"{cure}; {COPY}")
