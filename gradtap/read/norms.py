"""Parameter x step matrices of stored statistics: from summaries alone, no gradient is read."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import IncompleteError, ParamNotFoundError, UsageError, nearest
from gradtap.read.assemble import SessionReader
from gradtap.store.ledger_fields import SUMMARY_STATS

STATS = tuple(stat for stat in SUMMARY_STATS if stat != "hist")
"""Statistics that are one number for a parameter and step."""

Match = str | Iterable[str] | Callable[[str], bool] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norms:
    """`values[p, s]` (float64) is the statistic of parameter `params[p]` at step `steps[s]`; NaN where not taken."""

    stat: str
    params: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """The statistic of one parameter over the steps. Raises `ParamNotFoundError`."""
        if name not in self.params:
            raise ParamNotFoundError(f"{name!r} is not in this table{nearest(name, self.params)}")
        return np.asarray(self.values[self.params.index(name)])


def check_stat(stat: str) -> str:
    """`stat` itself. Raises `UsageError` for one that is not stored as one number a parameter and step."""
    if stat not in STATS:
        raise UsageError(f"stat is {stat!r}; allowed are {', '.join(STATS)}")
    return stat


def matching(match: Match, names: Sequence[str]) -> tuple[str, ...]:
    """The names that `match` means, in their own order: None (all), a name or a pattern such as `layers.*.bias`,
    several of these, or a predicate.

    Raises `ParamNotFoundError` where a name or pattern means none.
    """
    if match is None:
        return tuple(names)
    if callable(match):
        found = {name for name in names if match(name)}
        if not found:
            raise ParamNotFoundError("no parameter with stored gradients satisfies the predicate; see run.params")
        return tuple(name for name in names if name in found)
    wanted: set[str] = set()
    for pattern in [match] if isinstance(match, str) else match:
        hits = {pattern} & set(names) or set(fnmatch.filter(names, pattern))
        if not hits:
            raise ParamNotFoundError(
                f"{pattern!r} matches no parameter with stored gradients{nearest(pattern, names)}; give a name of "
                "run.params or a pattern such as 'layers.*.weight'"
            )
        wanted |= hits
    return tuple(name for name in names if name in wanted)


def read_norms(
    places: Sequence[tuple[int, SessionReader, int]], names: Sequence[str], *, match: Match, stat: str
) -> Norms:
    """The statistic of the parameters that match, at `places`: (step, its session, its capture), ascending.

    Raises `IncompleteError` where none of the sessions stored summaries.
    """
    params = matching(match, names)
    steps = tuple(step for step, _, _ in places)
    values = np.full((len(params), len(places)), np.nan)
    readers = {id(reader): reader for _, reader, _ in places}
    if readers and all(stat not in reader.summaries.stats for reader in readers.values()):
        raise IncompleteError(
            f"no session of these steps stored {stat!r}: they were recorded with summary='none'; compute it from "
            "run.grad(name, step), or record with summary='basic' or 'full'"
        )
    for reader in readers.values():
        if stat in reader.summaries.stats:
            _take(reader, places, params, stat, values)
    return Norms(stat=stat, params=params, steps=steps, values=values)


def _take(
    reader: SessionReader,
    places: Sequence[tuple[int, SessionReader, int]],
    params: Sequence[str],
    stat: str,
    values: NDArray[np.float64],
) -> None:
    at = np.array([i for i, (_, own, _) in enumerate(places) if own is reader], np.int64)
    captures = np.array([places[i][2] for i in at], np.int64)
    order = np.argsort(captures, kind="stable")
    column = {name: i for i, name in enumerate(reader.summaries.names)}
    held = np.array([p for p, name in enumerate(params) if name in column], np.int64)
    columns = np.array([column[params[p]] for p in held], np.int64)
    values[np.ix_(held, at[order])] = reader.summaries.rows(stat, captures[order], columns).T
