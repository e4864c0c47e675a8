"""What an `Ownership` must satisfy, and the flat ranges that it means. Knows no arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradtap.errors import UsageError
from gradtap.types import Ownership, ParamSpec

DTYPES = ("float32", "bfloat16", "float16", "float64")
_KINDS = ("whole", "replicated", "rows", "flat", "cuts", "boxes")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRange:
    """Elements `start` to `stop` of a parameter, written by `rank`; never empty."""

    rank: int
    start: int
    stop: int


def check_ownership(params: Sequence[ParamSpec], ownership: Sequence[Ownership | None], world: int) -> None:
    """Raises `UsageError` unless each stored parameter has an owner in `range(world)` for each element."""
    if world < 1:
        raise UsageError(f"world is {world}; it must be 1 or more")
    if len(params) != len(ownership):
        raise UsageError(f"{len(params)} parameters, but ownership of {len(ownership)}; give one for each, or None")
    checked: set[tuple[str, tuple[int, ...]]] = set()
    for spec, owned in zip(params, ownership, strict=True):
        if spec.stored:
            _check_one(spec, owned, world, checked)


def owned_ranges(spec: ParamSpec, owned: Ownership) -> tuple[OwnedRange, ...]:
    """The parameter's elements by owner, ascending; neighbours of one rank are joined, empty ranges left out.

    For a replicated parameter: all of it, by the first rank. Boxes are no ranges: see `plan.blocks`.
    """
    found: list[OwnedRange] = []
    bounds = _bounds(spec, owned)
    for rank, start, stop in zip(owned.ranks, bounds, bounds[1:], strict=False):
        if start == stop:
            continue
        if found and found[-1].rank == rank:
            start = found.pop().start
        found.append(OwnedRange(rank=rank, start=start, stop=stop))
    return tuple(found)


def _bounds(spec: ParamSpec, owned: Ownership) -> tuple[int, ...]:
    if owned.kind == "cuts":
        return owned.bounds
    numel, ranks = spec.numel, len(owned.ranks)
    if owned.kind in ("whole", "replicated") or not spec.shape:
        return (0, numel)
    row = math.prod(spec.shape[1:]) if owned.kind == "rows" else 1
    block = -(-(numel // row) // ranks) * row
    return tuple(min(i * block, numel) for i in range(ranks + 1))


def _check_one(spec: ParamSpec, owned: Ownership | None, world: int, checked: set[tuple[str, tuple[int, ...]]]) -> None:
    name = spec.name
    if owned is None:
        raise UsageError(f"parameter {name!r} is captured but has no ownership; say which rank holds it")
    if spec.dtype not in DTYPES:
        raise UsageError(f"dtype of {name!r} is {spec.dtype!r}; allowed are {', '.join(DTYPES)}")
    if owned.kind not in _KINDS:
        raise UsageError(f"ownership kind of {name!r} is {owned.kind!r}; allowed are {', '.join(_KINDS)}")
    if (owned.kind, owned.ranks) not in checked:
        _check_ranks(name, owned, world)
        checked.add((owned.kind, owned.ranks))
    if owned.kind == "cuts":
        _check_cuts(spec, owned)
    if owned.kind == "boxes":
        _check_boxes(spec, owned)


def _check_ranks(name: str, owned: Ownership, world: int) -> None:
    ranks = owned.ranks
    if not ranks or min(ranks) < 0 or max(ranks) >= world:
        raise UsageError(f"ranks of {name!r} are {ranks[:8]}; each must lie in 0 to {world - 1}, at least one")
    if owned.kind == "whole" and len(ranks) != 1:
        raise UsageError(f"{name!r} is owned whole by {len(ranks)} ranks; give one, or kind 'replicated'")
    if owned.kind != "cuts" and len(set(ranks)) != len(ranks):
        raise UsageError(f"ranks of {name!r} name a rank twice: {ranks[:8]}; name each once")


def _check_cuts(spec: ParamSpec, owned: Ownership) -> None:
    bounds = owned.bounds
    rising = all(a <= b for a, b in itertools.pairwise(bounds))
    if len(bounds) != len(owned.ranks) + 1 or not rising or bounds[0] != 0 or bounds[-1] != spec.numel:
        raise UsageError(
            f"bounds of {spec.name!r} are {bounds[:8]} for {len(owned.ranks)} ranks; "
            f"they must rise from 0 to {spec.numel}, one more than ranks"
        )


def _check_boxes(spec: ParamSpec, owned: Ownership) -> None:
    boxes, shape = owned.boxes, spec.shape
    inside = len(boxes) == len(owned.ranks) and all(
        len(box) == len(shape) and all(0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True)) for box in boxes
    )
    # That none overlap shows where the planner lays them out.
    if not inside or sum(math.prod(b - a for a, b in box) for box in boxes) != spec.numel:
        raise UsageError(
            f"boxes of {spec.name!r} are {boxes[:4]} for {len(owned.ranks)} ranks; "
            f"they must cover the shape {shape} once, none of them empty"
        )
