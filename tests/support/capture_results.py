"""Puts together what the processes of `capture_cells` left: whole gradients by name, from each owner's piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.capture_cells import key

Arrays = dict[str, NDArray[np.float64]]


class CellResult:
    """One cell's results from all ranks."""

    def __init__(self, cell: dict[str, Any], results: list[dict[str, Any]], folder: Path) -> None:
        self.cell = cell
        self.ranks = [result[key(cell)] for result in results]
        self._arrays = [dict(np.load(folder / f"{key(cell)}.{rank}.npz")) for rank in range(len(results))]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The facts of the steps, as rank 0 told them."""
        return self.ranks[0]["steps"]

    @property
    def stored(self) -> dict[str, dict[str, Any]]:
        """Specs of the stored parameters, by name."""
        return {spec["name"]: spec for spec in self.ranks[0]["params"] if spec["status"] == "captured"}

    def assembled(self, number: int) -> Arrays:
        """Whole gradients as captured, from exactly the ranges that the ownership names. NaN where none covers."""
        return {
            spec["name"]: self._assemble(number, spec, own)
            for spec, own in zip(self.ranks[0]["params"], self.ranks[0]["ownership"], strict=True)
            if own is not None
        }

    def given(self, number: int, kind: str, rank: int = 0) -> Arrays:
        """Arrays of a kind (`held`, `reference`) of a step, by parameter name."""
        prefix = f"{number}/{kind}/"
        return {
            name.removeprefix(prefix): value for name, value in self._arrays[rank].items() if name.startswith(prefix)
        }

    def pieces(self, number: int, rank: int) -> dict[str, dict[int, NDArray[np.float64]]]:
        """What a rank's source gave: start -> values, by parameter name."""
        found: dict[str, dict[int, NDArray[np.float64]]] = {}
        for name, value in self.given(number, "grad", rank).items():
            param, start = name.rsplit("/", 1)
            found.setdefault(param, {})[int(start)] = value
        return found

    def _assemble(self, number: int, spec: dict[str, Any], own: dict[str, Any]) -> NDArray[np.float64]:
        numel = int(np.prod(spec["shape"]))
        flat = np.full(numel, np.nan)
        bounds = [0, numel] if own["kind"] == "replicated" else own["bounds"]
        for rank, start, stop in zip(own["ranks"], bounds, bounds[1:], strict=False):
            held = self.pieces(number, rank).get(spec["name"], {})
            assert sum(map(len, held.values())) == stop - start, (spec["name"], rank, start, stop)
            for at, values in held.items():
                assert start <= at and at + len(values) <= stop
                flat[at : at + len(values)] = values
        return flat.reshape(spec["shape"])


def distance(value: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Relative L2 distance; absolute where the reference is zero."""
    return float(np.linalg.norm(value - reference) / (np.linalg.norm(reference) or 1.0))
