"""The l2 norms of a deep check: computed from the chunks as they are decoded, then compared with the stored summary.

This is what binds the summaries to the gradients. Memory: two numbers for each parameter of a block of captures.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import GradtapError
from gradtap.read.assemble import SessionReader
from gradtap.read.report import Findings

CLOSE = 1e-6
"""Relative difference at which a norm counts as the stored one: only the order of a float64 sum is not ours."""

PART = 2**18
PATH = "_summary/l2"
CURE = "the gradients match their journals, so `grad` is right; for norms, restore this file from a copy of the run"


class NormSums:
    """Norms of the parameters in captures `start` to `stop`, gathered chunk by chunk."""

    def __init__(self, reader: SessionReader, start: int, stop: int) -> None:
        self._reader, self._start = reader, start
        shape = (stop - start, len(reader.session.plan.params))
        self._norms = np.zeros(shape)
        self._counts = np.zeros(shape, np.int64)

    def add(self, capture: int, param: int, values: NDArray[Any]) -> None:
        """Take in the values of one chunk."""
        at = capture - self._start, param
        self._norms[at] = np.hypot(self._norms[at], norm_of(values))
        self._counts[at] += values.size

    def compare(self, steps: NDArray[np.int64], found: Findings) -> None:
        """Say where the stored l2 is another one; `steps` has the step of each published capture, -1 elsewhere.

        A parameter of which a chunk is damaged or was left out is passed by.
        """
        summaries, session = self._reader.summaries, self._reader.session
        captures = np.flatnonzero(steps[self._start : self._start + len(self._norms)] >= 0) + self._start
        try:
            spec = session.arrays.get(PATH)
            if spec is None or not captures.size:
                return
            names = summaries.names_of("l2")
            stored = summaries.rows("l2", captures, np.arange(len(names)))
        except GradtapError:
            # Found by the checks of metadata and of rows.
            return
        for column, name in enumerate(names):
            param = session.by_name.get(name)
            if param is None:
                continue
            whole = self._counts[captures - self._start, param] == session.plan.params[param].numel
            made = self._norms[captures - self._start, param]
            for at in np.flatnonzero(whole & ~_alike(stored[:, column], made)):
                capture = int(captures[at])
                file = spec.file(session.paths.zarr, capture // spec.rows)
                what = f"l2 of capture {capture} is {stored[at, column]:.9g}, the gradient itself has {made[at]:.9g}"
                found.damage(file, what, CURE, param=name, step=int(steps[capture]))


def norm_of(values: NDArray[Any]) -> float:
    """The root of the sum of squares, in float64 and without overflow; NaN or infinite where a value is."""
    norm = 0.0
    for start in range(0, values.size, PART):
        part = values[start : start + PART].astype(np.float64)
        size = float(np.abs(part).max())
        if not math.isfinite(size):
            return size
        if size:
            part /= size
            norm = math.hypot(norm, size * math.sqrt(float(np.einsum("i,i->", part, part))))
    return norm


def _alike(stored: NDArray[np.float64], made: NDArray[np.float64]) -> NDArray[np.bool_]:
    # Chunks that hold a NaN and chunks that hold an infinity join to either: only that it is finite counts.
    lost = ~np.isfinite(stored) & ~np.isfinite(made)
    with np.errstate(all="ignore"):
        return np.asarray(lost | (np.abs(stored - made) <= CLOSE * np.maximum(stored, made)))
