"""Which parameters are behind a finding: those with an old gradient in them, and the first one that is not finite."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import GradtapError
from gradtap.flags import LATE_TOUCH, UNTOUCHED
from gradtap.query.audit.finding import Finding, Part

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.types import ParamSpec

MOST = 20
"""Names that evidence lists; the others are counted."""


@dataclass(slots=True, kw_only=True)
class Stale:
    """Parameters of one session that an engine with a memory was about to update with an old gradient in them.

    `ever`: those that a backward has reached before. A parameter that none has reached yet has nothing old.
    """

    params: tuple[ParamSpec, ...]
    ever: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.ever = np.zeros(len(self.params), np.bool_)

    @property
    def stored(self) -> NDArray[np.bool_]:
        """Which parameters have gradients."""
        return np.array([p.stored for p in self.params], np.bool_)

    def look(self, flags: NDArray[np.uint64], touched: NDArray[np.int32] | None) -> tuple[Any, Any]:
        """(untouched, late) of rows x parameters in a part whose own rows these are; None for touched: all were."""
        if touched is None:
            self.ever |= self.stored
            none = np.zeros((len(flags), 0), np.bool_)
            return none, none
        reached = touched >= 0
        before = np.vstack([self.ever, self.ever | np.logical_or.accumulate(reached, axis=0)])[:-1]
        self.ever = before[-1] | reached[-1]
        untouched = ~reached & before & self.stored
        # Whether an engine adds to what was there, the flag knows, which capture sets.
        late = (touched > 0) & before & (flags & np.uint64(LATE_TOUCH) != 0)[:, None]
        return untouched, late


@dataclass(slots=True, kw_only=True)
class StaleTally:
    """The finding `stale-gradient`, over all sessions."""

    untouched: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    count: int = 0
    first: int = -1
    last: int = -1

    def add(self, steps: NDArray[np.int64], params: tuple[ParamSpec, ...], untouched: Any, late: Any) -> None:
        """What `Stale.look` saw."""
        rows = np.flatnonzero(untouched.any(axis=1) | late.any(axis=1))
        if not rows.size:
            return
        self.first = int(steps[rows[0]]) if not self.count else self.first
        self.count, self.last = self.count + len(rows), int(steps[rows[-1]])
        for counter, found in ((self.untouched, untouched), (self.late, late)):
            for at in np.flatnonzero(found.any(axis=0)):
                counter[params[at].name] += int(found[:, at].sum())

    def finding(self) -> Finding | None:
        """What there is to say."""
        if not self.count:
            return None
        names = list(dict.fromkeys((*self.untouched, *self.late)))
        listed = {name: {"untouched": self.untouched[name], "late": self.late[name]} for name in names[:MOST]}
        return Finding(
            code="stale-gradient",
            severity="error",
            count=self.count,
            first=self.first,
            last=self.last,
            evidence={"parameters": listed, "total": len(names)},
            cause="no backward of the window, or only a later one, reached these parameters; the engine's buffer keeps "
            "what an earlier window left, applies it again, or adds the new gradient to it",
            cure="let every micro-batch reach every trained parameter (add its output times zero to the loss), freeze "
            "those that are not used, or use ZeRO-1 or -2 without offload",
        )


def flagged(part: Part) -> bool:
    """Whether some row of a part may have a parameter that was not reached, or reached late."""
    return bool((part["flags"][part.own] & np.uint64(UNTOUCHED | LATE_TOUCH)).any())


def first_nonfinite(run: Run, step: int) -> dict[str, Any]:
    """The parameter that backward computed first of those that are not finite, which is the model's last, and how many.

    None where the step has no statistics.
    """
    try:
        stats = {stat: run.norms(steps=[step], stat=stat) for stat in ("nan", "inf")}
    except GradtapError:
        return {"parameter": None}
    counts = {stat: norms.values[:, 0] for stat, norms in stats.items()}
    odd = np.flatnonzero((counts["nan"] > 0) | (counts["inf"] > 0))
    if not odd.size:
        return {"parameter": None}
    at = int(odd[-1])
    facts = {stat: int(np.nan_to_num(values[at])) for stat, values in counts.items()}
    return {"parameter": stats["nan"].params[at], **facts, "parameters": len(odd)}
