"""Gradients stacked over steps, and any selection: the service gives what NumPy does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.samples import PARAMS, OddJob, array_of, grad_path, reads, same_bits, stack_path
from tests.server.serving import Server, serving

RUN = "stack"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> OddJob:
    """A closed run that captured every second step."""
    made = OddJob(run=tmp_path_factory.mktemp("stack") / RUN, params=PARAMS, every=2)
    for step in range(2, 17, 2):
        made.step(step)
    made.close()
    return made


@pytest.fixture(scope="module")
def server(job: OddJob) -> Iterator[Server]:
    with serving(job.run) as running:
        yield running


RANGES = [
    (":", [2, 4, 6, 8, 10, 12, 14, 16]),
    ("4:10", [4, 6, 8]),
    ("3:", [4, 6, 8, 10, 12, 14, 16]),
    (":7:", [2, 4, 6]),
    ("4:17:4", [4, 8, 12, 16]),
    ("6", [6]),
    ("", [2, 4, 6, 8, 10, 12, 14, 16]),
]


@pytest.mark.parametrize(("text", "steps"), RANGES)
def test_stack_over_steps(server: Server, job: OddJob, text: str, steps: list[int]) -> None:
    """The steps of the range that were recorded come along a new first axis, in order, and the headers name them."""
    answer = server.get(stack_path(RUN, "conv", text, slice="1, ..., ::-1"))
    assert same_bits(array_of(answer), np.stack([job.expected("conv", s) for s in steps])[:, 1, ..., ::-1])
    assert answer.headers["x-gradtap-steps"] == ",".join(map(str, steps))
    assert answer.headers["x-gradtap-count"] == str(len(steps))
    assert answer.headers["x-gradtap-attempt"] == ",".join("1" for _ in steps)
    assert "x-gradtap-step" not in answer.headers


def test_stack_is_asked_anew(server: Server) -> None:
    """A stack has a tag, answers 304 and HEAD without reading, and is never immutable: its range may yet fill."""
    path = stack_path(RUN, "w", "4:9")
    first = server.get(path)
    before = reads(server, RUN)
    assert first.headers["cache-control"] == "no-cache" and "content-location" not in first.headers
    assert server.get(path, headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    assert server.head(path).headers["content-length"] == str(len(first.content))
    assert server.head(stack_path(RUN, "w", "4:11")).headers["etag"] != first.headers["etag"]
    one = server.head(stack_path(RUN, "w", "4")).headers["etag"]
    assert one != server.head(grad_path(RUN, 4, "w")).headers["etag"]
    assert reads(server, RUN) == before


@pytest.mark.parametrize("form", ["raw", "npy", "safetensors", "json"])
def test_stack_forms(server: Server, form: str) -> None:
    """Every form carries a stack, with the length that HEAD promised."""
    path = stack_path(RUN, "half", "2:9", format=form, dtype="native")
    answer, head = server.get(path), server.head(path)
    assert answer.status_code == head.status_code == 200
    assert answer.headers["x-gradtap-shape"] == "4,9,4"
    if form != "json":
        assert head.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(
    ("steps", "status"),
    [
        ("1:2:3:4", 400),
        ("::0", 400),
        ("a:b", 400),
        ("first", 400),
        ("100:200", 404),
        ("3", 404),
        ("3:4", 404),
    ],
)
def test_stack_problems(server: Server, steps: str, status: int) -> None:
    """A range that is none is a usage problem; one that names no recorded step is not found."""
    body = server.json(stack_path(RUN, "w", steps), status=status)
    assert body["type"] == ("/problems/usage" if status == 400 else "/problems/step-not-found")


def test_stack_needs_steps(server: Server) -> None:
    """Without `steps` the address of stacks says what is missing."""
    body = server.json(f"/api/v1/runs/{RUN}/grads/w", status=400)
    assert body["type"] == "/problems/usage" and "steps" in body["detail"]


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, tuple[Any, ...]]:
    """A selection as the address has it and as NumPy does."""
    parts: list[Any] = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        if length and draw(st.booleans()):
            parts.append(draw(st.integers(-length, length - 1)))
        else:
            bound = st.none() | st.integers(-length - 3, length + 3)
            step = draw(st.none() | st.integers(-4, 4).filter(bool))
            parts.append(slice(draw(bound), draw(bound), step))
    if draw(st.booleans()) or not parts:
        parts.insert(draw(st.integers(0, len(parts))), ...)
        if parts[-1] is not ... and len(parts) - 1 < len(shape):
            # What follows the ellipsis belongs to the last axes, whose lengths are others.
            parts = [part if part is ... else slice(None, None, -1) for part in parts]
    return ", ".join(map(_text, parts)), tuple(parts)


def _text(part: Any) -> str:
    if part is ...:
        return "..."
    if isinstance(part, int):
        return str(part)
    return ":".join("" if bound is None else str(bound) for bound in (part.start, part.stop, part.step))


@given(st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_selection_is_numpys(server: Server, job: OddJob, data: st.DataObject) -> None:
    """Whatever is selected, of whatever parameter and dtype, one step or several: the bits are NumPy's."""
    param = data.draw(st.sampled_from([p for p in PARAMS[:9] if p.stored]))
    text, key = data.draw(keys(param.shape))
    if data.draw(st.booleans()):
        found = array_of(server.get(grad_path(RUN, 8, param.name, slice=text)))
        wanted = job.expected(param.name, 8)[key]
    else:
        found = array_of(server.get(stack_path(RUN, param.name, "4:9", slice=text)))
        wanted = np.stack([job.expected(param.name, step)[key] for step in (4, 6, 8)])
    assert same_bits(found, wanted)
