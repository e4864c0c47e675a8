"""What a finder sees of the ledger, a part at a time, and what it has to say in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Severity = Literal["info", "warning", "error"]
Rows = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault: seen at `count` steps from `first` to `last`, with numbers of the ledger at the first as evidence."""

    code: str
    severity: Severity
    count: int
    first: int
    last: int
    evidence: Mapping[str, Any]
    cause: str
    cure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the findings need to know of a session's engine; `settings` are as the session says them."""

    name: str
    settings: Mapping[str, Any]

    @property
    def deepspeed(self) -> bool:
        """Whether it is DeepSpeed, which updates its loss scale before it divides by it."""
        return self.name.startswith("deepspeed")

    @property
    def zero(self) -> bool:
        """Whether it is ZeRO of stage 1 to 3, which reduces at its accumulation boundary."""
        return self.name.startswith(("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"))

    @property
    def offload(self) -> bool:
        """Whether gradients are kept on the host."""
        return bool(self.settings.get("cpu_offload") or self.settings.get("offload"))

    @property
    def keeps(self) -> bool:
        """Whether its buffers keep the gradient of a parameter that no backward of a window reached."""
        return self.name.startswith("deepspeed-zero3") or (self.zero and self.offload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some rows of one session: columns of equal length, one row more at each end where the session has one.

    `own` says which rows are this part's; the others are for looking back and ahead.
    """

    engine: Engine
    columns: Mapping[str, NDArray[Any]]
    own: slice

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def ahead(self, name: str) -> NDArray[Any]:
        """A column of numbers moved up by one row, as float64: NaN where the next row is not that of the next step."""
        values, steps = self.columns[name].astype(np.float64), self.columns["step"]
        moved = np.full(values.shape, np.nan)
        follows = np.flatnonzero(np.diff(steps) == 1)
        moved[follows] = values[follows + 1]
        return moved

    def beside(self, rows: Rows) -> Rows:
        """Which rows have a neighbour among `rows`, at the step before or after."""
        follows = np.diff(self.columns["step"]) == 1
        found = np.zeros(len(rows), np.bool_)
        found[:-1] |= rows[1:] & follows
        found[1:] |= rows[:-1] & follows
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """A fault that shows row by row. `seen` marks the rows, `shown` names the columns that are evidence.

    `tells` makes further evidence of the first such row.
    """

    code: str
    severity: Severity
    seen: Callable[[Part], Rows]
    shown: tuple[str, ...]
    cause: str
    cure: str
    tells: Callable[[Mapping[str, Any], Engine], Mapping[str, Any]] = lambda row, engine: {}


@dataclass(slots=True, kw_only=True)
class Tally:
    """What one finder has seen so far."""

    finder: Finder
    count: int = 0
    first: int = -1
    last: int = -1
    evidence: dict[str, Any] = field(default_factory=dict)

    def look(self, part: Part) -> None:
        """Go over one part."""
        where = np.flatnonzero(self.finder.seen(part)[part.own]) + part.own.start
        if not where.size:
            return
        if not self.count:
            self.first = int(part["step"][where[0]])
            row = {name: part[name][where[0]].tolist() for name in part.columns if name != "touched"}
            self.evidence = {name: row[name] for name in self.finder.shown}
            self.evidence |= self.finder.tells(row, part.engine)
        self.count += len(where)
        self.last = int(part["step"][where[-1]])

    def finding(self, **more: Any) -> Finding | None:
        """What there is to say; None where nothing was seen."""
        if not self.count:
            return None
        finder, evidence = self.finder, {**self.evidence, **more}
        about = {"code": finder.code, "severity": finder.severity, "cause": finder.cause, "cure": finder.cure}
        return Finding(count=self.count, first=self.first, last=self.last, evidence=evidence, **about)  # type: ignore[arg-type]
