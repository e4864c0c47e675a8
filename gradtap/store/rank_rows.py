"""One rank's own ledger and summary rows, appended in step order, before the journal record that commits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gradtap.encode.summary import PieceSummary
from gradtap.store.growth import write_rank_group
from gradtap.store.ledger_fields import MARKERS, stat_dtype, stat_fill, stats_of
from gradtap.store.paths import SessionPaths
from gradtap.store.row_specs import RowLayout, by_path, rank_prefix, rank_specs
from gradtap.store.rows import AppendRows
from gradtap.store.shard import ShardSet


class RankRows:
    """Writes the arrays of `rank_specs`. The declared length doubles as rows come and is trimmed at close."""

    def __init__(self, paths: SessionPaths, layout: RowLayout, rank: int, shards: ShardSet, *, capacity: int) -> None:
        self._paths, self._layout, self._rank = paths, layout, rank
        self._length = {"capture": capacity, "row": capacity}
        self._used = {"capture": 0, "row": 0}
        specs = by_path(rank_specs(layout, rank))
        self._writers = {path: AppendRows(paths.zarr, spec, shards) for path, spec in specs.items()}
        write_rank_group(paths, layout, rank, captures=capacity, rows=capacity)

    @property
    def captures(self) -> int:
        """Highest capture number seen + 1."""
        return self._used["capture"]

    @property
    def rows(self) -> int:
        """Highest ledger row seen + 1."""
        return self._used["row"]

    def reach(self, *, capture: int | None, row: int) -> None:
        """Declare arrays long enough for this capture and ledger row."""
        self._used["row"] = max(self._used["row"], row + 1)
        if capture is not None:
            self._used["capture"] = max(self._used["capture"], capture + 1)
        grown = dict(self._length)
        for axis, used in self._used.items():
            while grown[axis] < used:
                grown[axis] *= 2
        if grown != self._length:
            lengths = {"captures": grown["capture"], "rows": grown["row"]}
            write_rank_group(self._paths, self._layout, self._rank, **lengths)
            self._length = grown

    def write_summaries(self, capture: int, pieces: Mapping[int, PieceSummary]) -> None:
        """Write every statistic of a capture; `pieces` by index among the rank's pieces, absent ones as the fill."""
        for stat in stats_of(self._layout.summary):
            writer = self._writers.get(f"{rank_prefix('summary', self._rank)}/{stat}")
            if writer is None:
                return
            row: Any = np.full(writer.spec.row_shape, stat_fill(stat), stat_dtype(stat))
            for index, summary in pieces.items():
                row[index] = getattr(summary, stat)
            writer.write(capture, row)

    def write_ledger(self, row: int, values: Mapping[str, ArrayLike]) -> None:
        """Write the named fields of one ledger row; last the one that says the row is there."""
        for name in sorted(values, key=lambda name: name in MARKERS):
            self._writers[f"{rank_prefix('ledger', self._rank)}/{name}"].write(row, values[name])

    def trim(self) -> None:
        """Declare the arrays as long as what they hold."""
        write_rank_group(self._paths, self._layout, self._rank, captures=self.captures, rows=self.rows)
