"""Checks the metadata of a session's arrays: those of gradients against the plan, those of rows against themselves.

An array of rows that this version does not know, or that the writer did not have, is a note and no damage. What
format 1 fixes of the others is in `gradtap.store.row_metadata`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradtap.encode.codecs import ChunkCodec
from gradtap.errors import DamagedError, GradtapError
from gradtap.plan.serial import pieces_attribute
from gradtap.read.report import Findings
from gradtap.read.row_arrays import has_chunks
from gradtap.read.session import Session
from gradtap.store.files import read_object
from gradtap.store.metadata import gradient_array
from gradtap.store.row_metadata import MERGED_PATH, RANK_PATH, axis_length, known_row
from gradtap.store.row_specs import STEP_PATH, TIME_PATH, rank_prefix
from gradtap.store.rows import RowSpec

Json = Mapping[str, Any]

PLAIN = "gradtap reads on by the session's plan; for other Zarr readers, restore it from a copy of the run"
ROWS = "its rows are not served; restore it from a copy of the run"
NEWER = "readers of this version pass it by; read it with the gradtap that wrote it"

GEOMETRY = (
    "zarr_format",
    "node_type",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "dimension_names",
)
ATTRIBUTES = ("name", "shape", "start", "stop", "dtype_captured", "aliases", "owners")
FIXED = (STEP_PATH, TIME_PATH, "_ledger/step")
"""Row arrays without which a session is not whole."""


class ArrayCheck:
    """After `check`: `rows` has the row arrays that read, by path, and `folders` every folder that is an array's."""

    def __init__(self, session: Session, found: Findings) -> None:
        self.session, self.found = session, found
        self.root = session.paths.zarr
        self.rows: dict[str, RowSpec] = {}
        self.folders: set[str] = set()

    def check(self, *, captures: int, live: bool) -> None:
        """All checks of metadata. Arrays must reach to `captures`."""
        whole = self._document(self.root / "zarr.json", PLAIN)
        inline = _inline(whole)
        if whole is not None and _attributes(whole).get("pieces") != pieces_attribute(self.session.plan):
            what = "the attribute `pieces` is not as planned: cut parameters would be joined wrongly"
            self.found.damage(self.root / "zarr.json", what, PLAIN)
        self._check_gradients(whole, inline, captures)
        there = self._paths()
        for path in self._known(there, inline, live=live):
            self._check_row_array(path, inline, captures, consolidated=whole is not None)
        strange: dict[str, list[str]] = defaultdict(list)
        for path in sorted(there - self.folders):
            strange[_family(path)].append(path)
            self.folders.add(path)
        for family, paths in strange.items():
            what = f"{'an array' if len(paths) == 1 else f'{len(paths)} arrays'} that this version does not know"
            self.found.note(self.root / family, what, NEWER)

    def _check_gradients(self, whole: Json | None, inline: Json, captures: int) -> None:
        plan = self.session.plan
        for array in plan.arrays:
            self.folders.add(array.name)
            codecs = ChunkCodec(self.session.head.codec, np.dtype(array.dtype).itemsize).zarr_codecs()
            wanted = gradient_array(array, plan.params[array.param], length=0, codecs=codecs)
            file = self.root / array.name / "zarr.json"
            own = self._document(file, PLAIN)
            self.found.checked["arrays"] += 1
            if own is not None:
                self._compare(file, own, wanted, captures)
            if whole is not None:
                if array.name in inline:
                    self._compare(self.root / "zarr.json", inline[array.name], wanted, captures)
                else:
                    self._not_inline(array.name)

    def _compare(self, file: Path, own: Any, wanted: Json, captures: int) -> None:
        if not isinstance(own, dict) or axis_length(own) < 0:
            self.found.damage(file, "it describes no array", PLAIN)
            return
        different = [key for key in GEOMETRY if own.get(key) != wanted[key]]
        if own["shape"][1:] != wanted["shape"][1:]:
            different.append("shape")
        # How hard a codec works is the writer's; which ones there are, and the layout of the index, is not.
        if _codecs(own.get("codecs")) != _codecs(wanted["codecs"]):
            different.append("codecs")
        different += [
            f"attribute {key}" for key in ATTRIBUTES if _attributes(own).get(key) != wanted["attributes"][key]
        ]
        if different:
            self.found.damage(file, f"{', '.join(different)} of the array are not as planned", PLAIN)
        elif axis_length(own) < captures:
            self._too_short(file, axis_length(own), captures)

    def _check_row_array(self, path: str, inline: Json, captures: int, *, consolidated: bool) -> None:
        file = self.root / path / "zarr.json"
        own = self._document(file, ROWS)
        self.found.checked["arrays"] += 1
        self.folders.add(path)
        if own is None:
            return
        try:
            spec = self.rows[path] = self.session.arrays.parse(path, own, file)
        except DamagedError as error:
            self.found.damage(file, str(error), ROWS)
            return
        if spec.axis == "capture" and axis_length(own) < captures:
            self._too_short(file, axis_length(own), captures)
        if RANK_PATH.fullmatch(path) or not consolidated:
            return
        if path not in inline:
            self._not_inline(path)
        elif _apart(own, inline[path]):
            what = f"the consolidated metadata of {path!r} is not that of the array itself"
            self.found.damage(self.root / "zarr.json", what, PLAIN)
        elif spec.axis == "capture" and axis_length(inline[path]) < captures:
            self._too_short(self.root / "zarr.json", axis_length(inline[path]), captures)

    def _known(self, there: set[str], inline: Json, *, live: bool) -> list[str]:
        """Row arrays that this version knows and that are there, were there, or must be there."""
        must = set(FIXED)
        if not live:
            journals = (rank for rank in range(self.session.plan.world) if self.session.paths.journal(rank).exists())
            must |= {f"{rank_prefix('ledger', rank)}/step" for rank in journals}
        return sorted(must | {path for path in (*there, *inline, *self._without_metadata()) if known_row(path)})

    def _paths(self) -> set[str]:
        """Paths of all arrays whose name says that they hold no gradients; groups are left out."""
        found = set()
        for file in self.root.glob("_*/**/zarr.json"):
            path = file.parent.relative_to(self.root).as_posix()
            if known_row(path) is not None or _is_array(file):
                found.add(path)
        return found

    def _without_metadata(self) -> list[str]:
        folders = [folder for depth in ("_*", "_*/*", "_*/*/*") for folder in self.root.glob(depth) if folder.is_dir()]
        return [
            folder.relative_to(self.root).as_posix()
            for folder in folders
            if not (folder / "zarr.json").exists() and has_chunks(folder)
        ]

    def _document(self, file: Path, cure: str) -> dict[str, Any] | None:
        try:
            return read_object(file)
        except (GradtapError, RecursionError) as error:
            self.found.damage(file, str(error), cure)
            return None

    def _not_inline(self, path: str) -> None:
        self.found.damage(self.root / "zarr.json", f"the consolidated metadata lacks the array {path!r}", PLAIN)

    def _too_short(self, file: Path, length: int, captures: int) -> None:
        self.found.damage(file, f"the array has length {length}, {captures} captures are recorded", PLAIN)


