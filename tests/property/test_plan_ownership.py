"""The law of ownership, on generated models: each element once, each shard column one writer, chunks of fair size."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtap.config import Settings
from gradtap.plan.chunks import array_chunks, chunk_count, param_arrays, rank_chunks, rank_pieces
from gradtap.plan.ownership import OwnedRange, owned_ranges
from gradtap.plan.planner import plan_session
from gradtap.plan.serial import pieces_attribute, plan_from_json, plan_to_json
from gradtap.types import ArrayPlan, Ownership, OwnershipKind, ParamSpec, SessionPlan

KIB = 2**10
SETTINGS = Settings()
SMALL = Settings(chunk_bytes=128, shard_bytes=4096, max_time=16)
ODD = (1, 2, 3, 7, 64, 127, 255, 257, 768, 1000, 1021, 4001, 4096, 5003, 32003, 50257, 65521, 128256, 151936)
DTYPES = st.sampled_from(("float32", "bfloat16", "float16", "float64"))
MOST = 2**28


@st.composite
def shapes(draw: st.DrawFn, most: int = MOST) -> tuple[int, ...]:
    """Shapes of 0 to 4 axes, odd, prime and vocabulary-like sizes among them, of at most `most` elements."""
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        room = most // math.prod(shape)
        sizes = st.integers(1, min(room, 600)) | st.sampled_from([n for n in ODD if n <= room])
        shape.append(draw(sizes))
    return tuple(shape)


def zero_cuts(numels: list[int], ranks: tuple[int, ...]) -> list[Ownership]:
    """Parameters laid end to end in one flat buffer, which is split equally between the ranks."""
    part = -(-sum(numels) // len(ranks))
    owned, at = [], 0
    for numel in numels:
        first, last = at // part, (at + numel - 1) // part
        bounds = (0, *(r * part - at for r in range(first + 1, last + 1)), numel)
        owned.append(Ownership(kind="cuts", ranks=ranks[first : last + 1], bounds=bounds))
        at += numel
    return owned


@st.composite
def row_cuts(draw: st.DrawFn, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Ownership:
    """Cuts at rows, which may or may not fit one grid."""
    step = draw(st.integers(1, 4))
    row = math.prod(shape[1:]) if shape else 1
    rows = shape[0] if shape else 1
    inner = sorted(min(draw(st.integers(0, rows // step)) * step, rows) for _ in ranks[1:])
    return Ownership(kind="cuts", ranks=ranks, bounds=(0, *(n * row for n in inner), rows * row))


@st.composite
def models(draw: st.DrawFn, most: int = MOST, ranks: int = 1024) -> tuple[SessionPlan, list[Ownership], Settings]:
    """A planned model, its ownership, and the settings it was planned with."""
    count = draw(st.integers(1, 5))
    params = [ParamSpec(name=f"p{i}", shape=draw(shapes(most)), dtype=draw(DTYPES)) for i in range(count)]
    sizes = st.integers(1, min(ranks, 16)) | st.sampled_from(
        [n for n in (31, 64, 100, 1000, 1024) if n <= ranks] or [1]
    )
    world = draw(sizes)
    everyone = tuple(range(world))
    if draw(st.booleans()):
        owned = zero_cuts([p.numel for p in params], everyone)
    else:
        owned = [draw(ownership(p, everyone)) for p in params]
    chosen = SETTINGS if most == MOST else SMALL
    return plan_session(params, owned, world=world, settings=chosen), owned, chosen


@st.composite
def ownership(draw: st.DrawFn, spec: ParamSpec, everyone: tuple[int, ...]) -> Ownership:
    """Any ownership of one parameter."""
    kinds: tuple[OwnershipKind, ...] = ("whole", "replicated", "rows", "flat", "cuts")
    kind = draw(st.sampled_from(kinds))
    if kind == "whole":
        return Ownership(kind="whole", ranks=(draw(st.sampled_from(everyone)),))
    ranks = everyone[draw(st.integers(0, len(everyone) - 1)) :]
    if kind == "cuts":
        return draw(row_cuts(spec.shape, ranks[:8]))
    return Ownership(kind=kind, ranks=ranks)


@given(models())
@settings(max_examples=60, deadline=None)
def test_each_element_once_by_its_owner(model: tuple[SessionPlan, list[Ownership], Settings]) -> None:
    """Chunks of a parameter join end to end from 0 to its size, and each is written by a rank that holds it."""
    plan, owned, _ = model
    for index, spec in enumerate(plan.params):
        found = sorted((c.start, c.stop, c.owner) for i in param_arrays(plan, index) for c in array_chunks(plan, i))
        assert found[0][0] == 0 and found[-1][1] == spec.numel
        assert all(one[1] == other[0] for one, other in pairwise(found)) and all(a < b for a, b, _ in found)
        if owned[index].kind == "replicated":
            assert {owner for _, _, owner in found} <= set(owned[index].ranks)
            continue
        held = iter(owned_ranges(spec, owned[index]))
        mine = next(held)
        for start, stop, owner in found:
            while mine.stop <= start:
                mine = next(held)
            assert mine.start <= start and stop <= mine.stop and owner == mine.rank


@given(models())
@settings(max_examples=60, deadline=None)
def test_grid_laws(model: tuple[SessionPlan, list[Ownership], Settings]) -> None:
    """Chunks divide shards, lie between 64 KiB and 2 MiB unless the block is smaller, and files stay within bounds."""
    plan, owned, _ = model
    names = [array.name.casefold() for array in plan.arrays]
    assert len(set(names)) == len(names)
    ranges = [owned_ranges(spec, each) for spec, each in zip(plan.params, owned, strict=True)]
    for array in plan.arrays:
        itemsize = 8 if array.dtype == "float64" else 4
        size = array.chunk_numel * itemsize
        assert all(s % c == 0 for s, c in zip(array.shard, array.chunk, strict=True))
        assert len(array.owners) == math.prod(array.columns)
        block = itemsize * largest_block(array, plan.params[array.param], ranges[array.param])
        assert size <= 2048 * KIB and (size >= 64 * KIB or size >= block)
        assert array.entries <= 256 and array.time * array.entries <= 4096
        assert array.time & (array.time - 1) == 0 and 1 <= array.time <= SETTINGS.max_time
        assert array.time == 1 or array.time * math.prod(array.shard) * itemsize <= SETTINGS.shard_bytes
        if "@" not in array.name:
            assert array.shape == plan.params[array.param].shape
    listed = pieces_attribute(plan)
    for index, spec in enumerate(plan.params):
        plain = [plan.arrays[i].name for i in param_arrays(plan, index)] == [spec.name]
        assert plain == (spec.name not in listed)


def largest_block(array: ArrayPlan, spec: ParamSpec, ranges: tuple[OwnedRange, ...]) -> int:
    """Elements of the array's one owner, or of the grid extent between several."""
    if len(ranges) == 1 or array.stop - array.start < spec.numel:
        return array.stop - array.start
    return math.gcd(*(each.start for each in ranges[1:]))


