"""How much host memory there is for this process, as far as the kernel says. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Limit, use, and the reclaimable part of it: (controller's folder, file, file, key in memory.stat), cgroup v2 and v1.
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that could be taken now without swapping, in the machine or under a limit of a cgroup, whichever is less.

    The machine's are `MemAvailable`, or its free pages where the kernel does not say. What a cgroup holds of files that
    it can drop counts as available, as it does in `MemAvailable`.
    """
    return max(0, min([_of_machine(proc), *_of_groups(proc, groups)]))


def local_ranks() -> int:
    """Ranks on this machine, as launchers say in `LOCAL_WORLD_SIZE`; 1 where none did."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1


def _of_machine(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, inside = line.split(":", 2)
        if number == "0" and not controllers:
            files = _V2
        elif "memory" in controllers.split(","):
            files = _V1
        else:
            continue
        root = groups / files[0]
        # Each ancestor's limit holds too. In a container the path may be the host's: what exists of it counts.
        folder = root / inside.strip().lstrip("/")
        for place in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
            room = _room(place, files)
            if room is not None:
                yield room


def _room(place: Path, files: tuple[str, str, str, str]) -> int | None:
    limit, used = (next(iter(_lines(place / name)), "") for name in files[1:3])
    # No limit is the word "max" in v2, and in v1 a number larger than any memory.
    if not limit.isdecimal() or not used.isdecimal():
        return None
    dropped = [line.split()[1] for line in _lines(place / "memory.stat") if line.split()[:1] == [files[3]]]
    return int(limit) - int(used) + sum(map(int, dropped))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
