from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from gradtap.read import chunks, open_run
from tests.support.synthetic import MODEL, NEVER, Job, spec

CAPTURED = [p.name for p in MODEL if p.status == "captured"]


@pytest.mark.parametrize("kind", ["cuts", "whole", "replicated", "rows", "flat"])
def test_gives_what_was_recorded(tmp_path: Path, kind: str) -> None:
    """Under each kind of ownership every element of every parameter and step is the one that was handed over."""
    job = Job(run=tmp_path / "r", kind=kind, settings=NEVER).steps(range(1, 7))
    job.kill()
    with open_run(job.run) as run:
        for name in CAPTURED:
            for step in range(1, 7):
                np.testing.assert_array_equal(run.grad(name, step).values, job.expected(name, step), strict=True)


@pytest.mark.parametrize(("dtype", "k"), [("float32", 3), ("bfloat16", 5), ("float16", 4), ("float64", 0)])
def test_dtypes_and_scale(tmp_path: Path, dtype: str, k: int) -> None:
    """Each captured dtype reads back exactly, less its loss scale, and says what it was."""
    params = (spec("a", 19, 7, dtype=dtype), spec("b", dtype=dtype))
    job = Job(run=tmp_path / "r", params=params, world=2, k=k, settings=NEVER).steps([1, 2])
    job.kill()
    run = open_run(job.run)
    for name in ("a", "b"):
        got = run.grad(name, 2)
        np.testing.assert_array_equal(got.values, job.expected(name, 2), strict=True)
        assert got.dtype == ("float64" if dtype == "float64" else "float32")
        assert got.dtype_captured == dtype


@pytest.mark.parametrize("key", ["0", "-1, 3", "5:20, ::2", "..., 4", "::-3, 12:2:-5", "36:40, 1", "9:9"])
def test_slices_as_numpy(closed: Job, key: str) -> None:
    """A slice of a parameter that is cut inside a row equals NumPy's of the whole."""
    got = open_run(closed.run).grad("embed.weight", 4, slice=key)
    wanted = eval(f"whole[{key}]", {"whole": closed.expected("embed.weight", 4)})
    np.testing.assert_array_equal(got.values, wanted, strict=True)


