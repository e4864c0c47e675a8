"""Settings that are not arguments of `attach`: each has a default, a reason, and an environment variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from gradtap.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recorder lays out and writes its store. Environment: `GRADTAP_` + the field's name in capitals."""

    capacity: int = 1024
    """Length of axis 0 to begin with, in captures; a power of two, doubled ahead of need, trimmed at close."""

    max_time: int = 4096
    """Most captures in one shard file (T); a power of two."""

    shard_bytes: int = 128 * 2**20
    """Raw bytes that a shard file aims at."""

    chunk_bytes: int = 512 * 2**10
    """Raw bytes that an inner chunk aims at."""

    slab_bytes: int = 8 * 2**20
    """Bytes of one reused host buffer; no smaller than the largest chunk."""

    buffer_bytes: int = 0
    """Host memory for reused buffers on each rank; 0 takes room for two captures, at least 64 MiB."""

    fsync: str = "every=50"
    """`none` (survives the process), `every=K` captures, or `each` capture."""

    attach_timeout: float = 120.0
    """Seconds that a rank waits for the others at attach."""

    close_timeout: float = 60.0
    """Seconds that rank 0 waits at close for the other ranks' last captures."""

    follow_interval: float = 1.0
    """Least seconds between two publications of completed captures."""

    heartbeat: float = 10.0
    """Seconds between two heartbeats of the lock."""

    lock_stale: float = 120.0
    """Seconds without a heartbeat after which another host's lock counts as left behind."""

    open_files: int = 256
    """Most shard files that a rank holds open."""

    def __post_init__(self) -> None:
        for name in ("capacity", "max_time"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise UsageError(f"{name} is {value}; it must be a power of two, such as 64 or 1024")
        self.fsync_every  # noqa: B018  (refuses a bad policy at construction)

    @property
    def fsync_every(self) -> int:
        """Captures between two fsyncs; 0 for never.

        Raises `UsageError` for an unknown policy.
        """
        if self.fsync == "none":
            return 0
        if self.fsync == "each":
            return 1
        head, _, count = self.fsync.partition("=")
        if head == "every" and count.isdigit() and int(count) > 0:
            return int(count)
        raise UsageError(f"fsync is {self.fsync!r}; allowed are none, each, and every=K such as every=50")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The defaults, with `GRADTAP_*` variables over them.

        Raises `UsageError` naming the variable for a value that does not parse.
        """
        env = os.environ if environment is None else environment
        found: dict[str, object] = {}
        for field in fields(cls):
            text = env.get(f"GRADTAP_{field.name.upper()}")
            if text is not None:
                found[field.name] = _parse(field.name, str(field.type), text)
        return cls(**found)  # type: ignore[arg-type]


def _parse(name: str, kind: str, text: str) -> object:
    convert = {"int": int, "float": float, "str": str}[kind]
    try:
        return convert(text)
    except ValueError as error:
        raise UsageError(f"GRADTAP_{name.upper()} is {text!r}; it must be a number ({kind})") from error
