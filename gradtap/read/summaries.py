"""Stored statistics of one session: merged rows where rank 0 has published them, else the ranks' own rows, merged here.

Which statistics there are, and which parameter a column is of, the arrays say themselves. Not here: which steps and
parameters are asked for (`norms`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import DamagedError
from gradtap.read.row_arrays import params_of, pieces_of
from gradtap.read.session import Session
from gradtap.store.ledger_fields import COUNT_STATS, SUMMARY_STATS
from gradtap.store.merge import merge_stats
from gradtap.store.rows import RowSpec, held_rows

Array = NDArray[Any]

BLOCK_BYTES = 32 * 2**20
NEAR = 16
"""Rows this near to each other are read together: skipping fewer costs more than reading them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pieces:
    """The columns of the ranks' own rows side by side: whose they are, how large, and which columns of the merged
    array they make up in full.
    """

    specs: tuple[tuple[RowSpec, ...], ...]
    owner: Array
    count: Array
    whole: NDArray[np.bool_]


class SummaryReader:
    """Rows of `_summary/<stat>` of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # Caches of this object alone.
        self.names_of = functools.cache(self._names_of)
        self._pieces = functools.cache(self._find_pieces)

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        """The statistics that this session holds, of those that this version knows."""
        return tuple(stat for stat in SUMMARY_STATS if self._has(stat))

    def _has(self, stat: str) -> bool:
        try:
            return self.session.arrays.get(f"_summary/{stat}") is not None
        except DamagedError:
            # It is there, and reading it says what is wrong with it.
            return True

    def _names_of(self, stat: str) -> tuple[str, ...]:
        """The parameters that the columns of a statistic are of. Raises `DamagedError` where it does not say."""
        spec = self._merged(stat)
        return tuple(params_of(spec, self.session.paths.zarr / spec.path / "zarr.json"))

    def rows(self, stat: str, captures: NDArray[np.int64], columns: NDArray[np.int64]) -> Array:
        """Statistic `stat` at ascending `captures` of the parameters at `columns`: float64 (captures, columns).

        NaN where it was not taken. Raises `DamagedError` for rows that are not what was written.
        """
        spec = self._merged(stat)
        out = np.full((len(captures), len(columns)), np.nan)
        most = max(1, BLOCK_BYTES // max(1, spec.row_bytes))
        at = 0
        while at < len(captures):
            stop = at + 1
            while stop < len(captures) and _near(captures, at, stop, most):
                stop += 1
            first = int(captures[at])
            block = self.session.read(spec, first, int(captures[stop - 1]) + 1)
            picked = block[captures[at:stop] - first].astype(np.float64)
            fill = float(spec.fill)
            for row in np.flatnonzero(_is_fill(picked, fill).all(axis=1)):
                capture = int(captures[at + row])
                picked[row] = self.from_ranks(stat, capture, capture + 1)[0]
                if _is_fill(picked[row], fill).all():
                    self._refuse_absent(stat, capture)
            if stat in COUNT_STATS:
                picked[picked == fill] = np.nan
            out[at:stop] = picked[:, columns]
            at = stop
        return out

    def _refuse_absent(self, stat: str, capture: int) -> None:
        """Raise `DamagedError` where a rank's row of a complete capture is not stored: it has one even if empty."""
        for specs in self._pieces((stat,)).specs:
            if not held_rows(self.session.paths.zarr, specs[0], capture, capture + 1).all():
                file = specs[0].file(self.session.paths.zarr, capture // specs[0].rows)
                raise DamagedError(f"{file} lacks row {capture}, though the capture is complete; run `gradtap verify`")

    def histogram(self, capture: int, column: int) -> NDArray[np.int64] | None:
        """The stored histogram of one parameter at a capture, int64 (bins,); None where none was taken.

        Raises `DamagedError` as `rows`.
        """
        spec = self._merged("hist")
        counts = self.session.read(spec, capture, capture + 1)[0, column]
        if (counts == spec.fill).all():
            counts = self.from_ranks("hist", capture, capture + 1)[0, column]
            if (counts == spec.fill).all():
                self._refuse_absent("hist", capture)
        return None if (counts == spec.fill).all() else np.array(counts, np.int64)

    def taken(self, captures: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which parameters (the columns of `l2`) were captured at all, (captures, columns); None where unknown."""
        if "zeros" not in self.stats or self.names_of("zeros") != self.names_of("l2"):
            return None
        return ~np.isnan(self.rows("zeros", captures, np.arange(len(self.names_of("l2")))))

    def _merged(self, stat: str) -> RowSpec:
        spec = self.session.arrays.get(f"_summary/{stat}")
        if spec is None:
            raise DamagedError(f"{self.session.paths.zarr}/_summary/{stat} is gone; run `gradtap verify`")
        return spec

    def from_ranks(self, stat: str, start: int, stop: int) -> Array:
        """Captures `start` to `stop` of a statistic, merged here from the ranks' own rows; shaped as the merged array.

        The fill where a piece of the parameter is nowhere. Raises `DamagedError` as `rows`.
        """
        need = ("mean", "std") if stat == "std" else (stat,)
        spec, found = self._merged(stat), self._pieces(need)
        if not found.specs:
            return spec.blank(stop - start)
        rows = {
            name: np.concatenate([self.session.read(specs[i], start, stop) for specs in found.specs], 1)
            for i, name in enumerate(need)
        }
        merged = merge_stats(rows, found.owner, found.count, len(found.whole))[stat]
        # Of a parameter of which a piece is nowhere, nothing is known.
        merged[:, ~found.whole] = spec.fill
        return merged

    def ranks_row_bytes(self, stat: str) -> int:
        """Raw bytes of one capture of a statistic in the rows of all ranks."""
        found = self._pieces(("mean", "std") if stat == "std" else (stat,))
        return sum(spec.row_bytes for specs in found.specs for spec in specs)

    def _find_pieces(self, need: tuple[str, ...]) -> _Pieces:
        plan = self.session.plan
        names = self.names_of(need[-1])
        column = {name: i for i, name in enumerate(names)}
        specs, owner, count = [], [], []
        for rank in range(plan.world):
            own = tuple(spec for name in need if (spec := self.session.arrays.rank("summary", rank, name)) is not None)
            pieces = [pieces_of(spec, self.session.paths.zarr / spec.path / "zarr.json") for spec in own]
            if len(own) < len(need) or any(found != pieces[0] for found in pieces):
                continue
            if any(plan.params[param].name not in column for param, _, _ in pieces[0]):
                raise DamagedError(
                    f"{self.session.paths.zarr}/{own[0].path} has a parameter that the merged rows lack; run "
                    "`gradtap verify`"
                )
            specs.append(own)
            owner += [column[plan.params[param].name] for param, _, _ in pieces[0]]
            count += [stop - start for _, start, stop in pieces[0]]
        held = np.zeros(len(names))
        np.add.at(held, np.array(owner, int), np.array(count, float))
        sizes = {p.name: p.numel for p in plan.params}
        whole = held == np.array([sizes.get(name, -1) for name in names], float)
        return _Pieces(specs=tuple(specs), owner=np.array(owner, int), count=np.array(count, float), whole=whole)


def _near(captures: NDArray[np.int64], at: int, stop: int, most: int) -> bool:
    return int(captures[stop] - captures[stop - 1]) <= NEAR and int(captures[stop] - captures[at]) < most


def _is_fill(values: Array, fill: float) -> NDArray[np.bool_]:
    return np.isnan(values) if np.isnan(fill) else values == fill
