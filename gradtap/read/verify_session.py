"""Checks one session: schedule, metadata against the plan, row arrays, files that nobody knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradtap.encode.codecs import ChunkCodec
from gradtap.errors import DamagedError, GradtapError
from gradtap.plan.serial import pieces_attribute
from gradtap.read.assemble import SessionReader
from gradtap.read.chunks import FileCache
from gradtap.read.report import Findings
from gradtap.read.session import Session
from gradtap.read.verify_chunks import check_chunks
from gradtap.read.verify_journals import Journals
from gradtap.store.files import read_object
from gradtap.store.metadata import gradient_array, row_array
from gradtap.store.row_specs import STEP_PATH
from gradtap.store.rows import RowSpec, read_rows

COPY = "restore it from a copy of the run"
PLAIN = "gradtap reads on by the session's plan; for other Zarr readers, restore it from a copy of the run"
BLOCK_BYTES = 32 * 2**20
CHUNK_FILE = re.compile(r"c(\.\d+)+")


def check_session(session: Session, files: FileCache, found: Findings) -> None:
    """All checks of one session."""
    reader = SessionReader(session, files)
    state = session.state
    journals = Journals(reader, found, state=state)
    _check_schedule(session, found)
    journals.check()
    _check_metadata(session, found, captures=_visible(session, journals))
    check_chunks(reader, journals, found)
    _check_rows(session, journals, found)
    _list_unknown(session, found)
    reader.captures.close()


def _visible(session: Session, journals: Journals) -> int:
    """How many captures other Zarr readers must be able to see: all of a closed session, else the published ones."""
    if session.closed is not None:
        return journals.extent
    try:
        published = read_rows(session.paths.zarr, session.rows[STEP_PATH], 0, journals.extent)
    except GradtapError:
        return 0
    return int(np.flatnonzero(published >= 0)[-1]) + 1 if (published >= 0).any() else 0


def _check_schedule(session: Session, found: Findings) -> None:
    path = session.paths.schedule_log
    try:
        if session.schedule is None and any(session.paths.journal(0).parent.glob("r*")):
            found.note(path, "no step has been recorded yet", "nothing to do")
    except GradtapError as error:
        found.damage(path, str(error), COPY)


def _check_metadata(session: Session, found: Findings, *, captures: int) -> None:
    expected = dict(_expected(session))
    root = session.paths.zarr / "zarr.json"
    whole = _read(root, found)
    if whole is not None and whole.get("attributes", {}).get("pieces") != pieces_attribute(session.plan):
        found.damage(root, "the attribute `pieces` is not as planned: cut parameters would be joined wrongly", PLAIN)
    inline = ((whole or {}).get("consolidated_metadata") or {}).get("metadata") or {}
    for path, wanted in expected.items():
        file = session.paths.zarr / path / "zarr.json"
        own = _read(file, found)
        found.checked["arrays"] += 1
        if own is not None:
            _compare(file, own, wanted, found, least=captures if "_ledger" not in path else 0)
        if whole is not None and not path.startswith(("_ledger/r", "_summary/r")):
            if path not in inline:
                found.damage(root, f"the consolidated metadata lacks the array {path!r}", PLAIN)
            else:
                _compare(root, inline[path], wanted, found, least=captures if "_ledger" not in path else 0)


def _expected(session: Session) -> Iterator[tuple[str, dict[str, Any]]]:
    plan = session.plan
    for array in plan.arrays:
        codecs = ChunkCodec(session.head.codec, np.dtype(array.dtype).itemsize).zarr_codecs()
        yield array.name, gradient_array(array, plan.params[array.param], length=0, codecs=codecs)
    for spec in _specs(session):
        yield spec.path, row_array(spec, 0)


def _specs(session: Session) -> Iterator[RowSpec]:
    yield from session.rows.values()
    for rank in range(session.plan.world):
        if session.paths.journal(rank).exists():
            yield from session.rank_rows(rank).values()


def _compare(file: Path, own: Any, wanted: dict[str, Any], found: Findings, *, least: int) -> None:
    shape = own.get("shape") if isinstance(own, dict) else None
    if not (isinstance(shape, list) and shape and isinstance(shape[0], int)):
        found.damage(file, "it describes no array", PLAIN)
        return
    different = [
        key for key in wanted if (shape[1:] != wanted["shape"][1:] if key == "shape" else own.get(key) != wanted[key])
    ]
    if different:
        found.damage(file, f"{', '.join(different)} of the array are not as planned", PLAIN)
    elif shape[0] < least:
        found.damage(file, f"the array has length {shape[0]}, {least} captures are recorded", PLAIN)


def _read(file: Path, found: Findings) -> dict[str, Any] | None:
    try:
        return read_object(file)
    except GradtapError as error:
        found.damage(file, str(error), PLAIN)
        return None


def _check_rows(session: Session, journals: Journals, found: Findings) -> None:
    rows = journals.rows
    for spec in _specs(session):
        length = journals.extent if spec.axis == "capture" else rows
        for number in range(-(-length // spec.rows)):
            _check_file(session, spec, number, min(length, (number + 1) * spec.rows), found)
    _check_published(session, journals, found)


def _check_file(session: Session, spec: RowSpec, number: int, stop: int, found: Findings) -> None:
    block = max(1, BLOCK_BYTES // max(1, spec.row_bytes))
    try:
        for start in range(number * spec.rows, stop, block):
            read_rows(session.paths.zarr, spec, start, min(stop, start + block))
    except GradtapError as error:
        derived = not spec.path.startswith(("_ledger/r", "_summary/r"))
        cure = "it repeats what the ranks' own rows and journals hold" if derived else "these rows are lost"
        found.damage(spec.file(session.paths.zarr, number), str(error), f"{cure}; {COPY}")


def _check_published(session: Session, journals: Journals, found: Findings) -> None:
    spec = session.rows[STEP_PATH]
    try:
        published = np.asarray(read_rows(session.paths.zarr, spec, 0, journals.extent))
    except DamagedError:
        return
    for capture in np.flatnonzero(published != journals.steps[: len(published)]):
        step, says = int(journals.steps[capture]), int(published[capture])
        file = spec.file(session.paths.zarr, int(capture) // spec.rows)
        if says >= 0 and journals.whole and capture not in journals.unreadable:
            what = f"capture {capture} is published as step {says}, the journals say " + (
                f"step {step}" if step >= 0 else "that it is not complete"
            )
            found.damage(file, what, COPY, step=says)
        elif says < 0 and session.closed is not None:
            what = f"capture {capture} (step {step}) is complete and not published"
            found.damage(file, what, f"gradtap reads it; for other Zarr readers, {COPY}", step=step)


def _list_unknown(session: Session, found: Findings) -> None:
    arrays = {array.name for array in session.plan.arrays} | {spec.path for spec in _specs(session)}
    groups = {"", "_ledger", "_summary"} | {path.rpartition("/")[0] for path in arrays}
    for file in sorted(session.paths.zarr.rglob("*")):
        inside = file.relative_to(session.paths.zarr)
        folder = inside.parent.as_posix().removeprefix(".")
        if file.is_dir():
            known = inside.as_posix() in arrays | groups
        else:
            known = file.name == "zarr.json" or (folder in arrays and CHUNK_FILE.fullmatch(file.name) is not None)
        if known or file.is_dir():
            continue
        if file.name.startswith(".") and file.name.endswith(".tmp"):
            if session.state != "live":
                found.note(file, "a temporary file that a killed job left", "it may be deleted")
            continue
        found.note(file, "a file that gradtap did not write", "readers ignore it; delete it if it is not wanted")
