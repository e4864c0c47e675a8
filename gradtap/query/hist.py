"""The histogram of one gradient as an answer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradtap.query.answer import Answer
from gradtap.query.words import step_of

if TYPE_CHECKING:
    from gradtap.read import Run


def hist(
    run: Run,
    param: str,
    step: str,
    *,
    slice: str = "",
    bins: int | None = None,
    scale: str = "log2",
    attempt: int | None = None,
) -> Answer:
    """Bins from `low` to `high` with their `count`, all of them, ascending; NaN and infinities are counted apart.

    A bin holds its lower edge, the last one its upper too; with scale log2 it is one power of two of one sign, the zero
    bin has both edges 0, and the outermost ones, whose outer edge is None, hold all beyond. `source` is
    "summary" for the stored histogram, of which only the sum of both infinities is known, and "values" for one that
    was counted anew. Raises as `Run.hist`.
    """
    from gradtap.query.local import param_of

    found = run.hist(
        param_of(run, param), step_of(run, step), slice=slice or None, bins=bins, scale=scale, attempt=attempt
    )
    counted = found.histogram
    edges = [edge if math.isfinite(edge) else None for edge in counted.edges.tolist()]
    counts = counted.counts.tolist()
    facts = {
        "run": run.id,
        "name": found.name,
        "step": found.step,
        "attempt": found.attempt,
        "slice": slice or None,
        "dtype_captured": found.dtype_captured,
        "flags": list(found.flags),
        "scale": counted.scale,
        "source": counted.source,
        "zero_bin": counted.zero,
        "nan": counted.nan,
        "inf": counted.inf,
        "posinf": counted.posinf,
        "neginf": counted.neginf,
    }
    rows = [{"low": edges[i], "high": edges[i + 1], "count": count} for i, count in enumerate(counts)]
    return Answer(query="hist", facts=facts, rows=rows, rows_name="bins")
