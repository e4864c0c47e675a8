"""From the ranks' rows to one row for all: ledger columns and summary statistics. Pure functions on arrays.

`R` rows, `Q` pieces of all ranks side by side, `P` stored parameters, `B` histogram bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.flags import UNTOUCHED
from gradtap.store.ledger_fields import COUNT_STATS, LedgerField

Array = NDArray[Any]


def merge_field(field: LedgerField, ranks: Sequence[Array]) -> Array:
    """One column from the ranks' columns, each of shape (R, ...)."""
    if field.merge == "first" or len(ranks) == 1:
        return ranks[0]
    stack = np.stack(ranks)
    if field.merge == "sum":
        return np.asarray(stack.sum(axis=0))
    if field.merge == "or":
        return np.asarray(np.bitwise_or.reduce(stack, axis=0))
    if field.merge == "touch":
        return _first_touch(stack)
    return np.asarray(np.fmax.reduce(stack, axis=0))


def _first_touch(stack: Array) -> Array:
    never = np.iinfo(stack.dtype).max
    first = np.where(stack < 0, never, stack).min(axis=0)
    return np.where(first == never, -1, first).astype(stack.dtype)


def merge_stats(pieces: Mapping[str, Array], owner: Array, count: Array, params: int) -> dict[str, Array]:
    """Statistics of whole parameters from those of their pieces.

    `pieces[stat]` has shape (R, Q), `hist` (R, Q, B); `owner` (Q,) is the parameter of each piece, `count` (Q,)
    its elements. Returns (R, P) and (R, P, B), of the statistics given; `std` needs `mean` beside it. A parameter of
    which one piece was not taken (NaN, or -1 in a count) is not taken as a whole. `std` is the population's, pieces
    joined by the formula of Chan, Golub and LeVeque (1983): the sum of squares about the joint mean.
    """
    merged = {stat: _merge_counts(values, owner, params) for stat, values in pieces.items() if stat in COUNT_STATS}
    for stat, ufunc in (("l2", np.hypot), ("l1", np.add), ("absmax", np.maximum)):
        if stat in pieces:
            merged[stat] = _reduce(ufunc, pieces[stat], owner, params)
    if "mean" in pieces:
        std = pieces.get("std", np.zeros_like(pieces["mean"]))
        joint = _merge_moments(pieces["mean"], std, owner, count, params)
        merged |= {stat: values for stat, values in zip(("mean", "std"), joint, strict=True) if stat in pieces}
    return merged


def settle_untouched(flags: Array, touched: Array, stored: Array, written: Array) -> Array:
    """Flags (R,) with UNTOUCHED as all ranks together see it: a rank's own bit is of its own backward alone.

    `touched` (R, all parameters) is merged; `stored` (all parameters,) says of which it counts, `written` (R,) which
    rows there are.
    """
    bit = np.uint64(UNTOUCHED)
    missing = (touched[:, stored] < 0).any(axis=1) & written
    return np.asarray(np.where(missing, flags | bit, flags & ~bit))


def _reduce(ufunc: np.ufunc, values: Array, owner: Array, params: int) -> Array:
    out = np.zeros((values.shape[0], params))
    with np.errstate(all="ignore"):
        ufunc.at(out.T, owner, values.T)
    return out


def _merge_moments(mean: Array, std: Array, owner: Array, count: Array, params: int) -> tuple[Array, Array]:
    total = np.zeros(params)
    np.add.at(total, owner, count)
    with np.errstate(all="ignore"):
        joint = _reduce(np.add, mean * count, owner, params) / total
        about = count * (std**2 + (mean - joint[:, owner]) ** 2)
        return joint, np.sqrt(_reduce(np.add, about, owner, params) / total)


def _merge_counts(values: Array, owner: Array, params: int) -> Array:
    rows, _, *bins = values.shape
    out = np.zeros((rows, params, *bins), np.int64)
    missing = np.zeros((rows, params, *bins), bool)
    np.add.at(np.moveaxis(out, 1, 0), owner, np.moveaxis(values, 1, 0))
    np.logical_or.at(np.moveaxis(missing, 1, 0), owner, np.moveaxis(values < 0, 1, 0))
    out[missing] = -1
    return out
