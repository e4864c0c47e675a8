"""The length of axis 0: written at the start, doubled ahead of need, trimmed at close.

Every array's own metadata is replaced first, then the group's `zarr.json` with the consolidated copy: that rename
is the switch, so a reader of the group sees all arrays at one length at every moment.
"""

from __future__ import annotations

import json
from typing import Any

from gradtap.encode.codecs import ChunkCodec
from gradtap.plan.serial import pieces_attribute
from gradtap.store.files import make_dirs, write_atomic
from gradtap.store.metadata import consolidated, gradient_array, group, row_array
from gradtap.store.paths import SessionPaths
from gradtap.store.row_specs import RowLayout, merged_specs, rank_prefix, rank_specs
from gradtap.version import FORMAT


def write_group(
    paths: SessionPaths, layout: RowLayout, codec: str, *, captures: int, rows: int, replace: bool = True
) -> None:
    """Write the metadata of all shared arrays with `captures` and `rows` as the lengths of their axis 0.

    `replace=False` also makes the folders. Raises `StoreError` for what cannot be written.
    """
    arrays = _gradient_metadata(layout, codec, captures)
    for spec in merged_specs(layout):
        arrays[spec.path] = row_array(spec, captures if spec.axis == "capture" else rows)
    groups = sorted({path.split("/")[0] for path in arrays if "/" in path})
    for name in groups:
        _write_metadata(paths, name, group({}), fresh=not replace)
    for name, metadata in arrays.items():
        _write_metadata(paths, name, metadata, fresh=not replace)
    attributes = {
        "gradtap": {"format": FORMAT, "session": paths.name},
        "pieces": pieces_attribute(layout.plan),
    }
    root = consolidated(attributes, arrays, {name: group({}) for name in groups})
    write_atomic(paths.zarr / "zarr.json", json.dumps(root).encode())


def write_rank_group(paths: SessionPaths, layout: RowLayout, rank: int, *, captures: int, rows: int) -> None:
    """Write the metadata of one rank's own arrays. Raises `StoreError` for what cannot be written."""
    for kind in ("ledger", "summary"):
        _write_metadata(paths, rank_prefix(kind, rank), group({}), fresh=True)
    for spec in rank_specs(layout, rank):
        length = captures if spec.axis == "capture" else rows
        _write_metadata(paths, spec.path, row_array(spec, length), fresh=True)


def _gradient_metadata(layout: RowLayout, codec: str, captures: int) -> dict[str, dict[str, Any]]:
    plan = layout.plan
    found: dict[str, dict[str, Any]] = {}
    for array in plan.arrays:
        codecs = ChunkCodec(codec, 8 if array.dtype == "float64" else 4).zarr_codecs()
        found[array.name] = gradient_array(array, plan.params[array.param], length=captures, codecs=codecs)
    return found


def _write_metadata(paths: SessionPaths, name: str, metadata: dict[str, Any], *, fresh: bool) -> None:
    folder = paths.zarr / name
    if fresh:
        make_dirs(folder)
    write_atomic(folder / "zarr.json", json.dumps(metadata).encode())
