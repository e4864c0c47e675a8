"""Counts calls into torch.distributed that are made while a block runs. For proving that capture makes none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

NAMES = [
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "recv", "isend", "irecv", "send_object_list", "recv_object_list",
    "batch_isend_irecv", "new_group",
]  # fmt: skip


class Counter:
    """Calls made while `watching`; `all_calls` counts the others too, so that a test can see that counting works."""

    def __init__(self) -> None:
        self.watching = False
        self.seen: list[str] = []
        self.all_calls = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is called within."""
        self.watching = True
        try:
            yield
        finally:
            self.watching = False


def count_collectives() -> Counter:
    """Wrap every collective and point-to-point call of torch.distributed in this process, for good."""
    counter = Counter()
    for module in (dist, dist.distributed_c10d):
        for name in NAMES:
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, _counting(counter, name, original))
    return counter


def _counting(counter: Counter, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        counter.all_calls += 1
        if counter.watching:
            counter.seen.append(name)
        return original(*args, **kwargs)

    return call
