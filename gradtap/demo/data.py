"""The demo's text, on every machine that has Python: the standard library's own source, as bytes.

A batch is a pure function of its arguments, so that the check rebuilds any batch of any rank. No torch.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import GradtapError

BATCH = 4
"""Sequences in one micro-batch of one rank."""

CONTEXT = 64
"""Bytes that the model sees of each sequence."""


@functools.cache
def text(folder: Path | None = None) -> NDArray[np.uint8]:
    """All bytes of the top-level modules of the standard library, in the order of their names: 1-D uint8.

    Raises `GradtapError` where the sources are not on disk (a zipped or stripped Python).
    """
    where = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    parts = [path.read_bytes() for path in sorted(where.glob("*.py"))]
    joined = np.frombuffer(b"".join(parts), dtype=np.uint8)
    if joined.size <= CONTEXT + 1:
        raise GradtapError(
            f"{where} holds {joined.size} bytes of Python source, and the demo trains on more than {CONTEXT + 1}; "
            "run it with a Python whose standard library is on disk as .py files"
        )
    return joined


def batch(step: int, micro: int, rank: int, seed: int) -> NDArray[np.int64]:
    """Micro-batch `micro` (from 0) of optimizer step `step` (from 1) on `rank`: int64 [BATCH, CONTEXT + 1].

    The last column is only ever a target. Raises as `text` does.
    """
    source = text()
    starts = np.random.default_rng((seed, step, micro, rank)).integers(0, source.size - CONTEXT, size=BATCH)
    sequences: NDArray[np.uint8] = source[starts[:, None] + np.arange(CONTEXT + 1)]
    return sequences.astype(np.int64)
