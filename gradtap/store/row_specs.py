"""Which row arrays a session has: the ledger and the summaries, each rank's own and the merged ones.

Ranks' own arrays are made, grown and trimmed by their rank and are not in the consolidated metadata: at 1,024
ranks they would be most of it. Plain readers see the merged ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradtap.encode.histogram import BINS, bin_edges
from gradtap.flags import FLAG_NAMES
from gradtap.plan.chunks import rank_pieces
from gradtap.store.ledger_fields import (
    LEDGER_FIELDS,
    RANK_FIELDS,
    RECORD_NAMES,
    STATE_NAMES,
    LedgerField,
    stat_dtype,
    stat_fill,
    stats_of,
)
from gradtap.store.rows import RowSpec
from gradtap.types import SessionPlan

STEP_PATH = "_step"
TIME_PATH = "_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """What shapes the row arrays of a session beside its plan."""

    plan: SessionPlan
    groups: int
    summary: str
    max_time: int


def rank_prefix(kind: str, rank: int) -> str:
    """Path of a rank's own group: `_ledger/r00003` or `_summary/r00003`."""
    return f"_{kind}/r{rank:05d}"


def merged_specs(layout: RowLayout) -> tuple[RowSpec, ...]:
    """`_step`, `_time`, the merged ledger and the merged summaries."""
    ledger = [_field_spec(layout, field, "_ledger", merged=True) for field in LEDGER_FIELDS]
    names = [p.name for p in layout.plan.params if p.stored]
    stats = [_stat_spec(layout, stat, "_summary", len(names), {"params": names}) for stat in stats_of(layout.summary)]
    return (_step_spec(), _time_spec(), *ledger, *(stats if names else []))


def rank_specs(layout: RowLayout, rank: int) -> tuple[RowSpec, ...]:
    """The ledger and summary arrays that one rank writes."""
    ledger = [_field_spec(layout, field, rank_prefix("ledger", rank), merged=False) for field in RANK_FIELDS]
    pieces = [[p.param, p.start, p.stop] for p in rank_pieces(layout.plan, rank)]
    prefix = rank_prefix("summary", rank)
    stats = [_stat_spec(layout, s, prefix, len(pieces), {"pieces": pieces}) for s in stats_of(layout.summary)]
    return (*ledger, *(stats if pieces else []))


def by_path(specs: tuple[RowSpec, ...]) -> dict[str, RowSpec]:
    """The specs by their path in the group."""
    return {spec.path: spec for spec in specs}


def _step_spec() -> RowSpec:
    return RowSpec(
        path=STEP_PATH,
        row_shape=(),
        dtype="int64",
        fill=-1,
        mode="replace",
        axis="capture",
        time=4096,
        dims=("capture",),
        attributes={"long_name": "optimizer step of the capture; -1: not complete"},
        compress=False,
    )


def _time_spec() -> RowSpec:
    return RowSpec(
        path=TIME_PATH,
        row_shape=(),
        dtype="float64",
        fill=float("nan"),
        mode="replace",
        axis="capture",
        time=4096,
        dims=("capture",),
        attributes={"units": "seconds since 1970-01-01", "calendar": "standard"},
        compress=False,
    )


def _field_spec(layout: RowLayout, field: LedgerField, prefix: str, *, merged: bool) -> RowSpec:
    width = {"": (), "group": (max(layout.groups, 1),), "param": (len(layout.plan.params),)}[field.wide]
    # A merged scalar is written again when `norm-mismatch` is found or its late value comes: small enough to replace.
    small = merged and not field.wide
    return RowSpec(
        path=f"{prefix}/{field.name}",
        row_shape=width,
        dtype=field.dtype,
        fill=field.fill,
        mode="replace" if small else "append",
        axis="row",
        time=layout.max_time,
        dims=("row", field.wide) if field.wide else ("row",),
        attributes=_field_attributes(layout, field),
        compress=False,
    )


def _field_attributes(layout: RowLayout, field: LedgerField) -> dict[str, object]:
    attributes: dict[str, object] = {"long_name": field.about, "merge": field.merge}
    if field.name == "flags":
        attributes |= {"flag_masks": list(FLAG_NAMES), "flag_meanings": " ".join(FLAG_NAMES.values())}
    if field.name in ("record", "state"):
        names = RECORD_NAMES if field.name == "record" else STATE_NAMES
        attributes |= {"flag_values": list(names), "flag_meanings": " ".join(names.values())}
    if field.name == "touched":
        attributes["params"] = [p.name for p in layout.plan.params]
    return attributes


def _stat_spec(layout: RowLayout, stat: str, prefix: str, width: int, attributes: dict[str, object]) -> RowSpec:
    wide = "param" if "params" in attributes else "piece"
    if stat == "hist":
        edges = [float(e) for e in bin_edges()]
        finite = [e if abs(e) != float("inf") else None for e in edges]
        attributes = attributes | {"edges": finite}
    return RowSpec(
        path=f"{prefix}/{stat}",
        row_shape=(width, BINS) if stat == "hist" else (width,),
        dtype=stat_dtype(stat),
        fill=stat_fill(stat),
        mode="append",
        axis="capture",
        time=layout.max_time,
        dims=("capture", wide, "bin") if stat == "hist" else ("capture", wide),
        attributes=attributes,
        compress=stat == "hist",
    )
