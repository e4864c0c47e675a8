"""The row arrays of one session, each as its own metadata describes it: which there are, and their rows.

Not here: what a column means (`ledger`, `summaries`), and how rows are coded (`gradtap.store.rows`).
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtap.errors import DamagedError, StoreError
from gradtap.store.files import naming, read_object
from gradtap.store.paths import SessionPaths
from gradtap.store.row_metadata import RANK_PATH, known_row, row_spec
from gradtap.store.row_specs import rank_prefix
from gradtap.store.rows import RowSpec
from gradtap.types import SessionPlan

MOST_KEPT = 2048
"""Descriptions kept: those of the ranks of a large run are many, and name all their pieces."""

WIDEST_COLUMN = 2**20
"""Values in one row of a column that this version does not know, beyond which it is not shown."""


class RowArrays:
    """The row arrays of a session, by path in the group. For any thread."""

    def __init__(self, paths: SessionPaths, plan: SessionPlan, groups: int) -> None:
        self._paths, self._plan, self._groups = paths, plan, groups
        self._kept: OrderedDict[str, RowSpec] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> RowSpec | None:
        """The array at `path`; None where the session has none.

        Raises `DamagedError` for one whose metadata does not read, or is missing beside its rows.
        """
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
        found = self._read(path)
        if found is not None:
            with self._lock:
                self._kept[path] = found
                if len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return found

    def rank(self, kind: str, rank: int, name: str) -> RowSpec | None:
        """A rank's own array of the ledger or the summary. Raises as `get`."""
        return self.get(f"{rank_prefix(kind, rank)}/{name}")

    def unknown_columns(self) -> dict[str, RowSpec]:
        """Columns of the merged ledger that this version does not know and can read all the same, by name."""
        folder = self._paths.zarr / "_ledger"
        found: dict[str, RowSpec] = {}
        for name in sorted(_folders(folder)):
            path = f"_ledger/{name}"
            if known_row(path) is not None or RANK_PATH.fullmatch(f"{path}/x"):
                continue
            try:
                spec = self.get(path)
            except DamagedError:
                # Perhaps a layout of a later version: `verify` notes it.
                continue
            plain = spec is not None and spec.axis == "row" and len(spec.row_shape) < 2
            if spec is not None and plain and sum(spec.row_shape) <= WIDEST_COLUMN:
                found[name] = spec
        return found

    def _read(self, path: str) -> RowSpec | None:
        file = self._paths.zarr / path / "zarr.json"
        try:
            document = read_object(file)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            if has_chunks(file.parent):
                raise DamagedError(f"{file} is missing, though rows lie beside it; run `gradtap verify`") from error
            return None
        except RecursionError as error:
            raise DamagedError(f"{file} does not read ({error}); run `gradtap verify`") from error
        return self.parse(path, document, file)

    def parse(self, path: str, document: Mapping[str, Any], file: Path) -> RowSpec:
        """The array that a document says it is. Raises `DamagedError`, also where it does not fit the plan."""
        spec = row_spec(path, document, file)
        if known_row(path) is not None:
            for size, dim in zip(spec.row_shape, spec.dims[1:], strict=True):
                wanted = self._width(spec, dim, file)
                if wanted not in (None, size):
                    raise DamagedError(f"{file}: axis {dim!r} is {size} long, {wanted} expected; run `gradtap verify`")
        return spec

    def _width(self, spec: RowSpec, dim: str, file: Path) -> int | None:
        """How long an axis of a known array must be; None where the array itself says it."""
        if dim == "group":
            return max(self._groups, 1)
        if dim == "param" and spec.path.startswith("_ledger/"):
            return len(self._plan.params)
        if dim == "param":
            return len(params_of(spec, file))
        return len(self._pieces(spec, file)) if dim == "piece" else None

    def _pieces(self, spec: RowSpec, file: Path) -> list[tuple[int, int, int]]:
        pieces = pieces_of(spec, file)
        for param, start, stop in pieces:
            if not (0 <= param < len(self._plan.params) and 0 <= start < stop <= self._plan.params[param].numel):
                raise DamagedError(f"{file}: no parameter has the piece {[param, start, stop]}; run `gradtap verify`")
        return pieces


def params_of(spec: RowSpec, file: Path) -> list[str]:
    """The parameters that name the columns of a merged summary. Raises `DamagedError` where it does not say."""
    names = spec.attributes.get("params")
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise DamagedError(f"{file}: the attribute `params` does not name its columns; run `gradtap verify`")
    return names


def pieces_of(spec: RowSpec, file: Path) -> list[tuple[int, int, int]]:
    """Parameter index, start and stop of each column of a rank's summary. Raises `DamagedError` as `params_of`."""
    found = spec.attributes.get("pieces")
    good = isinstance(found, list) and all(
        isinstance(piece, list) and len(piece) == 3 and all(type(n) is int for n in piece) for piece in found
    )
    if not good:
        raise DamagedError(f"{file}: the attribute `pieces` does not name its columns; run `gradtap verify`")
    return [(param, start, stop) for param, start, stop in found or []]


def has_chunks(folder: Path) -> bool:
    """Whether a folder holds a chunk file."""
    try:
        with naming("list", folder), os.scandir(folder) as entries:
            return any(entry.name == "c" or entry.name.startswith("c.") for entry in entries)
    except StoreError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return False


def _folders(folder: Path) -> list[str]:
    try:
        with naming("list", folder), os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return []
