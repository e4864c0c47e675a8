"""Looking up what an address asks for: the request of the run, what it costs, its entity tag. No chunk is read here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request

from gradtap.query.formats import DTYPES, FORMATS, SHORT, GradHead, length_of, resolved_dtype
from gradtap.query.local import head_of, param_of
from gradtap.query.words import range_of, step_of
from gradtap.read import Run
from gradtap.read.request import GradRequest
from gradtap.selection import Selection
from gradtap_server.asked import address
from gradtap_server.caching import Freshness, holds, tag_of
from gradtap_server.limits import Ask, Cost, Limits, check_cost
from gradtap_server.parameters import SLICE_PATTERN
from gradtap_server.state import State

ENCODING = 1
"""Part of every entity tag: raised whenever the same values would be sent as other bytes."""

JSON_BYTES = 24
"""Bytes of one number as text, at most: seventeen digits, sign, point, exponent, comma."""


class GradQuery(BaseModel):
    """What an address may say of the values it wants."""

    slice: str = Field(
        default="",
        description="As NumPy's: integers, start:stop:step, one `...`.",
        examples=["0:10, :"],
        json_schema_extra={"pattern": SLICE_PATTERN},
    )
    format: str = Field(
        default="",
        description="raw, npy, json or safetensors; else as `Accept` says.",
        examples=["npy"],
        json_schema_extra={"enum": list(FORMATS)},
    )
    dtype: str = Field(
        default="stored",
        description="stored, native, bfloat16, float16, float32 or float64.",
        examples=["native"],
        json_schema_extra={"enum": [*DTYPES, *SHORT]},
    )
    attempt: int | None = Field(
        default=None, ge=1, description="Which capture of the step, from 1; else the newest.", examples=[1]
    )
    partial: bool = Field(
        default=False, description="Take a capture that is not complete; what is missing is NaN.", examples=[1]
    )
    as_consumed: bool = Field(
        default=False,
        description="As the optimizer consumed it: clipped, and divided by the scale that the engine divided by.",
        examples=[1],
    )
    download: bool = Field(default=False, description="Have a browser save the answer as a file.", examples=[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an address names: a run, a parameter, and a step or a range of steps."""

    run: str
    param: str
    step: str | None = None
    steps: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A gradient that was looked up. `dtype` is that of the answer's elements; no `fresh`: no cache may keep it."""

    wanted: GradRequest
    head: GradHead
    form: str
    dtype: str
    fresh: Freshness | None


def look_up(state: State, request: Request, target: Target, query: GradQuery, form: str) -> Found:
    """The gradient that is asked for, allowed for by the limits unless the client has it. Reads no chunk."""
    run = state.place(target.run).run
    wanted = wanted_of(run, target, query)
    head = head_of(run, wanted)
    dtype = resolved_dtype(head, format=form, dtype=query.dtype)
    found = Found(wanted=wanted, head=head, form=form, dtype=dtype, fresh=None)
    if not wanted.partial:
        found = replace(found, fresh=_freshness(state, request, found, target, query))
    if not (found.fresh and holds(request, found.fresh)):
        check_request(wanted, target, partial(_cost, found, query.dtype), Limits.of(state.settings))
        if request.method == "HEAD" and not wanted.partial:
            wanted.check()
    return found


def checked_query(request: Request) -> GradQuery:
    """The query of an address whose route has another one. Raises as FastAPI does for its own."""
    try:
        return GradQuery.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def wanted_of(run: Run, target: Target, query: GradQuery) -> GradRequest:
    """The request of the run that an address makes. Raises as `Run.request`."""
    name = param_of(run, target.param)
    options: dict[str, Any] = {"slice": query.slice or None, "attempt": query.attempt, "partial": query.partial}
    options["as_consumed"] = query.as_consumed
    if target.step is not None:
        return run.request(name, step_of(run, target.step), **options)
    return run.request(name, steps=range_of(target.steps or ""), **options)


def check_request(wanted: GradRequest, target: Target, cost: Callable[[Selection, int], Cost], limits: Limits) -> None:
    """Raises `LimitError` where the answer would be, or read, more than the server gives."""
    stride = range_of(target.steps).step if target.steps else None
    check_cost(Ask(where=wanted.where, steps=wanted.steps, stacked=wanted.stacked, stride=stride), cost, limits)


def _cost(found: Found, dtype: str, where: Selection, count: int) -> Cost:
    chunks, read_bytes = found.wanted.needs(where, count)
    whole = found.head
    part = replace(
        whole,
        shape=(count, *where.shape) if whole.stacked else where.shape,
        steps=whole.steps[:count],
        attempts=whole.attempts[:count],
        factor=whole.factor[:count],
        consumed=whole.consumed and whole.consumed[:count],
        slice=str(where),
    )
    elements = where.numel * count
    length = length_of(part, format=found.form, dtype=dtype)
    return Cost(
        response_bytes=elements * JSON_BYTES if length is None else length,
        read_bytes=read_bytes,
        chunks=chunks,
        elements=elements if found.form == "json" else 0,
    )


def _freshness(state: State, request: Request, found: Found, target: Target, query: GradQuery) -> Freshness:
    wanted = found.wanted
    what = (wanted.identity, wanted.stacked, str(wanted.where), wanted.flags, wanted.factor)
    # Both dtypes: rounded to bfloat16 and then carried as float32 is not the same as float32.
    asked = resolved_dtype(found.head, format="raw", dtype=query.dtype)
    tag = tag_of(ENCODING, what, found.form, asked, found.dtype)
    if target.step is None:
        # Steps may yet come to lie within the range.
        return Freshness(tag=tag, shared=state.shared)
    if query.attempt is not None and names_one(target, wanted, found.head.run):
        return Freshness(tag=tag, settled=wanted.settled, shared=state.shared)
    location = _lasting(request, found, query) if state.lasts(found.head.run) else None
    return Freshness(tag=tag, shared=state.shared, location=location)


def names_one(target: Target, wanted: GradRequest, run: str) -> bool:
    """Whether an address that has an attempt names one capture for good.

    Not by the run's name, which another run may have tomorrow, in the same folder; nor by a word or an index.
    """
    return target == Target(run=run, param=wanted.param.name, step=str(wanted.steps[0]))


def _lasting(request: Request, found: Found, query: GradQuery) -> str:
    head = found.head
    more = {"slice": query.slice, "format": found.form, "dtype": query.dtype, "attempt": head.attempts[0]}
    more |= {"as_consumed": query.as_consumed, "download": query.download}
    return address(request, "runs", head.run, "steps", head.steps[0], "grads", head.name, query=more)
