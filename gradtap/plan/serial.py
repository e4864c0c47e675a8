"""A plan as JSON and back, the attribute that lists pieces, and how two models differ. Reads and writes no file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast, get_args

from gradtap.errors import DamagedError
from gradtap.plan.chunks import param_arrays
from gradtap.types import ArrayPlan, ParamSpec, ParamStatus, SessionPlan

STATUSES: tuple[str, ...] = get_args(ParamStatus)


def canonical_json(obj: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII. Raises `ValueError` for NaN or infinity."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plan_to_json(plan: SessionPlan) -> dict[str, Any]:
    """The plan as a JSON object; owners as runs of [rank, number of shard columns]."""
    # Arrays of one ownership share their tuple of owners, which may be long: count its runs once.
    known: dict[int, list[list[int]]] = {}
    return {
        "world": plan.world,
        "params": [_param_to_json(spec) for spec in plan.params],
        "arrays": [_array_to_json(array, known) for array in plan.arrays],
    }


def plan_from_json(found: Mapping[str, Any]) -> SessionPlan:
    """The plan that `plan_to_json` wrote. Raises `DamagedError` where it is not one or contradicts itself."""
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    try:
        params = tuple(_param_from_json(each) for each in found["params"])
        arrays = tuple(_array_from_json(each, seen) for each in found["arrays"])
        plan = SessionPlan(world=_count(found["world"]), params=params, arrays=arrays)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"the session's plan does not read ({error!r}); restore session.json from a copy, or run gradtap verify"
        ) from error
    for array in plan.arrays:
        _check(plan, array)
    return plan


def pieces_attribute(plan: SessionPlan) -> dict[str, Any]:
    """The group attribute `pieces`: parameters that are not one array of their own shape, by true name.

    `arrays`, `starts` and `stops` (flat elements of the parameter) go together, ascending and without gaps;
    `shape` is the parameter's.
    """
    pieces: dict[str, Any] = {}
    for index, spec in enumerate(plan.params):
        arrays = [plan.arrays[i] for i in param_arrays(plan, index)]
        if not arrays or (len(arrays) == 1 and arrays[0].shape == spec.shape):
            continue
        pieces[spec.name] = {
            "arrays": [array.name for array in arrays],
            "starts": [array.start for array in arrays],
            "stops": [array.stop for array in arrays],
            "shape": list(spec.shape),
        }
    return pieces


def first_difference(a: SessionPlan, b: SessionPlan) -> str | None:
    """Says the first parameter, in model order, whose name or shape differs; None where all agree."""
    for index, (one, other) in enumerate(itertools.zip_longest(a.params, b.params)):
        if one is None or other is None or (one.name, one.shape) != (other.name, other.shape):
            return f"parameter {index} is {_said(one)} in the first and {_said(other)} in the second"
    return None


def runs(owners: Iterable[int]) -> list[list[int]]:
    """Owners of columns as runs of [first rank, columns of each, ranks]; equal shares of many ranks are one run."""
    found: list[list[int]] = []
    for rank, group in itertools.groupby(owners):
        each = sum(1 for _ in group)
        if found and found[-1][1] == each and rank == found[-1][0] + found[-1][2]:
            found[-1][2] += 1
        else:
            found.append([rank, each, 1])
    return found


def owners_of(found: Iterable[Iterable[int]], columns: int) -> tuple[int, ...]:
    """The owners that `runs` wrote, one for each of the `columns`. Raises `DamagedError` for another number of them."""
    read = [(int(first), int(each), int(ranks)) for first, each, ranks in found]
    told = sum(each * ranks for _, each, ranks in read)
    # Counted before they are listed: a small file must not make a large tuple.
    if told != columns or any(min(run) < 0 for run in read):
        raise DamagedError(f"{told} owners are listed for {columns} shard columns; restore session.json from a copy")
    return tuple(rank for first, each, ranks in read for rank in range(first, first + ranks) for _ in range(each))


def _said(spec: ParamSpec | None) -> str:
    return "absent" if spec is None else f"{spec.name!r} of shape {spec.shape}"


def _param_to_json(spec: ParamSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "status": spec.status,
        "aliases": list(spec.aliases),
    }


def _param_from_json(found: Mapping[str, Any]) -> ParamSpec:
    status = _text(found["status"])
    if status not in STATUSES:
        raise ValueError(f"status {status!r}")
    return ParamSpec(
        name=_text(found["name"]),
        shape=_counts(found["shape"]),
        dtype=_text(found["dtype"]),
        status=cast("ParamStatus", status),
        aliases=tuple(_text(alias) for alias in _list(found["aliases"])),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a text belongs")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} where a list belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise TypeError(f"{value!r} where a count belongs")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(_count(n) for n in _list(value))


def _array_to_json(array: ArrayPlan, known: dict[int, list[list[int]]]) -> dict[str, Any]:
    key = id(array.owners)
    if key not in known:
        known[key] = runs(array.owners)
    return {
        "name": array.name,
        "param": array.param,
        "start": array.start,
        "stop": array.stop,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "time": array.time,
        "shard": list(array.shard),
        "chunk": list(array.chunk),
        "owners": known[key],
    }


def _array_from_json(found: Mapping[str, Any], seen: dict[tuple[int, ...], tuple[int, ...]]) -> ArrayPlan:
    grid = zip(found["shape"], found["shard"], strict=True)
    owners = owners_of(found["owners"], math.prod(-(-int(n) // int(s)) for n, s in grid))
    return ArrayPlan(
        name=_text(found["name"]),
        param=_count(found["param"]),
        start=_count(found["start"]),
        stop=_count(found["stop"]),
        shape=_counts(found["shape"]),
        dtype=cast("Literal['float32', 'float64']", _text(found["dtype"])),
        time=_count(found["time"]),
        shard=_counts(found["shard"]),
        chunk=_counts(found["chunk"]),
        owners=seen.setdefault(owners, owners),
    )


def _check(plan: SessionPlan, array: ArrayPlan) -> None:
    sizes = (*array.shape, *array.shard, *array.chunk, array.time)
    columns = 1
    fits = len(array.shape) == len(array.shard) == len(array.chunk) and all(n > 0 for n in sizes)
    if fits:
        fits = all(s % c == 0 for s, c in zip(array.shard, array.chunk, strict=True))
        for count in array.columns:
            columns *= count
    if not (fits and len(array.owners) == columns and 0 <= array.param < len(plan.params)):
        raise DamagedError(
            f"array {array.name!r} of the session's plan contradicts itself (shape {array.shape}, shard {array.shard}, "
            f"chunk {array.chunk}, {len(array.owners)} owners); restore session.json from a copy"
        )
