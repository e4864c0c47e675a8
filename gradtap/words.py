"""Phrases that several messages share."""

from __future__ import annotations

from collections.abc import Sequence

MOST_SHOWN = 8


def ranks(found: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, or the first few and how many more."""
    shown = ", ".join(map(str, found[:MOST_SHOWN]))
    more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    return f"rank{'' if len(found) == 1 else 's'} {shown}{more}"
