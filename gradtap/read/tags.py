"""What a training logged with its steps: JSON lines `{"step", "tags"}` of each rank, followed while they grow.

Not here: which session's tags of a step count (`run`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradtap.errors import DamagedError
from gradtap.store.files import naming
from gradtap.store.paths import SessionPaths


@dataclass(slots=True)
class _Followed:
    """One rank's file as far as it was read."""

    end: int = 0
    lines: int = 0
    by_step: dict[int, dict[str, Any]] = field(default_factory=dict)


class TagReader:
    """The tags of one session. For any thread."""

    def __init__(self, paths: SessionPaths) -> None:
        self._paths = paths
        self._files: dict[Path, _Followed] = {}
        self._lock = threading.Lock()

    def of(self, step: int) -> dict[str, Any]:
        """All tags of a step: within a rank the latest line counts, among ranks the lowest.

        Raises `DamagedError` naming file and line for one that does not read.
        """
        found: dict[str, Any] = {}
        with self._lock:
            for file in reversed(tag_files(self._paths)):
                found |= self._follow(file).by_step.get(step, {})
        return found

    def _follow(self, file: Path) -> _Followed:
        known = self._files.setdefault(file, _Followed())
        with naming("read", file):
            if file.stat().st_size == known.end:
                return known
            with file.open("rb") as stream:
                stream.seek(known.end)
                data = stream.read()
        for line in _whole_lines(data):
            step, tags = parse_tags(line, file, known.lines + 1)
            known.by_step.setdefault(step, {}).update(tags)
            known.lines += 1
            known.end += len(line) + 1
        return known


def tag_files(paths: SessionPaths) -> list[Path]:
    """The ranks' files of tags that there are, by rank."""
    return sorted(paths.tags(0).parent.glob("r[0-9][0-9][0-9][0-9][0-9]*"))


def damaged_tags(file: Path) -> Iterator[str]:
    """What is wrong with each line that does not read; a last line without its end is still being written."""
    with naming("read", file):
        data = file.read_bytes()
    for number, line in enumerate(_whole_lines(data), 1):
        try:
            parse_tags(line, file, number)
        except DamagedError as error:
            yield str(error)


def parse_tags(line: bytes, file: Path, number: int) -> tuple[int, dict[str, Any]]:
    """Step and tags of one line. Raises `DamagedError`."""
    try:
        fields = json.loads(line)
        step, tags = fields["step"], fields["tags"]
        good = type(step) is int and isinstance(tags, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise DamagedError(f"{file}: line {number} is not what was written; run `gradtap verify`")
    return step, tags


def _whole_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]
