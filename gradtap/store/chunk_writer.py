"""Staged pieces to chunks in the shards that this rank owns: restore, summarise, encode, append."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.encode.codecs import ChunkCodec
from gradtap.encode.summary import PieceSummary, summarize
from gradtap.encode.widen import restore
from gradtap.errors import CaptureError, StoreError
from gradtap.plan.chunks import rank_chunks, rank_pieces
from gradtap.store.paths import SessionPaths
from gradtap.store.session import SessionHead
from gradtap.store.shard import ShardSet
from gradtap.types import ChunkPlan, EncodedChunk, StagedPiece

Column = tuple[int, tuple[int, ...]]
Batch = dict[int, tuple[ChunkPlan, EncodedChunk]]


@dataclass(slots=True, kw_only=True)
class Written:
    """What has been written of one capture so far. `crcs` and `present` by the chunk's slot."""

    crcs: NDArray[np.uint32]
    present: NDArray[np.bool_]
    summaries: dict[int, list[PieceSummary]] = field(default_factory=lambda: defaultdict(list))
    raw_bytes: int = 0
    stored_bytes: int = 0
    inexact: int = 0


class ChunkWriter:
    """Appends one rank's chunks. `seal_full` seals what is complete."""

    def __init__(self, paths: SessionPaths, head: SessionHead, rank: int, shards: ShardSet) -> None:
        self._paths, self._head, self._shards = paths, head, shards
        self._arrays = head.plan.arrays
        self.chunks = rank_chunks(head.plan, rank)
        self._ranged = sorted(self.chunks, key=self._place)
        self._at = {self._place(chunk): position for position, chunk in enumerate(self._ranged)}
        pieces = rank_pieces(head.plan, rank)
        self._piece_of = self._number_pieces([(p.param, p.start) for p in pieces])
        self._codecs = {size: ChunkCodec(head.codec, size) for size in (4, 8)}
        self._current: dict[Column, Path] = {}
        self._full: list[Path] = []

    def fresh(self) -> Written:
        """Nothing written yet."""
        return Written(crcs=np.zeros(len(self.chunks), np.uint32), present=np.zeros(len(self.chunks), bool))

    def due(self, wanted: frozenset[int] | None) -> NDArray[np.bool_]:
        """Which chunks a capture of the wanted parameters consists of, by slot; None for all parameters."""
        if wanted is None:
            return np.ones(len(self.chunks), bool)
        return np.array([self._arrays[chunk.array].param in wanted for chunk in self.chunks], bool)

    def write(self, capture: int, piece: StagedPiece, k: int, written: Written) -> None:
        """Write one staged piece of a capture.

        Raises `StoreError` for what cannot be written; what was appended before stays in `written`.
        """
        position = self._at.get((piece.param, piece.start))
        if position is None:
            raise CaptureError(f"no chunk of this rank begins at element {piece.start}; please report this defect")
        values, inexact = restore(piece.values, self._head.plan.params[piece.param].dtype, k)
        written.inexact += inexact
        summary = summarize(values, self._head.summary)
        if summary is not None:
            written.summaries[self._piece_of[position]].append(summary)
        for column, batch in self._encode(position, piece, values).items():
            self._append(capture, column, batch, written)

    def seal_full(self) -> None:
        """Seal the shards that later ones have followed. Apart from writing: it must not cost a capture.

        All are tried. Raises the first failure; that shard is tried again when all are closed.
        """
        full, self._full = self._full, []
        failure: Exception | None = None
        for path in full:
            try:
                self._shards.seal(path)
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _encode(self, position: int, piece: StagedPiece, values: NDArray[Any]) -> dict[Column, Batch]:
        batches: dict[Column, Batch] = defaultdict(dict)
        done = piece.start
        while done < piece.stop:
            chunk = self._ranged[position]
            part = values[chunk.start - piece.start : chunk.stop - piece.start]
            batches[chunk.array, chunk.column][chunk.entry] = (chunk, self._encode_chunk(chunk, part))
            done, position = chunk.stop, position + 1
        return batches

    def _encode_chunk(self, chunk: ChunkPlan, values: NDArray[Any]) -> EncodedChunk:
        if chunk.numel != values.size:
            padded = np.zeros(chunk.numel, values.dtype)
            padded[: values.size] = values
            values = padded
        return self._codecs[values.itemsize].encode(values)

    def _append(self, capture: int, column: Column, batch: Mapping[int, Any], written: Written) -> None:
        array = self._arrays[column[0]]
        path = self._paths.shard(array.name, capture // array.time, column[1])
        shard = self._shards.get(path, array.time, array.entries)
        before = self._current.get(column)
        # Only now: where the new file could not be made, the old one is still the current one.
        self._current[column] = path
        if before is not None and before != path:
            self._full.append(before)
        size = shard.append(capture % array.time, {entry: encoded.data for entry, (_, encoded) in batch.items()})
        written.stored_bytes += size
        for chunk, encoded in batch.values():
            written.crcs[chunk.slot] = encoded.crc
            written.present[chunk.slot] = True
            written.raw_bytes += (chunk.stop - chunk.start) * (8 if array.dtype == "float64" else 4)

    def _place(self, chunk: ChunkPlan) -> tuple[int, int]:
        return self._arrays[chunk.array].param, chunk.start

    def _number_pieces(self, starts: list[tuple[int, int]]) -> list[int]:
        """For each chunk in range order, the index of the rank's piece that it lies in."""
        found, piece = [], -1
        for chunk in self._ranged:
            while piece + 1 < len(starts) and starts[piece + 1] <= self._place(chunk):
                piece += 1
            found.append(piece)
        return found
