"""Parameters and their owners to the plan of a session. Kinds of ownership are elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from gradtap.config import Settings
from gradtap.plan.arrays import ArrayMaker, stored_dtype
from gradtap.plan.columns import column_numels
from gradtap.plan.layout import Limits
from gradtap.plan.naming import array_names
from gradtap.plan.ownership import check_ownership
from gradtap.plan.replicated import replicated_arrays
from gradtap.plan.shared import owned_arrays
from gradtap.types import ArrayPlan, Ownership, ParamSpec, SessionPlan

_Known = dict[tuple[tuple[int, ...], str, Ownership], tuple[str, list[ArrayPlan]]]


def plan_session(
    params: Sequence[ParamSpec], ownership: Sequence[Ownership | None], *, world: int, settings: Settings
) -> SessionPlan:
    """The arrays of a session and who writes each shard column; the same on every rank.

    Each element of each stored parameter has one writer. Arrays come in model order, pieces by their start.
    `ownership` is None for a parameter that is not stored (frozen, unoptimized, of size zero): it gets no array.
    Raises `UsageError` for ownership that does not cover a stored parameter or names a rank outside `world`.
    """
    check_ownership(params, ownership, world)
    limits = Limits.of(settings)
    names = array_names([spec.name for spec in params])
    # At 1,024 ranks most owner tuples are long and equal: one object stands for all of a kind.
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    known: _Known = {}
    arrays: dict[int, list[ArrayPlan]] = {}
    groups: dict[tuple[int, ...], list[tuple[ArrayMaker, ParamSpec]]] = defaultdict(list)
    for index, (spec, owned) in enumerate(zip(params, ownership, strict=True)):
        if owned is None or not spec.stored:
            continue
        dtype = stored_dtype(spec.dtype)
        maker = ArrayMaker(param=index, base=names[index], dtype=dtype, limits=limits, seen=seen)
        if owned.kind == "replicated":
            groups[tuple(sorted(owned.ranks))].append((maker, spec))
        else:
            arrays[index] = _arrays(maker, spec, owned, known)
    loads = _loads([each for some in arrays.values() for each in some]) if groups else {}
    for ranks, members in groups.items():
        for array in replicated_arrays(members, ranks, loads):
            arrays[array.param] = [array]
    ordered = (each for index in sorted(arrays) for each in arrays[index])
    return SessionPlan(world=world, params=tuple(params), arrays=tuple(ordered))


def _arrays(maker: ArrayMaker, spec: ParamSpec, owned: Ownership, known: _Known) -> list[ArrayPlan]:
    # Layers repeat: most parameters differ from an earlier one in name only.
    base, arrays = known.setdefault((spec.shape, maker.dtype, owned), (maker.base, []))
    if not arrays:
        arrays.extend(owned_arrays(maker, spec, owned))
        return arrays
    return [replace(each, param=maker.param, name=maker.base + each.name[len(base) :]) for each in arrays]


def _loads(arrays: Sequence[ArrayPlan]) -> dict[int, int]:
    loads: dict[int, int] = defaultdict(int)
    for array in arrays:
        itemsize = 8 if array.dtype == "float64" else 4
        for owner, numel in zip(array.owners, column_numels(array), strict=True):
            loads[owner] += numel * itemsize
    return loads
