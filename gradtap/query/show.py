"""One gradient for human eyes: facts, statistics, first values, histogram."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradtap.query.answer import Answer

if TYPE_CHECKING:
    from gradtap.encode.summary import PieceSummary
    from gradtap.types import GradSlice

STATISTICS = ("count", "l2", "l1", "absmax", "mean", "std", "zeros", "nan", "inf")


def show(run: str, grad: GradSlice, *, slice: str = "", head: int = 8, tags: Mapping[str, Any] | None = None) -> Answer:
    """What is known of a gradient that was read: `run` is the run's id, `tags` those of the step.

    `values` are the first `head` elements in row-major order. `histogram` counts by sign and floor(log2|x|), which is
    cut to -64 and 31; empty counts are left out.
    """
    import numpy as np

    from gradtap.encode.summary import summarize

    flat = np.ascontiguousarray(grad.values).reshape(-1)
    summary = summarize(flat, "full")
    assert summary is not None, "level full always has a summary"
    facts = {
        "run": run,
        "name": grad.name,
        "step": grad.step,
        "attempt": grad.attempts[0],
        "shape": list(grad.shape),
        "slice": slice or None,
        "dtype": str(grad.dtype),
        "dtype_captured": grad.dtype_captured,
        "complete": grad.complete,
        "flags": list(grad.flags),
        "factor": grad.factor[0],
        **({} if grad.consumed is None else {"consumed": grad.consumed[0]}),
        "tags": tags,
        "summary": {name: getattr(summary, name) for name in STATISTICS},
        "values": flat[:head].tolist(),
        "values_shown": min(head, flat.size),
        "values_total": flat.size,
        "histogram": _exponents(summary),
    }
    return Answer(query="show", facts=facts)


def _exponents(summary: PieceSummary) -> dict[str, Any]:
    from gradtap.encode.histogram import LOWEST, ZERO_BIN

    counts = [] if summary.hist is None else summary.hist.tolist()
    filled = [(bin - ZERO_BIN, count) for bin, count in enumerate(counts) if count]
    return {
        "negative": {str(LOWEST - 1 - at): count for at, count in filled if at < 0},
        "zero": sum(count for at, count in filled if at == 0),
        "positive": {str(LOWEST - 1 + at): count for at, count in filled if at > 0},
    }
