"""A row array as its own `zarr.json` describes it: the inverse of `metadata.row_array`. Touches no disk.

Readers go by this and never by the sizes of this version, so that the files of older and of newer writers read.
Every number is held against a limit here, before anything is allocated from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtap.errors import DamagedError
from gradtap.store.ledger_fields import LEDGER_FIELDS, RANK_FIELDS, SUMMARY_STATS, LedgerField, stat_dtype, stat_fill
from gradtap.store.row_specs import STEP_PATH, TIME_PATH
from gradtap.store.rows import RowSpec
from gradtap.store.shard import PAIR

MOST_CHUNK_BYTES = 2**30
MOST_ROW_BYTES = 2**32
MOST_INDEX_BYTES = 2**28
MOST_AXES = 4
MOST_BINS = 2**16

RANK_PATH = re.compile(r"_(ledger|summary)/r([0-9]{5,})/([^/]+)")
"""A rank's own array: kind, rank, name."""

MERGED_PATH = re.compile(r"_(ledger|summary)/([^/]+)")
"""A merged array: kind, name."""

_DTYPE = re.compile(r"u?int(8|16|32|64)|float(32|64)")
_FILLS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What format 1 fixes of an array: the rest (rows of a file, chunks, compression, attributes) is the writer's."""

    dtype: str
    fill: float | int
    dims: tuple[str, ...]


def known_row(path: str) -> Known | None:
    """What is fixed of the array at `path`; None for an array that this version does not know."""
    if path == STEP_PATH:
        return Known(dtype="int64", fill=-1, dims=("capture",))
    if path == TIME_PATH:
        return Known(dtype="float64", fill=math.nan, dims=("capture",))
    if match := RANK_PATH.fullmatch(path):
        return _known(match[1], match[3], {f.name: f for f in RANK_FIELDS}, "piece")
    if match := MERGED_PATH.fullmatch(path):
        return _known(match[1], match[2], {f.name: f for f in LEDGER_FIELDS}, "param")
    return None


def _known(kind: str, name: str, fields: Mapping[str, LedgerField], wide: str) -> Known | None:
    if kind == "ledger" and name in fields:
        field = fields[name]
        return Known(dtype=field.dtype, fill=field.fill, dims=("row", field.wide) if field.wide else ("row",))
    if kind == "summary" and name in SUMMARY_STATS:
        dims = ("capture", wide, "bin") if name == "hist" else ("capture", wide)
        return Known(dtype=stat_dtype(name), fill=stat_fill(name), dims=dims)
    return None