@given(models())
@settings(max_examples=40, deadline=None)
def test_slots(model: tuple[SessionPlan, list[Ownership], Settings]) -> None:
    """By array and by rank the same chunks come out; a rank's slots count from 0; a file has one writer."""
    plan, _, _ = model
    by_rank = defaultdict(list)
    writer: dict[tuple[int, tuple[int, ...]], int] = {}
    seen = set()
    for index in range(len(plan.arrays)):
        for chunk in array_chunks(plan, index):
            by_rank[chunk.owner].append(chunk)
            assert writer.setdefault((chunk.array, chunk.column), chunk.owner) == chunk.owner
            assert 0 <= chunk.entry < plan.arrays[index].entries
            assert (chunk.array, chunk.column, chunk.entry) not in seen
            seen.add((chunk.array, chunk.column, chunk.entry))
    for rank in sorted({0, plan.world - 1, *list(by_rank)[:3]}):
        assert list(rank_chunks(plan, rank)) == by_rank[rank] and chunk_count(plan, rank) == len(by_rank[rank])
        assert [c.slot for c in by_rank[rank]] == list(range(len(by_rank[rank])))
        pieces = rank_pieces(plan, rank)
        assert sum(p.stop - p.start for p in pieces) == sum(c.stop - c.start for c in by_rank[rank])
        assert all((a.param, a.stop) < (b.param, b.start) for a, b in pairwise(pieces))


@given(models(most=600, ranks=40))
@settings(max_examples=60, deadline=None)
def test_assembly_is_the_identity(model: tuple[SessionPlan, list[Ownership], Settings]) -> None:
    """What chunks put at their place in the arrays reads back, through the regular grid alone, as the parameter."""
    plan, _, _ = model
    for index, spec in enumerate(plan.params):
        values = np.arange(1, spec.numel + 1)
        joined = np.zeros(spec.numel, np.int64)
        for i in param_arrays(plan, index):
            array = plan.arrays[i]
            padded = np.zeros([n * s for n, s in zip(array.columns, array.shard, strict=True)], np.int64)
            for chunk in array_chunks(plan, i):
                body = np.zeros(chunk.numel, np.int64)
                body[: chunk.stop - chunk.start] = values[chunk.start : chunk.stop]
                inner = np.unravel_index(chunk.entry, array.shard_chunks) if array.shape else ()
                place = tuple(
                    slice(col * s + int(e) * c, col * s + int(e) * c + c)
                    for col, s, e, c in zip(chunk.column, array.shard, inner, array.chunk, strict=True)
                )
                padded[place] = body.reshape(array.chunk)
            joined[array.start : array.stop] = padded[tuple(slice(n) for n in array.shape)].ravel()
        assert np.array_equal(joined, values)


@given(models())
@settings(max_examples=30, deadline=None)
def test_json_round_trip(model: tuple[SessionPlan, list[Ownership], Settings]) -> None:
    """Every plan comes back from its JSON, and planning again gives the same plan."""
    plan, owned, chosen = model
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_session(plan.params, owned, world=plan.world, settings=chosen) == plan
