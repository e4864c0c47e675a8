"""The values of a gradient, a slice or a stack of them: from an address to one request of the run, and its answer.

Looking up comes first and reads no chunk: shape, cost, entity tag. What HEAD asks for, what the client has already,
and what would be too much, is answered from that alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError

from gradtap.errors import TimedOutError
from gradtap.query.formats import MEDIA_TYPES, GradHead, Payload, encode, length_of, resolved_dtype
from gradtap.query.local import head_of, param_of
from gradtap.query.words import range_of, step_of
from gradtap.read import Run
from gradtap.read.request import GradRequest
from gradtap.selection import Selection
from gradtap_server.arrays import PartsResponse, array_headers, download_headers, head_only
from gradtap_server.asked import accepted, address, check_names
from gradtap_server.caching import NO_STORE, Freshness, holds, tag_of, unchanged
from gradtap_server.limits import Ask, Cost, Limits, check_cost
from gradtap_server.negotiate import chosen_form
from gradtap_server.parameters import RunName, StepWord, problems
from gradtap_server.reads import in_thread
from gradtap_server.routing import Router
from gradtap_server.run import OF_A_RUN
from gradtap_server.state import Here, State

router = Router(tags=["gradients"])

ENCODING = 1
"""Part of every entity tag: raised whenever the same values would be sent as other bytes."""

JSON_BYTES = 24
"""Bytes of one number as text, at most: seventeen digits, sign, point, exponent, comma."""


class GradQuery(BaseModel):
    """What an address may say of the values it wants."""

    slice: str = Field("", description="NumPy's basic indexing: integers, start:stop:step, one ellipsis.")
    format: str = Field("", description="raw, npy, json or safetensors; without it `Accept` decides, raw by default.")
    dtype: str = Field("stored", description="stored, native, bfloat16, float16, float32 or float64.")
    attempt: int | None = Field(None, ge=1, description="Which capture of the step, from 1; the newest if not given.")
    partial: bool = Field(False, description="Take a capture that is not complete; what is missing is NaN.")
    download: bool = Field(False, description="Have a browser save the answer as a file.")


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


ParamName = Annotated[
    str,
    Path(
        description="A parameter's name, encoded, or its index where none has that name.",
        examples=["mlp.weight"],
    ),
]
PROBLEMS_OF_GRADS = problems(
    *OF_A_RUN,
    "step-not-found",
    "parameter-not-found",
    "step-in-flight",
    "incomplete",
    "bad-slice",
    "not-acceptable",
    "too-large",
    "timed-out",
)
VALUES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The values; `X-Gradtap-Shape`, `-Dtype` and `-Byteorder` say how to read them.",
        "content": {media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES.values()},
    },
    304: {"description": "The client has this answer: `If-None-Match` names its `ETag`."},
    **PROBLEMS_OF_GRADS,
}


@router.get(
    "/runs/{run}/steps/{step}/grads/{param:path}",
    operation_id="get_grad",
    summary="A gradient, or a slice of it",
    response_class=Response,
    responses=VALUES,
)
async def grad(
    request: Request,
    here: Here,
    run: RunName,
    step: StepWord,
    param: ParamName,
    query: Annotated[GradQuery, Query()],
) -> Response:
    """One gradient at one step, or a slice of it."""
    return await answer(here, request, Target(run=run, param=param, step=step), query)


@router.get(
    "/runs/{run}/grads/{param:path}",
    operation_id="get_grads",
    summary="A slice of a gradient at several steps",
    response_class=Response,
    responses=VALUES,
)
async def stacked(
    request: Request,
    here: Here,
    run: RunName,
    param: ParamName,
    query: Annotated[GradQuery, Query()],
    steps: Annotated[str, Query(description="A:B:C, the steps from A up to B, every C-th; one number is that step.")],
) -> Response:
    """The same slice of a gradient at several steps, stacked along a new first axis."""
    return await answer(here, request, Target(run=run, param=param, steps=steps), query)


async def answer(state: State, request: Request, target: Target, query: GradQuery) -> Response:
    """The response for a gradient: 304, the headers alone, or the values. Raises what becomes a problem."""
    check_names(request, (*GradQuery.model_fields, *(("steps",) if target.step is None else ())))
    started = time.perf_counter()
    timeout = state.settings.timeout
    form = chosen_form(query.format, accepted(request), MEDIA_TYPES)
    found = await in_thread(partial(look_up, state, request, target, query, form), timeout=timeout)
    if found.fresh and (same := unchanged(request, found.fresh)):
        return same
    headers = _headers(found, query)
    spent = {"lookup": time.perf_counter() - started}
    if request.method == "HEAD":
        length = _length(found, query.dtype)
        headers |= array_headers(found.head, dtype=found.dtype) | _timing(spent)
        return head_only(media_type=MEDIA_TYPES[form], length=length, headers=headers)
    payload = await in_thread(
        partial(_read, found, query.dtype, spent, timeout), timeout=timeout, limiter=state.limiter
    )
    state.metrics.chunks(request.scope, found.wanted.chunks)
    headers |= array_headers(payload.head, dtype=payload.dtype, rounded=payload.rounded) | _timing(spent)
    return PartsResponse(payload.parts, media_type=payload.media_type, headers=headers)


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
    tag = tag_of(
        ENCODING,
        wanted.identity,
        wanted.stacked,
        str(wanted.where),
        found.form,
        found.dtype,
        wanted.flags,
        wanted.factor,
    )
    if target.step is None:
        # Steps may yet come to lie within the range.
        return Freshness(tag=tag, shared=state.shared)
    # Not under the run's name: another run may have it tomorrow, in the same folder.
    lasting = query.attempt is not None and target.run == found.head.run and target.step == str(wanted.steps[0])
    if lasting:
        return Freshness(tag=tag, settled=wanted.settled, shared=state.shared)
    return Freshness(tag=tag, shared=state.shared, location=_lasting(request, found, query))


def _lasting(request: Request, found: Found, query: GradQuery) -> str:
    head = found.head
    more = {"slice": query.slice, "format": found.form, "dtype": query.dtype, "attempt": head.attempts[0]}
    more["download"] = query.download
    return address(request, "runs", head.run, "steps", head.steps[0], "grads", head.name, query=more)


def _read(found: Found, dtype: str, spent: dict[str, float], timeout: float) -> Payload:
    started = time.perf_counter()

    def progress(done: int, whole: int) -> None:
        # Nobody waits any more: the thread is wanted for others.
        if time.perf_counter() - started > timeout:
            raise TimedOutError(f"no answer within {timeout:g} s: {done} of {whole} steps were read")

    values = found.wanted.read(progress)
    read = time.perf_counter()
    payload = encode(values, replace(found.head, complete=values.complete), format=found.form, dtype=dtype)
    spent |= {"read": read - started, "encode": time.perf_counter() - read}
    return payload


def _length(found: Found, dtype: str) -> int | None:
    if found.wanted.partial and found.form not in ("raw", "npy"):
        # Whether it is complete is said within the body, and not known yet.
        return None
    return length_of(found.head, format=found.form, dtype=dtype)


def _headers(found: Found, query: GradQuery) -> dict[str, str]:
    made = dict(found.fresh.headers() if found.fresh else NO_STORE)
    return made | (download_headers(found.head, found.form) if query.download else {})


def _timing(spent: dict[str, float]) -> dict[str, str]:
    return {"Server-Timing": ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in spent.items())}
