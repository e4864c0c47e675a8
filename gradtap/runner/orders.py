"""What the parent of `gradtap run` tells the processes that it starts, and what they tell it. No torch, no numpy.

The orders are one environment variable; the words back are lines in one file for each process.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "_GRADTAP_RUN"
"""Begins with an underscore: a `GRADTAP_*` name would be taken for a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """store: absolute path; options: of `gradtap.attach`; work: folder for the words back."""

    store: str
    work: str
    options: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """As the environment variable holds it."""
        return json.dumps(asdict(self))


def orders_here() -> Orders | None:
    """The orders of this process; None outside of `gradtap run`."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Orders(**json.loads(text))


def tell(event: str, **facts: Any) -> None:
    """Append one event for the parent. Silent where the parent is on another machine, or has gone."""
    orders = orders_here()
    if orders is None:
        return
    line = json.dumps({"event": event, "rank": int(os.environ.get("RANK", "0")), **facts})
    # Opened each time: a process may fork.
    with suppress(OSError), (Path(orders.work) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def heard(work: Path) -> list[dict[str, Any]]:
    """Every event, of the lowest rank first, each process's in its order; a line that was cut off is left out."""
    events = []
    for path in sorted(work.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return sorted(events, key=lambda event: int(event.get("rank", 0)))
