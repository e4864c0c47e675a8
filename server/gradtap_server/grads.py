"""The values of a gradient, a slice or a stack of them: from an address to one request of the run, and its answer.

`lookup` comes first and reads no chunk: shape, cost, entity tag. What HEAD asks for, what the client has already, and
what would be too much, is answered from that alone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from gradtap.errors import TimedOutError
from gradtap.query.formats import MEDIA_TYPES, Payload, encode, length_of
from gradtap_server.arrays import array_headers, download_headers, head_only
from gradtap_server.asked import accepted, check_names
from gradtap_server.caching import NO_STORE, unchanged
from gradtap_server.lookup import Found, GradQuery, Target, look_up
from gradtap_server.negotiate import chosen_form
from gradtap_server.parameters import RANGE_PATTERN, RunName, StepWord, open_problems, problems
from gradtap_server.reads import in_thread
from gradtap_server.routing import Router
from gradtap_server.run import OF_A_RUN
from gradtap_server.sending import PartsResponse, room_for
from gradtap_server.state import Here, State

router = Router(tags=["gradients"])

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
    "too-large",
)
VALUES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The values; `X-Gradtap-Shape`, `-Dtype` and `-Byteorder` say how to read them.",
        "content": {media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES.values()},
    },
    **PROBLEMS_OF_GRADS,
    **open_problems("not-acceptable"),
}


@router.get(
    "/runs/{run}/steps/{step}/grads/{param:name}",
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
    "/runs/{run}/grads/{param:name}",
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
    steps: Annotated[
        str,
        Query(
            description="Steps from A up to, not including, B, every C-th: `A:B:C`; a number alone is that step.",
            examples=["0:9"],
            json_schema_extra={"pattern": RANGE_PATTERN},
        ),
    ],
) -> Response:
    """The same slice of a gradient at several steps, stacked along a new first axis."""
    return await answer(here, request, Target(run=run, param=param, steps=steps), query)


async def answer(state: State, request: Request, target: Target, query: GradQuery) -> Response:
    """The response for a gradient: 304, the headers alone, or the values. Raises what becomes a problem."""
    check_names(request, (*GradQuery.model_fields, *(("steps",) if target.step is None else ())))
    started = time.perf_counter()
    timeout = state.settings.timeout
    form = chosen_form(query.format, accepted(request), MEDIA_TYPES)
    work = partial(look_up, state, request, target, query, form)
    found = await in_thread(work, timeout=timeout, limiter=state.quick)
    if found.fresh and (same := unchanged(request, found.fresh)):
        return same
    headers = _headers(found, query)
    spent = {"lookup": time.perf_counter() - started}
    if request.method == "HEAD":
        length = _length(found, query.dtype)
        headers |= array_headers(found.head, dtype=found.dtype) | _timing(spent)
        return head_only(media_type=MEDIA_TYPES[form], length=length, headers=headers)
    room = await room_for(found.wanted.nbytes, state.held, timeout=timeout)
    with room.kept():
        read = partial(_read, found, query.dtype, spent, timeout)
        payload = await in_thread(read, timeout=timeout, limiter=state.limiter)
        state.metrics.chunks(request.scope, found.wanted.chunks)
        headers |= array_headers(payload.head, dtype=payload.dtype, rounded=payload.rounded) | _timing(spent)
        media = payload.media_type
        return PartsResponse(payload.parts, media_type=media, headers=headers, room=room, patience=timeout)


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
