"""What the optimizer consumed, from the ledger: clipped, divided by the right scale, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from gradtap.errors import IncompleteError
from tests.support.synthetic import Job

FP16 = {"engine_settings": {"model_dtype": "float16"}}


def recorded(tmp_path: Path, steps: list[dict[str, Any]], **job: Any) -> Job:
    """A run of these steps."""
    made = Job(run=tmp_path / "run.gradtap", world=2, **job)
    for number, facts in enumerate(steps, 1):
        made.step(number, **facts)
    made.close()
    return made


def clipped(coefficient: float) -> dict[str, Any]:
    """A step whose clipping had a coefficient."""
    return {"ended": {"clip_coef": coefficient}}


def test_a_stack_is_scaled_step_by_step(tmp_path: Path) -> None:
    """Each step has its own coefficient, rounded to float32 and multiplied in float32; slices are slices of that."""
    job = recorded(tmp_path, [clipped(0.3), clipped(1.0), clipped(1 / 3)])
    with gradtap.open(job.run) as run:
        stack = run.grad("mlp.weight", steps=[3, 1, 2], as_consumed=True)
        assert stack.consumed == (1 / 3, 0.3, 1.0)
        for at, (step, coefficient) in enumerate(((3, 1 / 3), (1, 0.3), (2, 1.0))):
            assert np.array_equal(stack[at], job.expected("mlp.weight", step) * np.float32(coefficient))
        part = run.grad("mlp.weight", 1, slice="2:5, ::3", as_consumed=True)
        assert np.array_equal(part, stack[1][2:5, ::3])
        assert run.grad("norm.scale", 1, as_consumed=True) == job.expected("norm.scale", 1) * np.float32(0.3)
        assert run.grad("mlp.weight", 1).consumed is None
        assert np.array_equal(run.grad("mlp.weight", 1), job.expected("mlp.weight", 1))


def test_the_factor_stays_what_it_is(tmp_path: Path) -> None:
    """A wrong divisor is in what is stored, and in what was consumed; the factor is said and not applied."""
    job = recorded(tmp_path, [clipped(0.5) | {"factor": 4.0, "divisor": 8.0}])
    with gradtap.open(job.run) as run:
        grad = run.grad("mlp.bias", 1, as_consumed=True)
    assert grad.factor == (4.0,) and grad.consumed == (0.5,)
    assert np.array_equal(grad, job.expected("mlp.bias", 1) * np.float32(0.5))


@pytest.mark.parametrize(
    ("facts", "coefficient"),
    [({"loss_scale": 3000.0, "k": 12}, 4096 / 3000), ({"loss_scale": 256.0, "k": 0}, 1 / 256)],
)
def test_the_whole_scale_is_divided_by(tmp_path: Path, facts: dict[str, Any], coefficient: float) -> None:
    """What k does not hold of the loss scale, because it is no power of two or was never multiplied, counts too."""
    job = recorded(tmp_path, [facts])
    with gradtap.open(job.run) as run:
        assert run.grad("mlp.bias", 1, as_consumed=True).consumed == (coefficient,)


def test_a_grown_scale_halves(tmp_path: Path) -> None:
    """DeepSpeed divides by the grown scale; the coefficient of the ledger is the one that was applied to that."""
    steps = [clipped(0.25) | {"loss_scale": 4.0, "k": 2}, clipped(1.0) | {"loss_scale": 8.0, "k": 3}]
    job = recorded(tmp_path, steps, engine="deepspeed-zero2", **FP16)
    with gradtap.open(job.run) as run:
        assert run.request("mlp.bias", 1, as_consumed=True).consumed == (0.125,)


def test_another_engine_divides_by_the_scale_it_had(tmp_path: Path) -> None:
    """A scale that grows after the step changes nothing under torch, and the last step is known."""
    steps = [clipped(0.25) | {"loss_scale": 4.0, "k": 2}, clipped(0.5) | {"loss_scale": 8.0, "k": 3}]
    job = recorded(tmp_path, steps, engine="torch")
    with gradtap.open(job.run) as run:
        assert run.grad("mlp.bias", steps=[1, 2], as_consumed=True).consumed == (0.25, 0.5)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (clipped(math.nan), {}, "clipping is not known"),
    ({"ended": {"state": "skipped-overflow", "clip_coef": math.nan}}, {}, "skipped the update for overflow"),
    ({"ended": {"state": "unknown"}}, {}, "whether it was applied is not known"),
    ({"outcome": False}, {}, "the next step of a live run tells"),
    ({"loss_scale": math.nan}, {}, "loss scale is nan"),
    ({"loss_scale": 8.0, "k": 3}, {"engine": "deepspeed-zero2", **FP16}, "none that follows"),
]


@pytest.mark.parametrize(("facts", "job", "why"), REFUSED, ids=[each[2] for each in REFUSED])
def test_what_is_not_known_is_refused(tmp_path: Path, facts: dict[str, Any], job: dict[str, Any], why: str) -> None:
    """The step and the reason are named, before a chunk is read; what is stored can still be had."""
    made = recorded(tmp_path, [{}, facts], **({"engine": "torch"} | job))
    with gradtap.open(made.run) as run:
        with pytest.raises(IncompleteError, match=rf"step 2 cannot be told.*{why}") as raised:
            run.request("mlp.bias", steps=slice(2, None), as_consumed=True)
        assert raised.value.facts["step"] == 2
        assert run.grad("mlp.bias", 2).consumed is None


def test_the_identity_tells_them_apart(tmp_path: Path) -> None:
    """As stored and as consumed are two answers, even where the coefficient is one."""
    job = recorded(tmp_path, [{}])
    with gradtap.open(job.run) as run:
        one, other = (run.request("mlp.bias", 1, as_consumed=asked) for asked in (False, True))
        assert one.identity != other.identity
        assert "as consumed" in repr(other.read()) and "as consumed" not in repr(one.read())
