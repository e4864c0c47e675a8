"""One gradient, slice or stack as it was asked for, looked at before it is read: shape, cost, facts, identity.

Nothing here reads a chunk but `GradRequest.read`. Not here: which captures a step has (`run`), bytes (`chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtap.errors import IncompleteError
from gradtap.flags import names_of
from gradtap.read.assemble import SessionReader, blank
from gradtap.read.attempts import Place
from gradtap.read.consumed import consumed_by
from gradtap.selection import Selection
from gradtap.types import ChunkPlan, GradSlice, ParamSpec

Progress = Callable[[int, int], None]
"""Called with what is done and the whole, in steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradRequest:
    """What `Run.grad` would read. `dtype` is that of the answer: float32, or float64 for a float64 gradient.

    `chunks` counts the stored chunks that the answer needs and `read_bytes` what they hold when decoded.
    `identity` changes whenever the values could: it names the run, the parameter and every capture, and no data.
    `settled`: what is known of these captures can no longer change either. `consumed`: what the values are multiplied
    with at each step to be as the optimizer consumed them; None where they were asked for as they are stored.
    """

    param: ParamSpec
    where: Selection
    places: tuple[Place, ...]
    stacked: bool
    partial: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dtype_captured: str
    flags: tuple[str, ...]
    factor: tuple[float, ...]
    chunks: int
    read_bytes: int
    identity: tuple[str, ...]
    settled: bool
    consumed: tuple[float, ...] | None = None
    _chunks_of: dict[int, list[ChunkPlan]] = field(repr=False)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the answer, in its order."""
        return tuple(place.step for place in self.places)

    @property
    def attempts(self) -> tuple[int, ...]:
        """The attempt at each step."""
        return tuple(place.attempt for place in self.places)

    @property
    def numel(self) -> int:
        """Elements of the answer."""
        return self.where.numel * (len(self.places) if self.stacked else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the answer's values."""
        return self.numel * self.dtype.itemsize

    def needs(self, where: Selection, count: int) -> tuple[int, int]:
        """Chunks, and bytes of them decoded, that another selection would need at the first `count` places."""
        found: dict[int, tuple[int, int]] = {}
        for place in self.places[:count]:
            reader = place.reader
            if id(reader) not in found:
                touched = reader.touched(reader.session.by_name[self.param.name], where)
                found[id(reader)] = len(touched), _raw_bytes(reader, touched)
        each = [found[id(place.reader)] for place in self.places[:count]]
        return sum(chunks for chunks, _ in each), sum(raw for _, raw in each)

    def check(self) -> None:
        """Look at the journals of all captures, as `read` would, without reading a chunk.

        Raises `IncompleteError` for a parameter that was not selected for a capture, `DamagedError` for a record that
        is not what was written.
        """
        for place in self.places:
            place.reader.check(self._chunks_of[id(place.reader)], capture=place.capture, step=place.step)

    def read(self, progress: Progress | None = None) -> GradSlice:
        """The gradient itself. Raises as `check`, and `DamagedError` for bytes that are not what was committed.

        As consumed, a value is the stored one times the coefficient, which is first rounded to the values' own dtype,
        in one operation of that dtype, as engines multiply: for float32 within 2 ulp of what the engine computed.
        """
        values = blank((len(self.places), *self.where.shape), self.dtype.name)
        complete = all(place.complete for place in self.places)
        for i, place in enumerate(self.places):
            complete &= place.reader.fill(
                self._chunks_of[id(place.reader)],
                self.where,
                # The ellipsis keeps a view where the answer is 0-d.
                values[i, ...],
                capture=place.capture,
                step=place.step,
                partial=self.partial,
            )
            if self.consumed is not None and self.consumed[i] != 1:
                # As engines do, a gradient that is not finite is multiplied without a word.
                with np.errstate(all="ignore"):
                    values[i, ...] *= self.dtype.type(self.consumed[i])
            if progress is not None:
                progress(i + 1, len(self.places))
        return GradSlice(
            values=values if self.stacked else values[0, ...],
            name=self.param.name,
            steps=self.steps,
            attempts=self.attempts,
            dtype_captured=self.dtype_captured,
            complete=complete,
            flags=self.flags,
            factor=self.factor,
            consumed=self.consumed,
        )


