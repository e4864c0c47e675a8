"""Any selection of any parameter: the folder, the server, the command line and NumPy give the same values."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import gradtap
from gradtap.cli.app import main
from gradtap.query.local import LocalPlace
from gradtap.remote.client import Client
from gradtap.remote.place import RemotePlace
from gradtap.selection import Selection
from tests.server.samples import PARAMS, OddJob, same_bits
from tests.server.serving import serving

STORED = [p for p in PARAMS if p.stored][:7]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OddJob, LocalPlace, RemotePlace]]:
    """A run of two steps on three ranks, its folder and its server."""
    job = OddJob(run=tmp_path_factory.mktemp("any") / "r.gradtap", params=PARAMS, world=3).steps([1, 2])
    job.close()
    with serving(job.run) as server, Client(server.url) as client, gradtap.open(job.run) as run:
        yield job, LocalPlace(run=run, label=str(job.run)), RemotePlace(client=client, name="r")


@st.composite
def _wanted(draw: st.DrawFn) -> tuple[Any, Any]:
    param = draw(st.sampled_from(STORED))
    return param, draw(basic_indices(param.shape, allow_newaxis=False, allow_ellipsis=True))


def written(words: list[str]) -> np.ndarray[Any, Any]:
    """The array that a command line writes to stdout."""
    stream = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(stream):
        assert main(words) == 0
        assert sys.stdout is stream
    return np.load(io.BytesIO(stream.buffer.getvalue()))  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=_wanted())
def test_every_selection_is_the_same_everywhere(
    places: tuple[OddJob, LocalPlace, RemotePlace], wanted: tuple[Any, Any]
) -> None:
    """At one step and stacked over both, to the bit."""
    job, local, remote = places
    param, key = wanted
    text = str(Selection.of(key, param.shape))
    expected = job.expected(param.name, 2)[key]
    for place in (local, remote):
        assert same_bits(place.grad(param.name, "2", slice=text).values, expected)
        stack = place.grad(param.name, "1:3", slice=text).values
        assert stack.shape == (2, *np.shape(expected))
        assert same_bits(stack[1], expected)
    for store in (str(job.run), remote.label):
        # As one word with its option: a slice may begin with a minus.
        assert same_bits(written(["grad", store, "2", param.name, f"--slice={text}"]), expected)
