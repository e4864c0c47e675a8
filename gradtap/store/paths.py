"""Where things lie in a run. Names only: nothing here touches the disk, except to list sessions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SESSION_NAME = re.compile(r"[0-9]{4,9}")
"""What a session's folder may be called: anything else in a run.json is refused, so no name leaves the run."""


@dataclass(frozen=True, slots=True)
class SessionPaths:
    """The files of one session."""

    run: Path
    name: str

    @property
    def root(self) -> Path:
        """The session's folder."""
        return self.run / "sessions" / self.name

    @property
    def session_json(self) -> Path:
        """Engine, plan, codec and settings; written before the session is listed."""
        return self.root / "session.json"

    @property
    def schedule_log(self) -> Path:
        """Which steps are captured."""
        return self.root / "schedule.log"

    @property
    def zarr(self) -> Path:
        """The Zarr group: nothing in it that is not Zarr."""
        return self.root / "gradients.zarr"

    def journal(self, rank: int) -> Path:
        """A rank's journal of captures."""
        return self.root / "journal" / f"r{rank:05d}"

    def tags(self, rank: int) -> Path:
        """A rank's user tags, JSON lines."""
        return self.root / "tags" / f"r{rank:05d}"

    def shard(self, array: str, window: int, column: tuple[int, ...]) -> Path:
        """The shard file of an array for captures `window * T` on, in one shard column."""
        return self.zarr / array / ".".join(["c", str(window), *map(str, column)])


def session_folders(run: Path) -> list[str]:
    """Names of all session folders, listed in run.json or not, ascending."""
    root = run / "sessions"
    if not root.is_dir():
        return []
    return sorted((p.name for p in root.iterdir() if SESSION_NAME.fullmatch(p.name)), key=int)
