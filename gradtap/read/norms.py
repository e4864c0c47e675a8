"""Parameter x step matrices of stored statistics: from summaries alone, no gradient is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import IncompleteError, ParamNotFoundError, UsageError, near_names, nearest
from gradtap.matching import Select, found_by, near_params, select_params
from gradtap.read.assemble import SessionReader
from gradtap.read.attempts import Place
from gradtap.store.ledger_fields import SUMMARY_STATS
from gradtap.types import ParamSpec

STATS = tuple(stat for stat in SUMMARY_STATS if stat != "hist")
"""Statistics that are one number for a parameter and step."""


ENDS_SHOWN = 4
"""Parameters and steps at either end that the text form of a table shows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norms:
    """`values[p, s]` (float64) is the statistic of parameter `params[p]` at step `steps[s]`; NaN where not taken."""

    stat: str
    params: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]

    def __repr__(self) -> str:
        """A row for each parameter, a column for each step; the middle of a large table is left out."""
        shape = f"{len(self.params)} parameters x {len(self.steps)} steps"
        rows, columns = _shown(len(self.params)), _shown(len(self.steps))
        if not (self.params and self.steps):
            return f"<gradtap norms: {self.stat}, {shape}>"
        width = max(len(self.params[i]) for i in rows if i is not None)
        head = " ".join(f"{'...' if j is None else self.steps[j]:>10}" for j in columns)
        lines = [f"<gradtap norms: {self.stat}, {shape}", f"{'step':<{width}} {head}"]
        for i in rows:
            cells = [f"{'...' if i is None or j is None else format(self.values[i, j], '.4g'):>10}" for j in columns]
            lines.append(f"{'...' if i is None else self.params[i]:<{width}} {' '.join(cells)}")
        return "\n".join(lines) + ">"

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """The statistic of one parameter over the steps. Raises `ParamNotFoundError`."""
        if name not in self.params:
            raise ParamNotFoundError(f"{name!r} is not in this table{nearest(name, self.params)}").noting(
                did_you_mean=near_names(name, self.params)
            )
        return np.asarray(self.values[self.params.index(name)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSummary:
    """`stats[stat][p]` (float64) is a statistic of parameter `params[p]` at one step; NaN where it was not taken."""

    step: int
    attempt: int
    params: tuple[str, ...]
    stats: Mapping[str, NDArray[np.float64]]


def _shown(count: int) -> list[int | None]:
    """Indices of the first and the last few, None between them where some are left out."""
    if count <= 2 * ENDS_SHOWN:
        return list(range(count))
    return [*range(ENDS_SHOWN), None, *range(count - ENDS_SHOWN, count)]


def check_stat(stat: str) -> str:
    """`stat` itself. Raises `UsageError` for one that is not stored as one number a parameter and step."""
    if stat not in STATS:
        raise UsageError(f"stat is {stat!r}; allowed are {', '.join(STATS)}{nearest(stat, STATS)}")
    return stat


def matching(match: Select | None, params: Sequence[ParamSpec]) -> tuple[str, ...]:
    """Names of the stored parameters that `match` means, in their own order; None means all of them.

    `match` is a text (a name, part of one, or a glob such as `layers.*.bias`), several globs (`!` excludes), or a
    function over (name, shape). Raises `ParamNotFoundError` where it means none, `UsageError` for anything else.
    """
    stored = [p for p in params if p.stored]
    if isinstance(match, str):
        if found := found_by(match, stored):
            return tuple(p.name for p in found)
        near = near_params(match, stored)
        said = f"; did you mean {', '.join(near)}?" if near else ""
        raise ParamNotFoundError(f"match={match!r} names no parameter with stored gradients{said}").noting(
            did_you_mean=near
        )
    try:
        chosen = select_params(match, stored)
    except ParamNotFoundError as error:
        raise ParamNotFoundError(f"match={match!r} names no parameter with stored gradients") from error
    return tuple(p.name for i, p in enumerate(stored) if chosen is None or i in chosen)


def read_norms(
    places: Sequence[tuple[int, SessionReader, int]], specs: Sequence[ParamSpec], *, match: Select | None, stat: str
) -> Norms:
    """The statistic of the parameters that match, at `places`: (step, its session, its capture), ascending.

    Raises `IncompleteError` where none of the sessions stored summaries.
    """
    params = matching(match, specs)
    steps = tuple(step for step, _, _ in places)
    values = np.full((len(params), len(places)), np.nan)
    readers = {id(reader): reader for _, reader, _ in places}
    check_taken(readers.values(), stat)
    for reader in readers.values():
        if stat in reader.summaries.stats:
            _take(reader, places, params, stat, values)
    return Norms(stat=stat, params=params, steps=steps, values=values)


def check_taken(readers: Iterable[SessionReader], stat: str) -> None:
    """Raise `IncompleteError` where none of some sessions stored the statistic. Reads metadata alone."""
    held = [stat in reader.summaries.stats for reader in readers]
    if held and not any(held):
        raise IncompleteError(
            f"no session of these steps stored {stat!r}: they were recorded with summary='none' or by a gradtap that "
            "did not store it; compute it from run.grad(name, step), or record with summary='basic' or 'full'"
        )


def read_summary(place: Place, specs: Sequence[ParamSpec], match: Select | None) -> StepSummary:
    """All statistics that the session of a capture stored, of the parameters that match."""
    params = matching(match, specs)
    at = [(place.step, place.reader, place.capture)]
    stats = {}
    for stat in (stat for stat in STATS if stat in place.reader.summaries.stats):
        values = np.full((len(params), 1), np.nan)
        _take(place.reader, at, params, stat, values)
        stats[stat] = values[:, 0]
    return StepSummary(step=place.step, attempt=place.attempt, params=params, stats=stats)


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
    column = {name: i for i, name in enumerate(reader.summaries.names_of(stat))}
    held = np.array([p for p, name in enumerate(params) if name in column], np.int64)
    columns = np.array([column[params[p]] for p in held], np.int64)
    values[np.ix_(held, at[order])] = reader.summaries.rows(stat, captures[order], columns).T