def test_slice_reads_only_what_it_touches(closed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element costs one chunk; the whole parameter costs all of them."""
    read: list[int] = []
    whole = chunks.ChunkReader.values

    def counted(self: chunks.ChunkReader, chunk: Any, *rest: Any) -> Any:
        read.append(chunk.start)
        return whole(self, chunk, *rest)

    monkeypatch.setattr(chunks.ChunkReader, "values", counted)
    run = open_run(closed.run)
    run.grad("embed.weight", 4)
    everything = sorted(read)
    read.clear()
    run.grad("embed.weight", 4, slice=(36, 12))
    assert len(everything) > 2
    assert read == [everything[-1]]
    read.clear()
    run.grad("embed.weight", 4, slice="::36, 0")
    assert read == [everything[0], everything[-1]]
    read.clear()
    run.grad("embed.weight", 4, slice="5:5")
    assert read == []


def test_stacks_over_steps(closed: Job) -> None:
    """Several steps come along a new leading axis: a list in its own order, a slice by step numbers, a range."""
    run = open_run(closed.run)
    listed = run.grad("mlp.bias", steps=[7, 2], slice="3:9")
    wanted = np.stack([closed.expected("mlp.bias", s)[3:9] for s in (7, 2)])
    np.testing.assert_array_equal(listed.values, wanted, strict=True)
    assert listed.steps == (7, 2)
    assert listed.attempts == (1, 1)
    assert len(listed.factor) == 2
    assert run.grad("norm.scale", steps=slice(3, 8, 2)).steps == (3, 5, 7)
    assert run.grad("norm.scale", steps=slice(None, None)).shape == (9,)
    assert run.grad("norm.scale", steps=range(1, 4)).steps == (1, 2, 3)


def test_scalar(closed: Job) -> None:
    """A scalar parameter reads as a 0-d array, stacked as a vector of its values."""
    run = open_run(closed.run)
    assert run.grad("norm.scale", 5).shape == ()
    assert float(run.grad("norm.scale", 5).values) == float(closed.expected("norm.scale", 5))
    stacked = run.grad("norm.scale", steps=[5, 5, 6]).values
    np.testing.assert_array_equal(stacked, [closed.expected("norm.scale", s) for s in (5, 5, 6)])


def test_alias_and_zero_size(closed: Job) -> None:
    """A tied weight answers to its alias; a parameter of size zero reads as the empty array that it is."""
    run = open_run(closed.run)
    tied = run.grad("head.weight", 1)
    assert tied.name == "embed.weight"
    np.testing.assert_array_equal(tied.values, closed.expected("embed.weight", 1))
    empty = run.grad("nothing", 1)
    assert empty.shape == (0, 4)
    assert empty.complete


def test_behaves_as_an_array(closed: Job) -> None:
    """A gradient works in NumPy expressions, without a copy of its values."""
    got = open_run(closed.run).grad("mlp.weight", 3)
    assert np.asarray(got) is got.values
    np.testing.assert_array_equal((got * 2).astype("f4"), closed.expected("mlp.weight", 3) * 2)


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda r: r.grad("mlp.wieght", 1), gradtap.ParamNotFoundError, ["mlp.wieght", "mlp.weight"]),
        (lambda r: r.grad("frozen.bias", 1), gradtap.ParamNotFoundError, ["frozen"]),
        (lambda r: r.grad("loose.bias", 1), gradtap.ParamNotFoundError, ["parameter group"]),
        (lambda r: r.grad("mlp.bias", 40), gradtap.StepNotFoundError, ["40", "8, 9"]),
        (lambda r: r.grad("mlp.bias", 0), gradtap.StepNotFoundError, ["step 0", "1, 2"]),
        (lambda r: r.grad("mlp.bias", steps=[3, 40]), gradtap.StepNotFoundError, ["40"]),
        (lambda r: r.grad("mlp.bias", steps=slice(20, 30)), gradtap.StepNotFoundError, ["no recorded step", "1 to 9"]),
        (lambda r: r.grad("mlp.bias"), gradtap.UsageError, ["step=", "steps=", "1 to 9"]),
        (lambda r: r.grad("mlp.bias", 1, steps=[2]), gradtap.UsageError, ["either"]),
        (lambda r: r.grad("mlp.bias", "3"), gradtap.UsageError, ["'3'", "whole number"]),
        (lambda r: r.grad("mlp.bias", steps="3"), gradtap.UsageError, ["'3'", "slice(100, 200)"]),
        (lambda r: r.grad("mlp.bias", steps=5), gradtap.UsageError, ["5", "[1, 5]"]),
        (lambda r: r.grad("mlp.bias", steps=slice(1, 5, -1)), gradtap.UsageError, ["-1"]),
        (lambda r: r.grad("mlp.bias", True), gradtap.UsageError, ["True"]),
        (lambda r: r.grad("mlp.bias", 1, slice="0, 0"), gradtap.SelectionError, ["(29,)"]),
        (lambda r: r.grad("mlp.bias", 1, slice="29"), gradtap.SelectionError, ["29", "(29,)"]),
        (lambda r: r.grad("mlp.bias", 1, attempt=2), gradtap.StepNotFoundError, ["attempt 2", "attempt 1 alone"]),
        (lambda r: r.grad("mlp.bias", 1, attempt=0), gradtap.StepNotFoundError, ["attempt 0"]),
        (lambda r: r.attempts(12), gradtap.StepNotFoundError, ["12"]),
    ],
)
def test_refusals(closed: Job, ask: Callable[[Any], Any], error: type[Exception], words: list[str]) -> None:
    """A wrong name, step, slice or argument is named, with what is allowed or near."""
    with pytest.raises(error) as caught:
        ask(open_run(closed.run))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_schedule_is_named(tmp_path: Path) -> None:
    """A step between captured ones that the schedule leaves out says so."""
    job = Job(run=tmp_path / "r", world=1, every=3, settings=NEVER).steps(range(1, 10))
    job.kill()
    run = open_run(job.run)
    assert run.steps == (3, 6, 9)
    with pytest.raises(gradtap.StepNotFoundError, match=r"schedule does not capture it.*3, 6"):
        run.grad("mlp.bias", 5)


def test_attempts(tmp_path: Path) -> None:
    """A step recorded again by a later session reads as its last attempt; the earlier ones stay readable."""
    first = Job(run=tmp_path / "r", world=2, seed=1, settings=NEVER).steps(range(1, 7))
    first.kill()
    run = open_run(first.run)
    assert run.steps == (1, 2, 3, 4, 5, 6)
    second = Job(run=tmp_path / "r", world=3, kind="whole", seed=2, settings=NEVER).steps(range(5, 9))
    second.kill()
    assert run.steps == tuple(range(1, 9))
    assert [run.attempts(s) for s in (4, 5, 8)] == [(1,), (1, 2), (1,)]
    assert [(a.session, a.capture) for a in run.locate(6)] == [("0000", 5), ("0001", 1)]
    for step, attempt, job in [(4, 1, first), (5, 2, second), (8, 1, second)]:
        got = run.grad("mlp.weight", step)
        assert got.attempts == (attempt,)
        np.testing.assert_array_equal(got.values, job.expected("mlp.weight", step))
    np.testing.assert_array_equal(run.grad("mlp.weight", 5, attempt=1).values, first.expected("mlp.weight", 5))
    stacked = run.grad("mlp.weight", steps=slice(4, 6))
    assert stacked.attempts == (1, 2)
    np.testing.assert_array_equal(stacked.values[1], second.expected("mlp.weight", 5))
    assert [s.world for s in run.sessions] == [2, 3]


def test_selection_left_out(tmp_path: Path) -> None:
    """A parameter that the selection left out at a step is said to be left out; partial reads it as NaN."""
    job = Job(run=tmp_path / "r", settings=NEVER)
    job.step(1)
    job.step(2, select=["mlp.bias"])
    job.kill()
    run = open_run(job.run)
    assert run.steps == (1, 2)
    np.testing.assert_array_equal(run.grad("mlp.bias", 2).values, job.expected("mlp.bias", 2))
    with pytest.raises(gradtap.IncompleteError, match=r"mlp.weight.*not captured at step 2"):
        run.grad("mlp.weight", 2)
    missing = run.grad("mlp.weight", 2, partial=True)
    assert not missing.complete
    assert np.isnan(missing.values).all()
    np.testing.assert_array_equal(run.grad("mlp.weight", 1).values, job.expected("mlp.weight", 1))


def test_flags_and_factor(tmp_path: Path) -> None:
    """Flags and factor are those of the step; untouched is said of the parameter that was not reached alone."""
    job = Job(run=tmp_path / "r", settings=NEVER)
    job.step(1)
    job.step(2, untouched=["mlp.bias"], flags=2 | 8, factor=0.5)
    job.kill()
    run = open_run(job.run)
    assert (run.grad("mlp.bias", 1).flags, run.grad("mlp.bias", 1).factor) == ((), (1.0,))
    reached, not_reached = run.grad("mlp.weight", 2), run.grad("mlp.bias", 2)
    assert reached.flags == ("modified-after-backward",)
    assert not_reached.flags == ("modified-after-backward", "untouched")
    assert reached.factor == (0.5,)
    np.testing.assert_array_equal(reached.values, job.expected("mlp.weight", 2))
    assert run.grad("mlp.bias", steps=[1, 2]).factor == (1.0, 0.5)


@pytest.mark.parametrize("name", ["s3://bucket/run", "http://host/run"])
def test_addresses_are_refused(name: str) -> None:
    """An address of another kind than a folder is refused by name."""
    with pytest.raises(gradtap.UsageError, match="folder"):
        open_run(name)


def test_not_a_run(tmp_path: Path) -> None:
    """A folder without a run, and a path without a folder, are no runs."""
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(gradtap.NotARunError):
            open_run(path)


def test_no_files_are_kept_open(closed: Job) -> None:
    """However many shards are read, few stay open, and closing lets go of them; the run stays readable."""
    with open_run(closed.run) as run:
        run._files = cache = chunks.FileCache(2)
        for reader in run._readers.values():
            reader.chunks.files = cache
        for name in CAPTURED:
            run.grad(name, steps=slice(1, 10))
            assert len(cache) <= 2
    assert len(cache) == 0
    assert run.grad("mlp.bias", 1).complete
