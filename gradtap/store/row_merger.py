"""Reads the ranks' own rows of a session and merges them: ledger fields by their rule, statistics over pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.plan.chunks import rank_pieces
from gradtap.store.ledger_fields import FIELDS_BY_NAME, LedgerField, stats_of
from gradtap.store.merge import merge_field, merge_stats, settle_untouched
from gradtap.store.paths import SessionPaths
from gradtap.store.row_specs import by_path, rank_prefix, rank_specs
from gradtap.store.rows import read_rows
from gradtap.store.session import SessionHead

Array = NDArray[Any]


class RowMerger:
    """Merged rows of one session, made from what the ranks have written so far."""

    def __init__(self, paths: SessionPaths, head: SessionHead) -> None:
        self._paths, self._head = paths, head
        plan = head.plan
        self._world = plan.world
        self._specs = [by_path(rank_specs(head.layout, rank)) for rank in range(plan.world)]
        self._owners = [rank for rank in range(plan.world) if rank_pieces(plan, rank)]
        pieces = [piece for rank in self._owners for piece in rank_pieces(plan, rank)]
        column = {param: i for i, param in enumerate(i for i, p in enumerate(plan.params) if p.stored)}
        self._params = len(column)
        self._piece_param = np.array([column[piece.param] for piece in pieces], int)
        self._piece_count = np.array([piece.stop - piece.start for piece in pieces], float)

    def ready(self, start: int, most: int, closed: Mapping[int, int]) -> int:
        """How many ledger rows from `start` on are final, `most` at the most.

        Ranks write in order, so a rank's rows are final up to its last one; a hole below that (a step that failed, or
        that a restored engine jumped over) stays one. `closed`: rows of the ranks that have closed.
        """
        for rank in range(self._world):
            written = np.flatnonzero(self.rank_field(rank, "step", start, start + most) >= 0)
            reached = int(written[-1]) + 1 if written.size else 0
            most = min(most, max(reached, closed.get(rank, 0) - start))
        return most

    def flags(self, merged: Array, start: int, stop: int) -> Array:
        """Merged flags with `untouched` as all ranks together see it: a rank's own view is of its own backward."""
        touched = self.field(FIELDS_BY_NAME["touched"], start, stop)
        stored = np.array([param.stored for param in self._head.plan.params], bool)
        written = self.field(FIELDS_BY_NAME["step"], start, stop) >= 0
        return settle_untouched(merged, touched, stored, written)

    def field(self, field: LedgerField, start: int, stop: int) -> Array:
        """A merged ledger field, `[stop - start, ...]`."""
        ranks = 1 if field.merge == "first" else self._world
        return merge_field(field, [self.rank_field(rank, field.name, start, stop) for rank in range(ranks)])

    def rank_field(self, rank: int, name: str, start: int, stop: int) -> Array:
        """One rank's ledger field, `[stop - start, ...]`; its fill where nothing is written."""
        return self._rows("ledger", rank, name, start, stop)

    def statistics(self, capture: int) -> dict[str, Array]:
        """Merged statistics of a capture, each `[1, params]` or `[1, params, bins]`; empty where none are kept."""
        stats = stats_of(self._head.summary)
        if not stats or not self._params:
            return {}
        pieces = {
            stat: np.concatenate(
                [self._rows("summary", rank, stat, capture, capture + 1) for rank in self._owners], axis=1
            )
            for stat in stats
        }
        return merge_stats(pieces, self._piece_param, self._piece_count, self._params)

    def _rows(self, kind: str, rank: int, name: str, start: int, stop: int) -> Array:
        spec = self._specs[rank][f"{rank_prefix(kind, rank)}/{name}"]
        return read_rows(self._paths.zarr, spec, start, stop)
