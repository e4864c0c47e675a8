"""Stored statistics of one session: merged rows where rank 0 has published them, else the ranks' own rows, merged here.

Not here: which steps and parameters are asked for (`norms`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.plan.chunks import rank_pieces
from gradtap.read.session import Session
from gradtap.store.ledger_fields import COUNT_STATS, stat_fill, stats_of
from gradtap.store.merge import merge_stats
from gradtap.store.row_specs import rank_prefix
from gradtap.store.rows import read_rows

Array = NDArray[Any]

BLOCK_BYTES = 32 * 2**20
NEAR = 16
"""Rows this near to each other are read together: skipping fewer costs more than reading them."""


class SummaryReader:
    """Rows of `_summary/<stat>` of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters that have statistics: columns of each row."""
        return tuple(p.name for p in self.session.plan.params if p.stored)

    @property
    def stats(self) -> tuple[str, ...]:
        """The statistics that this session holds."""
        return stats_of(self.session.head.summary) if self.names else ()

    def rows(self, stat: str, captures: NDArray[np.int64], columns: NDArray[np.int64]) -> Array:
        """Statistic `stat` at ascending `captures` of the parameters at `columns`: float64 (captures, columns).

        NaN where it was not taken. Raises `DamagedError` for rows that are not what was written.
        """
        spec = self.session.rows[f"_summary/{stat}"]
        out = np.full((len(captures), len(columns)), np.nan)
        most = max(1, BLOCK_BYTES // max(1, 8 * len(self.names)))
        at = 0
        while at < len(captures):
            stop = at + 1
            while stop < len(captures) and _near(captures, at, stop, most):
                stop += 1
            first = int(captures[at])
            block = read_rows(self.session.paths.zarr, spec, first, int(captures[stop - 1]) + 1)
            picked = block[captures[at:stop] - first].astype(np.float64)
            fill = float(stat_fill(stat))
            for row in np.flatnonzero(_is_fill(picked, fill).all(axis=1)):
                picked[row] = self._from_ranks(int(captures[at + row]))[stat][0]
            if stat in COUNT_STATS:
                picked[picked == fill] = np.nan
            out[at:stop] = picked[:, columns]
            at = stop
        return out

    def _from_ranks(self, capture: int) -> dict[str, Array]:
        ranks, owner, count = self._pieces
        rows = {
            stat: np.concatenate([self._rank_row(rank, stat, capture) for rank in ranks], axis=1)
            for stat in self.stats
            if stat != "hist"
        }
        return merge_stats(rows, owner, count, len(self.names))

    def _rank_row(self, rank: int, stat: str, capture: int) -> Array:
        spec = self.session.rank_rows(rank)[f"{rank_prefix('summary', rank)}/{stat}"]
        return read_rows(self.session.paths.zarr, spec, capture, capture + 1)

    @functools.cached_property
    def _pieces(self) -> tuple[list[int], Array, Array]:
        plan = self.session.plan
        column = {param: i for i, param in enumerate(i for i, p in enumerate(plan.params) if p.stored)}
        by_rank = {rank: rank_pieces(plan, rank) for rank in range(plan.world)}
        ranks = [rank for rank, pieces in by_rank.items() if pieces]
        pieces = [piece for rank in ranks for piece in by_rank[rank]]
        owner = np.array([column[piece.param] for piece in pieces], int)
        return ranks, owner, np.array([piece.stop - piece.start for piece in pieces], float)


def _near(captures: NDArray[np.int64], at: int, stop: int, most: int) -> bool:
    return int(captures[stop] - captures[stop - 1]) <= NEAR and int(captures[stop] - captures[at]) < most


def _is_fill(values: Array, fill: float) -> NDArray[np.bool_]:
    return np.isnan(values) if np.isnan(fill) else values == fill
