"""From staged values to stored bytes and numbers, and back: pure functions of arrays.

Comes in: 1-D NumPy arrays of one piece or chunk in the captured dtype (bfloat16 as uint16 bits), and the power of two
of the loss scale. Goes out: float32 or float64 values (`widen`), `EncodedChunk` (`codecs`), `PieceSummary`
(`summary`, `histogram`), checksums (`checksum`).

Must not be known here: files, Zarr groups, plans, ranks, steps, torch.
"""

from __future__ import annotations