def row_spec(path: str, document: Mapping[str, Any], file: Path) -> RowSpec:
    """The array that `document` describes; `file` names it in errors.

    Raises `DamagedError` for what is no row array of format 1, and for sizes that no writer makes.
    """
    try:
        spec = _parsed(path, document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise _bad(file, f"it does not read as a row array of format 1 ({type(error).__name__}: {error})") from error
    what = _out_of_bounds(spec)
    if what:
        raise _bad(file, what)
    known = known_row(path)
    if known is not None and (spec.dtype, spec.dims) != (known.dtype, known.dims):
        raise _bad(file, f"{spec.dtype} over {', '.join(spec.dims)}, format 1 has {known.dtype} over {known.dims}")
    if known is not None and not (spec.fill == known.fill or (spec.fill != spec.fill and known.fill != known.fill)):
        raise _bad(file, f"the fill value is {spec.fill}, format 1 has {known.fill}")
    return spec


def axis_length(document: Mapping[str, Any]) -> int:
    """The declared length of axis 0, -1 where there is none."""
    shape = document.get("shape")
    return shape[0] if isinstance(shape, list) and shape and type(shape[0]) is int else -1


def _bad(file: Path, what: str) -> DamagedError:
    return DamagedError(f"{file}: {what}; run `gradtap verify`")


def _parsed(path: str, document: Mapping[str, Any]) -> RowSpec:
    _want("node type", document["node_type"], "array")
    _want("chunk keys", document["chunk_key_encoding"], {"name": "default", "configuration": {"separator": "."}})
    _want("transformers", document.get("storage_transformers", []), [])
    _want("chunk grid", document["chunk_grid"]["name"], "regular")
    dtype = document["data_type"]
    if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
        raise ValueError(f"dtype {dtype!r}")
    shape = _counts(document["shape"])
    grid = _counts(document["chunk_grid"]["configuration"]["chunk_shape"])
    dims = document["dimension_names"]
    if not (isinstance(dims, list) and all(isinstance(d, str) for d in dims)):
        raise ValueError(f"dimension names {dims!r}")
    if not 1 <= len(shape) == len(grid) == len(dims) <= MOST_AXES or dims[0] not in ("capture", "row"):
        raise ValueError(f"axes {shape}, {grid}, {dims}")
    codecs, chunk = document["codecs"], grid[1:]
    sharded = codecs[0]["name"] == "sharding_indexed"
    if sharded:
        inner = codecs[0]["configuration"]
        _want("codecs", len(codecs), 1)
        _want("index", (inner["index_location"], [c["name"] for c in inner["index_codecs"]]), ("start", ["bytes"]))
        codecs = inner["codecs"]
        lead, *rest = _counts(inner["chunk_shape"])
        chunk = tuple(rest)
        _want("rows of an inner chunk", lead, 1)
    return RowSpec(
        path=path,
        row_shape=shape[1:],
        dtype=dtype,
        fill=_fill(document["fill_value"], dtype),
        mode="append" if sharded else "replace",
        axis="capture" if dims[0] == "capture" else "row",
        time=grid[0],
        dims=tuple(dims),
        attributes=_attributes(document["attributes"]),
        compress=_compressed(codecs, np.dtype(dtype).itemsize),
        chunk=_fitting(shape[1:], grid[1:], chunk),
    )


def _want(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise ValueError(f"{what}: {found!r}, not {wanted!r}")


def _counts(value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value)):
        raise ValueError(f"{value!r} is no list of counts")
    return tuple(value)


def _fill(value: Any, dtype: str) -> float | int:
    if dtype.startswith("float"):
        return _FILLS[value] if isinstance(value, str) else float(value)
    if type(value) is not int:
        raise ValueError(f"fill {value!r} of {dtype}")
    np.array(value, dtype)
    return value


def _attributes(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"attributes {value!r}")
    return value


def _compressed(codecs: Any, itemsize: int) -> bool:
    names = [codec["name"] for codec in codecs]
    if names not in (["bytes", "crc32c"], ["bytes", "blosc", "crc32c"]):
        raise ValueError(f"codecs {names}")
    endian = codecs[0].get("configuration", {}).get("endian")
    if itemsize > 1 and endian != "little":
        raise ValueError(f"byte order {endian!r}")
    return len(names) == 3


def _fitting(row: tuple[int, ...], whole: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """The inner chunk, when chunks tile one file for each row's whole width: a row never spans files."""
    padded = tuple(-(-n // c) * c for n, c in zip(row, chunk, strict=True))
    _want("shape of a file's rows", whole, padded)
    return chunk


def _out_of_bounds(spec: RowSpec) -> str | None:
    assert spec.chunk is not None, "a parsed array has its own chunk"
    rows = 1 if spec.mode == "append" else spec.time
    chunk = rows * math.prod(spec.chunk) * spec.stored_dtype.itemsize
    if spec.time < 1 or chunk > MOST_CHUNK_BYTES or spec.row_bytes > MOST_ROW_BYTES:
        return f"{spec.time} rows a file, chunks of {chunk} bytes and rows of {spec.row_bytes} are out of range"
    index = spec.time * spec.entries * PAIR.size if spec.mode == "append" else 0
    if index > MOST_INDEX_BYTES:
        return f"an index of {index} bytes is out of range"
    if spec.dims[-1] == "bin" and spec.row_shape[-1] > MOST_BINS:
        return f"{spec.row_shape[-1]} bins are out of range"
    return None
