"""How long `gradtap --help` takes over an interpreter that does nothing: `python -m tests.perf.startup [--json]`.

The two are run in turns, so that both meet the same load. No test: on a busy machine it says more of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

AIM = 0.250
"""Seconds over the bare interpreter that a person does not notice."""

COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "gradtap": [sys.executable, "-m", "gradtap", "--help"],
}


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each command in each round; the first round, which fills the disk's cache, is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for at in range(rounds + 1):
        # Each goes first in every second round.
        for name in sorted(COMMANDS, reverse=at % 2 == 1):
            started = time.perf_counter()
            subprocess.run(COMMANDS[name], stdout=subprocess.DEVNULL, check=True, env=os.environ)
            seconds[name].append(time.perf_counter() - started)
    return {name: found[1:] for name, found in seconds.items()}


def summary(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Medians, the median of the differences within a round, the ratio of the medians, and whether the aim is met."""
    bare, own = statistics.median(seconds["python"]), statistics.median(seconds["gradtap"])
    pairs = zip(seconds["gradtap"], seconds["python"], strict=True)
    over = statistics.median(one - other for one, other in pairs)
    return {
        "schema": "gradtap.bench-startup/1",
        "python": platform.python_version(),
        "rounds": len(seconds["python"]),
        "python_seconds": bare,
        "gradtap_seconds": own,
        "over_seconds": over,
        "ratio": own / bare,
        "aim_seconds": AIM,
        "met": over <= AIM,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="times that each command runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"rounds is {options.rounds}; give 1 or more")
    found = summary(measure(options.rounds))
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    sys.stdout.write(
        f"python -c pass    {found['python_seconds'] * 1e3:7.1f} ms\n"  # type: ignore[operator]
        f"gradtap --help    {found['gradtap_seconds'] * 1e3:7.1f} ms\n"  # type: ignore[operator]
        f"over it           {found['over_seconds'] * 1e3:7.1f} ms, aim {AIM * 1e3:.0f} ms "  # type: ignore[operator]
        f"{'met' if found['met'] else 'NOT met'}; ratio {found['ratio']:.1f}, medians of {found['rounds']} rounds\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