def _inline(whole: Json | None) -> Json:
    nodes = ((whole or {}).get("consolidated_metadata") or {}).get("metadata") or {}
    return nodes if isinstance(nodes, dict) else {}


def _attributes(document: Json) -> Json:
    found = document.get("attributes")
    return found if isinstance(found, dict) else {}


def _is_array(file: Path) -> bool:
    try:
        return read_object(file).get("node_type") == "array"
    except (GradtapError, RecursionError):
        return True


def _family(path: str) -> str:
    """Arrays that are noted together: the same one of all ranks, or all of a group that nobody knows."""
    if match := RANK_PATH.fullmatch(path):
        return f"_{match[1]}/r*/{match[3]}"
    return path if MERGED_PATH.fullmatch(path) else path.split("/")[0]


def _codecs(chain: Any) -> Any:
    """The parts of a codec chain that say how to decode."""
    try:
        (sharding,) = chain
        inner = sharding["configuration"]
        outer = (sharding["name"], inner["chunk_shape"], inner["index_location"], _names(inner["index_codecs"]))
        return outer, _names(inner["codecs"])
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _names(chain: Any) -> list[Any]:
    return [(codec["name"], codec.get("configuration", {}).get("endian")) for codec in chain]


def _apart(own: Json, copy: Any) -> bool:
    """Whether two documents of an array differ in more than its length, which a live writer moves in between."""
    if not isinstance(copy, dict) or axis_length(copy) < 0:
        return True
    plain, other = dict(own), dict(copy)
    shapes = [document.pop("shape") for document in (plain, other)]
    return plain != other or shapes[0][1:] != shapes[1][1:]
