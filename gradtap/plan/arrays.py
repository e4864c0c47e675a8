"""Puts an `ArrayPlan` together: what all arrays of one parameter have in common. Decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gradtap.plan.layout import Grid, Limits, time_of
from gradtap.types import ArrayPlan


def stored_dtype(dtype: str) -> Literal["float32", "float64"]:
    """Dtype of the array for a captured dtype."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMaker:
    """Makes the arrays of the parameter at index `param`, whose plain array name is `base`.

    `seen` is common to all makers of a plan: equal owner tuples become one object.
    """

    param: int
    base: str
    dtype: Literal["float32", "float64"]
    limits: Limits
    seen: dict[tuple[int, ...], tuple[int, ...]]

    @property
    def itemsize(self) -> int:
        """Bytes of a stored element."""
        return 8 if self.dtype == "float64" else 4

    def array(self, name: str, grid: Grid, owners: tuple[int, ...], *, start: int = 0) -> ArrayPlan:
        """One array over elements `start` and on of the parameter, with an owner for each shard column."""
        return ArrayPlan(
            name=name,
            param=self.param,
            start=start,
            stop=start + math.prod(grid.shape),
            shape=grid.shape,
            dtype=self.dtype,
            time=time_of(grid, self.itemsize, self.limits),
            shard=grid.shard,
            chunk=grid.chunk,
            owners=self.seen.setdefault(owners, owners),
        )
