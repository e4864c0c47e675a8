"""Flags of a step: what a reader must know before trusting its numbers. One bit each, stored in the ledger."""

from __future__ import annotations

INEXACT_UNSCALE = 1
"""Dividing by the loss scale rounded some elements (subnormal results); the ledger counts them."""

MODIFIED_AFTER_BACKWARD = 2
"""Something wrote to a gradient between the end of backward and the capture: clipping that escaped, for one."""

CLIP_UNKNOWN = 4
"""Whether the gradient was changed after backward could not be observed."""

UNTOUCHED = 8
"""No backward of the window reached at least one stored parameter; `touched` says which."""

LATE_TOUCH = 16
"""A parameter was first reached by a later micro-batch, under an engine that then adds old content to it."""

NORM_MISMATCH = 32
"""The norm of what was captured differs from the engine's own global norm."""

NONFINITE = 64
"""At least one stored element is NaN or infinite."""

JOINED_LATE = 128
"""Recording was attached in the middle of this window: micro-batches before it were not seen, the factor is unknown."""

FLAG_NAMES = {
    INEXACT_UNSCALE: "inexact-unscale",
    MODIFIED_AFTER_BACKWARD: "modified-after-backward",
    CLIP_UNKNOWN: "clip-unknown",
    UNTOUCHED: "untouched",
    LATE_TOUCH: "late-touch",
    NORM_MISMATCH: "norm-mismatch",
    NONFINITE: "nonfinite",
    JOINED_LATE: "joined-late",
}
"""Bit -> the name that readers show."""


def names_of(flags: int) -> tuple[str, ...]:
    """Names of the set bits, lowest bit first; unknown bits (of a newer writer) as `bit-N`."""
    bits = [1 << i for i in range(int(flags).bit_length()) if flags >> i & 1]
    return tuple(FLAG_NAMES.get(bit, f"bit-{bit.bit_length() - 1}") for bit in bits)
