"""The fields of the scale ledger: one table for the writer, the merger and the readers.

A ledger row belongs to a step: row = step - first step of its session, whether the step was captured or not.
`step[row] == -1` means that there is no row. What is known only after the step ("late") is written at the next
boundary; until then it reads as its fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradtap.encode.summary import STATS

Merge = Literal["first", "max", "sum", "or", "touch", "merged"]


@dataclass(frozen=True, slots=True)
class LedgerField:
    """One column. `merge`: how ranks' values become one ("first": rank 0's; "merged": only the merged array exists)."""

    name: str
    dtype: str
    fill: float | int
    merge: Merge
    about: str
    late: bool = False
    wide: Literal["", "group", "param"] = ""


NAN = float("nan")

RECORD_NAMES = {0: "not-due", 1: "committed", 2: "dropped", 3: "failed"}
"""Values of the field `record`: what became of the step's capture."""

RECORD_CODES = {None: 0, "committed": 1, "dropped": 2, "failed": 3}

STATE_NAMES = {0: "unknown", 1: "applied", 2: "skipped-overflow", 3: "unknown"}
"""Values of the field `state`; 0 is also what a row reads before the next boundary."""

STATE_CODES = {"applied": 1, "skipped-overflow": 2, "unknown": 3}

LEDGER_FIELDS = (
    LedgerField("step", "int64", -1, "first", "optimizer step; -1: no row"),
    LedgerField("capture", "int64", -1, "first", "capture number (axis 0 of the gradients); -1: none was due"),
    LedgerField("time", "float64", NAN, "first", "seconds since 1970-01-01 UTC, at the boundary"),
    LedgerField("k", "int32", 0, "first", "stored value = engine's bits x 2**-k"),
    LedgerField("factor", "float64", NAN, "first", "stored value x factor = the gradient of the window's mean loss"),
    LedgerField("loss_scale", "float64", NAN, "first", "loss scale of the window, read before the step"),
    LedgerField("micro_seen", "int32", -1, "max", "micro-batches whose backward ran in the window"),
    LedgerField("accum_engine", "int32", -1, "first", "accumulation count that the engine works with"),
    LedgerField("accum_loop", "int32", -1, "first", "accumulation count that the training loop works with"),
    LedgerField("divisor", "float64", NAN, "first", "what the engine divided the sum of micro-batches by"),
    LedgerField("clip_limit", "float64", NAN, "first", "clipping limit of the global norm; 0: clipping is off"),
    LedgerField("learning_rate", "float64", NAN, "first", "learning rate of each parameter group", wide="group"),
    LedgerField(
        "touched", "int32", -1, "touch", "first micro-batch that reached the parameter; -1: none", wide="param"
    ),
    LedgerField("flags", "uint64", 0, "or", "bits named by gradtap.flags"),
    LedgerField("record", "int8", 0, "max", "0 not due, 1 committed, 2 dropped, 3 failed"),
    LedgerField("seconds", "float64", NAN, "max", "seconds that the recorder took of the training thread"),
    LedgerField("wait_seconds", "float64", NAN, "max", "part of `seconds` spent waiting for a free buffer"),
    LedgerField("raw_bytes", "int64", 0, "sum", "bytes of the captured elements in the store's dtype"),
    LedgerField("stored_bytes", "int64", 0, "sum", "bytes of the stored chunks"),
    LedgerField("inexact", "int64", 0, "sum", "elements that dividing by the loss scale rounded"),
    LedgerField(
        "state", "int8", 0, "first", "0 not known yet, 1 applied, 2 skipped (overflow), 3 not known", late=True
    ),
    LedgerField("norm_engine", "float64", NAN, "first", "global norm as the engine gives it, unscaled", late=True),
    LedgerField("clip_coef", "float64", NAN, "first", "coefficient that clipping applied", late=True),
    LedgerField("norm", "float64", NAN, "merged", "global norm of what was captured"),
)

EARLY_FIELDS = tuple(f for f in LEDGER_FIELDS if not f.late and f.merge != "merged")
LATE_FIELDS = tuple(f for f in LEDGER_FIELDS if f.late)
RANK_FIELDS = EARLY_FIELDS + LATE_FIELDS
FIELDS_BY_NAME = {f.name: f for f in LEDGER_FIELDS}

MARKERS = ("step", "state")
"""Written after the other fields of their row: whoever sees them sees the early, or the late, fields whole."""

SUMMARY_STATS = STATS
COUNT_STATS = frozenset({"zeros", "nan", "inf", "hist"})


def stats_of(level: str) -> tuple[str, ...]:
    """Statistics stored at a summary level: `none`, `basic` (no histogram) or `full`."""
    return {"none": (), "basic": SUMMARY_STATS[:-1], "full": SUMMARY_STATS}[level]


def stat_dtype(stat: str) -> str:
    """Stored dtype of a statistic: counts are int64, the others float64."""
    return "int64" if stat in COUNT_STATS else "float64"


def stat_fill(stat: str) -> float | int:
    """What a statistic reads where it was not taken: -1 for counts, NaN for the others."""
    return -1 if stat in COUNT_STATS else np.nan
