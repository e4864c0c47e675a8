"""The arithmetic of the scale ledger: k and factor of a loss scale, clip coefficient of a norm. No torch."""

from __future__ import annotations

import math


def split_scale(scale: float) -> tuple[int, float]:
    """(k, rest) with stored value = engine's bits x 2**-k and stored value x rest = engine's bits / scale.

    `rest` is 1 for a power of two. A scale of 0, infinity or NaN gives (0, NaN): no factor is known.
    """
    if not math.isfinite(scale) or scale <= 0:
        return 0, math.nan
    k = round(math.log2(scale))
    return k, 2.0**k / scale


def window_factor(divisor: float, micro_seen: int) -> float:
    """What the mean over a window needs where it held fewer micro-batches than it was divided by; 1 otherwise.

    More micro-batches than the divisor tell nothing certain (several losses, a lost batch): no factor for those.
    """
    if micro_seen > 0 and divisor > micro_seen:
        return divisor / micro_seen
    return 1.0


def clip_coefficient(norm: float, limit: float) -> float:
    """min(1, limit / (norm + 1e-6)) as torch and DeepSpeed compute it; NaN where either is unknown."""
    if math.isnan(norm) or math.isnan(limit) or math.isinf(norm):
        return math.nan
    return min(1.0, limit / (norm + 1e-6))