def request(
    run: str,
    param: ParamSpec,
    where: Selection,
    places: Sequence[Place],
    *,
    stacked: bool,
    partial: bool,
    whole: bool,
    as_consumed: bool = False,
) -> GradRequest:
    """The request for a parameter at `places`; `run` is the run's id, `whole` whether all its sessions read.

    Raises `IncompleteError` where a session of them does not record the parameter, and with `as_consumed` where it
    cannot be told what the optimizer consumed.
    """
    own = [_own(param, place) for place in places]
    doubles = any(spec.dtype == "float64" for spec in own)
    touched = {id(p.reader): p.reader for p in places}
    chunks_of = {at: r.touched(r.session.by_name[param.name], where) for at, r in touched.items()}
    raw = {at: _raw_bytes(r, chunks_of[at]) for at, r in touched.items()}
    facts = _facts(places, param)
    consumed = consumed_by(places) if as_consumed else None
    flags = 0
    for _, more in facts:
        flags |= more
    return GradRequest(
        param=param,
        where=where,
        places=tuple(places),
        stacked=stacked,
        partial=partial,
        shape=(len(places), *where.shape) if stacked else where.shape,
        dtype=np.dtype(np.float64 if doubles else np.float32),
        dtype_captured=", ".join(sorted({spec.dtype for spec in own})),
        flags=names_of(flags),
        factor=tuple(factor for factor, _ in facts),
        chunks=sum(len(chunks_of[id(p.reader)]) for p in places),
        read_bytes=sum(raw[id(p.reader)] for p in places),
        identity=(
            *(run, param.name),
            *(f"{p.reader.session.nonce}:{p.capture}:{p.step}:{p.attempt}" for p in places),
            *(() if consumed is None else ("as-consumed", *map(repr, consumed))),
        ),
        consumed=consumed,
        settled=whole and not partial and all(p.complete for p in places) and _settled(places),
        _chunks_of=chunks_of,
    )


def _own(param: ParamSpec, place: Place) -> ParamSpec:
    session = place.reader.session
    at = session.by_name.get(param.name)
    if at is None or session.plan.params[at].status != "captured":
        why = "did not have" if at is None else f"left out as {session.plan.params[at].status}"
        raise IncompleteError(
            f"step {place.step} was recorded by session {session.name}, which {why} {param.name!r}; ask for a step "
            "of another session, see run.sessions"
        )
    return session.plan.params[at]


def _raw_bytes(reader: SessionReader, chunks: Sequence[ChunkPlan]) -> int:
    arrays = reader.session.plan.arrays
    return sum(chunk.numel * np.dtype(arrays[chunk.array].dtype).itemsize for chunk in chunks)


def _by_reader(places: Sequence[Place]) -> list[list[int]]:
    """Indices of the places of each session, ascending by step."""
    found: dict[int, list[int]] = {}
    for at, place in enumerate(places):
        found.setdefault(id(place.reader), []).append(at)
    return [sorted(group, key=lambda at: places[at].step) for group in found.values()]


def _facts(places: Sequence[Place], param: ParamSpec) -> list[tuple[float, int]]:
    facts: dict[int, tuple[float, int]] = {}
    for group in _by_reader(places):
        reader = places[group[0]].reader
        found = reader.ledger.facts([places[at].step for at in group], reader.session.by_name[param.name])
        facts.update(zip(group, found, strict=True))
    return [facts[at] for at in range(len(places))]


def _settled(places: Sequence[Place]) -> bool:
    for group in _by_reader(places):
        reader = places[group[0]].reader
        if not reader.ledger.settled([places[at].step for at in group]):
            return False
    return True
