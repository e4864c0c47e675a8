from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.synthetic import MODEL, Job, spec

STEPS = range(1, 8)

PREAMBLE = """
import json, sys
import numpy as np

path, wanted = sys.argv[1], json.load(open(sys.argv[2]))


def check(step_of, whole):
    for name, steps in wanted.items():
        for step, values in steps.items():
            k = step_of.index(int(step))
            got = np.asarray(whole(name, k))
            expected = np.array(values["values"], values["dtype"]).reshape(values["shape"])
            assert got.dtype == expected.dtype and got.shape == expected.shape, (name, got.dtype, got.shape)
            assert got.tobytes() == expected.tobytes(), (name, step)
    assert "gradtap" not in sys.modules


def join(arrays, pieces, name, k):
    if name not in pieces:
        return arrays(name)[k]
    cut = pieces[name]
    return np.concatenate([np.asarray(arrays(a)[k]).reshape(-1) for a in cut["arrays"]]).reshape(cut["shape"])
"""

ZARR = """
import zarr

group = zarr.open_group(path, mode="r")
pieces = group.attrs["pieces"]
check(list(group["_step"][:]), lambda name, k: join(group.__getitem__, pieces, name, k))
"""

XARRAY = """
import warnings
import xarray

data = xarray.open_zarr(path, chunks=None)
check(
    data["_step"].values.tolist(), lambda name, k: join(lambda a: data[a].values, data.attrs["pieces"], name, k)
)
"""

TENSORSTORE = """
import tensorstore

def array(name):
    return tensorstore.open({"driver": "zarr3", "kvstore": f"file://{path}/{name}/"}, read=True).result()

attributes = json.load(open(f"{path}/zarr.json"))["attributes"]

def whole(name, k):
    return np.asarray(join(lambda a: array(a)[:].read().result(), attributes["pieces"], name, k))

check(array("_step")[:].read().result().tolist(), whole)
"""

READERS = {"zarr": ZARR, "xarray": XARRAY, "tensorstore": TENSORSTORE}


def expected(job: Job, steps: range) -> dict[str, dict[int, dict[str, object]]]:
    """All gradients as JSON, by parameter and step."""
    found: dict[str, dict[int, dict[str, object]]] = {}
    for p in job.params:
        if p.stored:
            values = {s: job.expected(p.name, s) for s in steps}
            found[p.name] = {
                s: {"values": v.reshape(-1).tolist(), "dtype": str(v.dtype), "shape": list(v.shape)}
                for s, v in values.items()
            }
    return found


def read_plainly(reader: str, job: Job, steps: range) -> None:
    """Compare in another process, which has no gradtap to import."""
    script = PREAMBLE + READERS[reader]
    wanted = job.run.with_name(f"{reader}.json")
    wanted.write_text(json.dumps(expected(job, steps)))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(job.paths.zarr), str(wanted)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        cwd=job.run,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["cuts", "flat"])
def closed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A closed run whose parameters are cut inside rows."""
    job = Job(run=tmp_path_factory.mktemp("plain") / "r", kind=request.param).steps(STEPS)
    job.close()
    return job


@pytest.mark.parametrize("reader", READERS)
def test_closed(closed: Job, reader: str) -> None:
    """Plain Zarr readers give the very numbers of a closed run, cut parameters through the recipe of `pieces`."""
    assert json.loads((closed.paths.zarr / "zarr.json").read_text())["attributes"]["pieces"]
    read_plainly(reader, closed, STEPS)


@pytest.mark.parametrize("reader", READERS)
def test_live(tmp_path: Path, reader: str) -> None:
    """The same on a run that is being written, before and after it has grown over shards and lengths."""
    job = Job(run=tmp_path / "r").steps(range(1, 4))
    job.flush()
    job.wait_published(3)
    read_plainly(reader, job, range(1, 4))
    job.steps(range(4, 12))
    job.flush()
    job.wait_published(11)
    read_plainly(reader, job, range(1, 12))
    job.kill()
    read_plainly(reader, job, range(1, 12))


@pytest.mark.parametrize("reader", READERS)
def test_float64_and_half(tmp_path: Path, reader: str) -> None:
    """Float64 gradients keep their type, half precision ones are widened exactly and unscaled."""
    params = tuple(spec(f"{d}.weight", 23, 5, dtype=d) for d in ("float64", "bfloat16", "float16", "float32"))
    job = Job(run=tmp_path / "r", params=params, k=4, world=2).steps(range(1, 6))
    job.close()
    read_plainly(reader, job, range(1, 6))


@pytest.mark.parametrize("reader", READERS)
def test_comparison_can_fail(closed: Job, reader: str) -> None:
    """The comparison in the other process notices a number that differs in its last bit."""
    job = Job.__new__(Job)
    job.__dict__.update(closed.__dict__)
    job.expected = lambda name, step: np.nextafter(closed.expected(name, step), np.float32(9))  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="AssertionError"):
        read_plainly(reader, job, STEPS)


def test_names_of_all_parameters_are_arrays_or_pieces(closed: Job) -> None:
    """Every stored parameter is found by its true name: as an array, or in `pieces`."""
    group = json.loads((closed.paths.zarr / "zarr.json").read_text())
    arrays = set(group["consolidated_metadata"]["metadata"])
    for p in MODEL:
        assert (p.name in arrays or p.name in group["attributes"]["pieces"]) == p.stored
