"""Checks the chunks of one session against the checksums in the journals, and the seals of finished shards."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradtap.encode.checksum import crc32c
from gradtap.errors import DamagedError, GradtapError
from gradtap.plan.chunks import rank_chunks
from gradtap.read.assemble import SessionReader
from gradtap.read.chunks import Handle
from gradtap.read.report import Findings
from gradtap.read.verify_journals import Journals
from gradtap.read.verify_norms import NormSums
from gradtap.store.files import pread_all
from gradtap.store.journal import JournalRecord
from gradtap.store.shard import PAIR, is_sealed, read_entry, seal_crc
from gradtap.types import ChunkPlan

LOST = "the gradient of this parameter at this step is lost; restore the file from a copy of the run"
COPY = "restore the file from a copy of the run"

BLOCK_BYTES = 16 * 2**20
BLOCK_CAPTURES = 1024


def check_chunks(reader: SessionReader, journals: Journals, published: NDArray[np.int64], found: Findings) -> None:
    """Every chunk of every committed record, and the seals of a session that was closed when the check began.

    A deep check also compares the norms of the captures that `published` has (their steps, -1 elsewhere).
    """
    lost: set[Path] = set()
    plan = reader.session.plan
    block = max(1, min(BLOCK_CAPTURES, BLOCK_BYTES // (16 * max(1, len(plan.params)))))
    for start in range(0, journals.extent, block):
        stop = min(journals.extent, start + block)
        sums = NormSums(reader, start, stop) if found.deep else None
        for rank in range(plan.world):
            for capture in range(start, stop):
                _check_record(reader, rank, capture, found, lost, sums)
        if sums is not None:
            known = journals.steps[: len(published)]
            sums.compare(np.where(published[: len(known)] == known, known, -1), found)
    if journals.closed:
        _check_seals(reader, journals, found, lost)


def _check_record(
    reader: SessionReader, rank: int, capture: int, found: Findings, lost: set[Path], sums: NormSums | None
) -> None:
    try:
        record = reader.captures.record(rank, capture)
    except GradtapError:
        return
    if record is not None and record.state == "committed":
        for chunk in rank_chunks(reader.session.plan, rank):
            _check_chunk(reader, chunk, record, found, lost, sums)


def _check_chunk(
    reader: SessionReader,
    chunk: ChunkPlan,
    record: JournalRecord,
    found: Findings,
    lost: set[Path],
    sums: NormSums | None,
) -> None:
    path = reader.chunks.path(chunk, record.capture)
    if path in lost:
        return
    plan = reader.session.plan
    name = plan.params[plan.arrays[chunk.array].param].name
    try:
        if not record.present[chunk.slot]:
            _check_empty(reader, chunk, record.capture, path)
            return
        crc = int(record.crcs[chunk.slot])
        found.checked["chunks"] += 1
        if sums is not None:
            values = reader.chunks.values(chunk, record.capture, record.step, crc)
            sums.add(record.capture, plan.arrays[chunk.array].param, values)
        else:
            reader.chunks.probe(chunk, record.capture, record.step, crc)
        found.checked["bytes"] += reader.chunks.last_bytes
    except DamagedError as error:
        found.damage(path, str(error), LOST, param=name, step=record.step)
        if not path.exists():
            lost.add(path)


def _check_empty(reader: SessionReader, chunk: ChunkPlan, capture: int, path: Path) -> None:
    if not path.exists():
        return
    array = reader.session.plan.arrays[chunk.array]
    handle = reader.chunks.files.get(path)
    if read_entry(handle.fd, array.time, array.entries, capture % array.time, chunk.entry, name=path) is not None:
        raise DamagedError(f"{path}: capture {capture} has a chunk {chunk.entry} that its journal does not know")


def _check_seals(reader: SessionReader, journals: Journals, found: Findings, lost: set[Path]) -> None:
    for array in reader.session.plan.arrays:
        for window in range(-(-journals.extent // array.time)):
            for path in sorted((reader.session.paths.zarr / array.name).glob(f"c.{window}*")):
                if path in lost or path.name.split(".")[1] != str(window):
                    continue
                what = _seal(path, array.time, array.entries)
                if what:
                    name = reader.session.plan.params[array.param].name
                    found.damage(path, what, f"{_what_reads(path, found)}; {COPY}", param=name)


def _what_reads(path: Path, found: Findings) -> str:
    """Whether the gradients in a file with a damaged index read right; its chunks have been checked by now."""
    if count := found.of_file(path):
        chunks = "the chunk" if count == 1 else f"the {count} chunks"
        return f"{chunks} found above cannot be read, the other gradients in this file can"
    if found.deep:
        return "gradients read right: every chunk in this file was decoded and is what was committed"
    return "gradients are read as before: every chunk in this file is in place, with the checksum that was committed"


def _seal(path: Path, time: int, entries: int) -> str | None:
    handle = Handle(path)
    size = time * entries * PAIR.size
    if os.fstat(handle.fd).st_size < size:
        return "the file is shorter than its index"
    if not is_sealed(handle.fd, time, entries):
        return "the session is closed, but the file has no sealed mark or a damaged copy of its index"
    if crc32c(pread_all(handle.fd, size, 0)) != seal_crc(handle.fd, time, entries):
        return "the index at the start is not the one that was sealed"
    return None
