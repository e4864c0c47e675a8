"""Zarr v3 documents as plain dicts, ready for JSON: arrays of gradients, arrays of rows, groups. Touches no disk.

Writing them, from today's sizes; what a reader takes from one of another version is in `row_metadata`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradtap.plan.serial import runs
from gradtap.store.rows import RowSpec, row_blosc
from gradtap.types import ArrayPlan, ParamSpec

Json = dict[str, Any]

FACTOR_NOTE = (
    "values are as the engine held them at the step boundary; times _ledger/factor of the same step they are the "
    "gradient as defined"
)


def gradient_array(array: ArrayPlan, param: ParamSpec, *, length: int, codecs: Sequence[Json]) -> Json:
    """Metadata of a gradient array with `length` captures. `codecs` is the chain of an inner chunk."""
    attributes = {
        "name": param.name,
        "shape": list(param.shape),
        "start": array.start,
        "stop": array.stop,
        "dtype_captured": param.dtype,
        "aliases": list(param.aliases),
        "owners": runs(array.owners),
        "factor_note": FACTOR_NOTE,
    }
    return _array(
        shape=(length, *array.shape),
        dtype=array.dtype,
        grid=(array.time, *array.shard),
        fill="NaN",
        codecs=[_sharding((1, *array.chunk), codecs)],
        names=("capture", *(f"{array.name}:{axis}" for axis in range(len(array.shape)))),
        attributes=attributes,
    )


def row_array(spec: RowSpec, length: int) -> Json:
    """Metadata of a row array with `length` rows."""
    codecs: list[Json] = [_bytes_codec(spec.stored_dtype.itemsize), {"name": "crc32c"}]
    if spec.mode == "append":
        if spec.compress:
            codecs.insert(1, _row_blosc_codec(spec.stored_dtype.itemsize))
        codecs = [_sharding((1, *spec.inner), codecs)]
    return _array(
        shape=(length, *spec.row_shape),
        dtype=spec.dtype,
        grid=(spec.rows, *spec.padded),
        fill=_fill(spec.fill),
        codecs=codecs,
        names=spec.dims,
        attributes=spec.attributes,
    )


def group(attributes: Mapping[str, Any]) -> Json:
    """Metadata of a group, without consolidated metadata."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def consolidated(root_attributes: Mapping[str, Any], arrays: Mapping[str, Json], groups: Mapping[str, Json]) -> Json:
    """Metadata of the root group with that of all nodes below, by path, inlined.

    `groups` must name every group on the way to an array; a group that holds nothing is left out by zarr-python.
    """
    nodes = {path: {**node, "consolidated_metadata": _inline({})} for path, node in groups.items()} | dict(arrays)
    for path in nodes:
        parent = path.rpartition("/")[0]
        assert not parent or parent in groups, f"{path} has no group {parent}"
    # zarr-python loses children that do not stand together, or that stand before their group.
    order = sorted(nodes, key=lambda path: (path.count("/"), path.rpartition("/")))
    return {**group(root_attributes), "consolidated_metadata": _inline({path: nodes[path] for path in order})}


def _inline(nodes: Json) -> Json:
    return {"kind": "inline", "must_understand": False, "metadata": nodes}


def _array(
    *,
    shape: Sequence[int],
    dtype: str,
    grid: Sequence[int],
    fill: Any,
    codecs: list[Json],
    names: Sequence[str],
    attributes: Mapping[str, Any],
) -> Json:
    assert len(shape) == len(grid) == len(names), f"{shape}, {grid} and {names} differ in axes"
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": codecs,
        "attributes": dict(attributes),
        "dimension_names": list(names),
        "storage_transformers": [],
    }


def _sharding(inner: Sequence[int], codecs: Sequence[Json]) -> Json:
    # No checksum on the index: a reader beside the writer would see it wrong between two entries.
    configuration = {
        "chunk_shape": list(inner),
        "codecs": list(codecs),
        "index_codecs": [_bytes_codec(8)],
        "index_location": "start",
    }
    return {"name": "sharding_indexed", "configuration": configuration}


def _bytes_codec(itemsize: int) -> Json:
    if itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _row_blosc_codec(itemsize: int) -> Json:
    used = row_blosc()
    configuration = {
        "cname": used.cname,
        "clevel": used.clevel,
        "shuffle": {0: "noshuffle", 1: "shuffle", 2: "bitshuffle"}[used.shuffle],
        "typesize": itemsize,
        "blocksize": used.blocksize,
    }
    return {"name": "blosc", "configuration": configuration}


def _fill(value: float | int) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
