"""Zarr documents, judged by the readers: zarr-python, xarray, tensorstore."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from gradtap.encode.codecs import CODECS, ChunkCodec
from gradtap.store.metadata import consolidated, gradient_array, group, row_array
from gradtap.store.rows import RowSpec
from gradtap.types import ArrayPlan, ParamSpec

PARAM = ParamSpec(name="layer.weight", shape=(6, 4), dtype="bfloat16", aliases=("tied.weight",))


def plan(**changes: Any) -> ArrayPlan:
    """The plan of the parameter, two shard columns of two owners."""
    fields: dict[str, Any] = {
        "name": "layer.weight",
        "param": 0,
        "start": 0,
        "stop": 24,
        "shape": (6, 4),
        "dtype": "float32",
        "time": 4,
        "shard": (4, 4),
        "chunk": (2, 4),
        "owners": (0, 1),
    }
    return ArrayPlan(**(fields | changes))


def spec(path: str, **changes: Any) -> RowSpec:
    """A row array with scalar rows."""
    fields: dict[str, Any] = {
        "path": path,
        "row_shape": (),
        "dtype": "float64",
        "fill": float("nan"),
        "mode": "replace",
        "axis": "row",
        "time": 16,
        "dims": ("row",),
    }
    return RowSpec(**(fields | changes))


def store(root: Path) -> dict[str, Any]:
    """A whole hierarchy on disk: root group, two gradient arrays, `_step`, two levels of ledger groups."""
    codecs = ChunkCodec("exact", 4).zarr_codecs()
    scalar = ParamSpec(name="scale", shape=(), dtype="float32")
    arrays = {
        "layer.weight": gradient_array(plan(), PARAM, length=8, codecs=codecs),
        "scale": gradient_array(
            plan(name="scale", param=1, stop=1, shape=(), shard=(), chunk=(), owners=(0,)),
            scalar,
            length=8,
            codecs=codecs,
        ),
        "_step": row_array(spec("_step", dtype="int64", fill=-1, axis="capture", dims=("capture",)), 8),
        "_ledger/loss": row_array(spec("_ledger/loss"), 8),
        "_ledger/r00000/wide": row_array(
            spec("_ledger/r00000/wide", row_shape=(3,), mode="append", dims=("row", "param")), 8
        ),
        "_ledger/state": row_array(spec("_ledger/state", dtype="uint8", fill=0), 8),
        "_summary/hist": row_array(
            spec(
                "_summary/hist",
                row_shape=(2, 193),
                dtype="int64",
                fill=-1,
                mode="append",
                compress=True,
                dims=("capture", "param", "bin"),
            ),
            8,
        ),
    }
    groups = {name: group({"about": name}) for name in ("_summary", "_ledger", "_ledger/r00000")}
    root.mkdir()
    for path, document in (groups | arrays).items():
        (root / path).mkdir(parents=True, exist_ok=True)
        (root / path / "zarr.json").write_text(json.dumps(document))
    (root / "zarr.json").write_text(json.dumps(consolidated({"gradtap": {"format": 1}}, arrays, groups)))
    return arrays


@pytest.mark.parametrize("use", [True, False])
def test_zarr_reads_the_group_consolidated_and_not(tmp_path: Path, use: bool) -> None:
    """All members at every depth, with attributes and dimension names, either way and without a warning."""
    arrays = store(tmp_path / "z")
    opened = zarr.open_group(tmp_path / "z", mode="r", use_consolidated=use)
    members = dict(opened.members(max_depth=None))
    assert set(members) == {*arrays, "_summary", "_ledger", "_ledger/r00000"}
    assert opened.attrs["gradtap"] == {"format": 1}
    assert members["_ledger/r00000"].attrs["about"] == "_ledger/r00000"
    for path, document in arrays.items():
        array = opened[path]
        assert list(array.shape) == document["shape"]
        assert list(array.metadata.dimension_names) == document["dimension_names"]
        assert dict(array.attrs) == document["attributes"]
    assert np.isnan(opened["layer.weight"][:]).all()
    assert (opened["_step"][:] == -1).all()
    assert opened["_ledger/state"].dtype == np.uint8


def test_consolidated_is_what_zarr_would_write(tmp_path: Path) -> None:
    """Our document has the nodes that zarr-python's own consolidation finds, with equal contents."""
    store(tmp_path / "z")
    ours = json.loads((tmp_path / "z" / "zarr.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(tmp_path / "z")
    theirs = json.loads((tmp_path / "z" / "zarr.json").read_text())
    assert set(ours) == set(theirs)
    mine, other = ours["consolidated_metadata"], theirs["consolidated_metadata"]
    assert (mine["kind"], mine["must_understand"]) == (other["kind"], other["must_understand"])
    assert set(mine["metadata"]) == set(other["metadata"])
    for path, document in other["metadata"].items():
        for key in ("node_type", "shape", "data_type", "chunk_grid", "attributes", "dimension_names", "fill_value"):
            assert mine["metadata"][path].get(key) == document.get(key), (path, key)
        assert set(mine["metadata"][path]) - set(document) <= {"storage_transformers"}


def test_consolidation_keeps_siblings_that_do_not_stand_together(tmp_path: Path) -> None:
    """The order in which arrays are given does not matter, though zarr-python reads them in runs."""
    arrays = {f"{g}/{a}": row_array(spec(f"{g}/{a}"), 4) for a in "ab" for g in ("_x", "_X", "_x!")}
    root = tmp_path / "z"
    root.mkdir()
    (root / "zarr.json").write_text(json.dumps(consolidated({}, arrays, {g: group({}) for g in ("_x!", "_X", "_x")})))
    opened = zarr.open_group(root, mode="r", use_consolidated=True)
    assert {path for path, _ in opened.members(max_depth=None)} == {*arrays, "_x", "_X", "_x!"}


def test_a_group_left_out_is_a_defect() -> None:
    """An array below a group that is not named is refused, since readers would fail on it."""
    with pytest.raises(AssertionError, match="_ledger"):
        consolidated({}, {"_ledger/a": row_array(spec("_ledger/a"), 1)}, {})


def test_xarray_opens_the_group(tmp_path: Path) -> None:
    """With xarray, root and nested groups open, consolidated or not, without a warning."""
    store(tmp_path / "z")
    with xarray.open_zarr(tmp_path / "z", consolidated=True, mask_and_scale=False) as data:
        assert data["layer.weight"].dims == ("capture", "layer.weight:0", "layer.weight:1")
        assert data["scale"].shape == (8,)
        assert data.sizes["capture"] == 8
    with xarray.open_zarr(tmp_path / "z", group="_ledger", consolidated=False) as data:
        assert set(data) == {"loss", "state"}


def test_tensorstore_opens_every_array(tmp_path: Path) -> None:
    """With tensorstore, each array's document is accepted and the fill is read."""
    for path, document in store(tmp_path / "z").items():
        kv = {"driver": "file", "path": f"{tmp_path}/z/{path}/"}
        opened = tensorstore.open({"driver": "zarr3", "kvstore": kv}, open=True, read=True).result()
        assert list(opened.shape) == document["shape"]
        assert list(opened.domain.labels) == document["dimension_names"]
        opened.read().result()


def test_gradient_attributes_carry_the_true_parameter() -> None:
    """True name, shape, range, captured dtype, aliases and owners in runs."""
    document = gradient_array(
        plan(name="layer%2Fweight@8", start=8, stop=24, shape=(16,), shard=(8,), chunk=(8,), owners=(3, 3)),
        PARAM,
        length=2,
        codecs=[],
    )
    attributes = document["attributes"]
    assert attributes.pop("factor_note")
    assert attributes == {
        "name": "layer.weight",
        "shape": [6, 4],
        "start": 8,
        "stop": 24,
        "dtype_captured": "bfloat16",
        "aliases": ["tied.weight"],
        "owners": [[3, 2, 1]],
    }
    assert document["shape"] == [2, 16]
    assert document["dimension_names"] == ["capture", "layer%2Fweight@8:0"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_profile_opens(tmp_path: Path, codec: str, dtype: str) -> None:
    """Both readers accept the codec chain of each profile and width."""
    codecs = ChunkCodec(codec, 8 if dtype == "float64" else 4).zarr_codecs()
    document = gradient_array(plan(dtype=dtype), PARAM, length=4, codecs=codecs)
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    assert zarr.open_array(tmp_path, mode="r").dtype == np.dtype(dtype)
    kv = {"driver": "file", "path": f"{tmp_path}/"}
    assert tensorstore.open({"driver": "zarr3", "kvstore": kv}, open=True, read=True).result().shape == (4, 6, 4)


@pytest.mark.parametrize(
    ("fill", "text"), [(float("nan"), "NaN"), (float("inf"), "Infinity"), (-float("inf"), "-Infinity"), (0.5, 0.5)]
)
def test_fill_values_are_valid_json(fill: float, text: object) -> None:
    """A fill value that JSON has no number for is written as Zarr's word for it."""
    document = row_array(spec("_x", fill=fill), 1)
    assert document["fill_value"] == text
    json.dumps(document, allow_nan=False)
