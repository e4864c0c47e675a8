"""Settings that are not arguments of `attach`: each has a default, a reason, and an environment variable."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from gradtap.environment import PREFIX, SERVER_PREFIX, TOKEN, bad_setting, read_settings
from gradtap.errors import UsageError

_LEAST = {"capacity": 1, "max_time": 1, "shard_bytes": 64, "chunk_bytes": 64, "slab_bytes": 64, "buffer_bytes": 0}
_LEAST["open_files"] = 8

_LONGEST = 1e9
"""Seconds. What waits below counts in whole nanoseconds of 64 bits, and more than decades is a slip of the pen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recorder lays out and writes its store. Environment: `GRADTAP_` + the field's name in capitals.

    Every field is checked at construction: `UsageError` names the variable, the value and what is allowed.
    """

    capacity: int = 1024
    """Length of axis 0 to begin with, in captures; a power of two, doubled ahead of need, trimmed at close."""

    max_time: int = 4096
    """Most captures in one shard file (T); a power of two."""

    shard_bytes: int = 128 * 2**20
    """Raw bytes that a shard file aims at; no fewer than `chunk_bytes`."""

    chunk_bytes: int = 512 * 2**10
    """Raw bytes that an inner chunk aims at; at least 64."""

    slab_bytes: int = 8 * 2**20
    """Bytes of one reused host buffer; no smaller than the largest chunk."""

    buffer_bytes: int = 0
    """Host memory for reused buffers on each rank.

    0 takes room for two captures, at least 64 MiB; at most this rank's share (the ranks on this machine divide evenly)
    of a quarter of the memory that is available at attach, in the machine or under its cgroup's limit, whichever is
    less. Never less than two slabs, whatever is asked for.
    """

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
    """Seconds without a heartbeat after which another host's lock counts as left behind; more than `heartbeat`."""

    open_files: int = 256
    """Most shard files that a rank holds open; at least 8."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                _check_count(field.name, value)
            elif field.type == "float":
                _check_seconds(field.name, value)
        for name in ("capacity", "max_time"):
            value = getattr(self, name)
            if value & (value - 1):
                raise _bad(name, value, "a power of two, such as 64 or 1024")
        if self.shard_bytes < self.chunk_bytes:
            raise _bad("shard_bytes", self.shard_bytes, f"no less than {_variable('chunk_bytes')}, {self.chunk_bytes}")
        if self.lock_stale <= self.heartbeat:
            raise _bad("lock_stale", self.lock_stale, f"more than {_variable('heartbeat')}, {self.heartbeat:g} s")
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
        raise UsageError(
            f"{_variable('fsync')} is {self.fsync!r}; allowed are none, each, and every=K such as every=50"
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The defaults, with `GRADTAP_*` variables over them; `GRADTAP_SERVER_*` and `GRADTAP_TOKEN` are not for here.

        Raises `UsageError` for a variable of an unknown name, and naming the variable for a value that is not allowed.
        """
        env = os.environ if environment is None else environment
        return cls(**read_settings(cls, PREFIX, env, beside=(SERVER_PREFIX, TOKEN)))


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _bad(name: str, value: object, allowed: str) -> UsageError:
    return bad_setting(_variable(name), value, allowed)


def _check_count(name: str, value: object) -> None:
    least = _LEAST[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(name, value, f"a whole number, at least {least}")


def _check_seconds(name: str, value: object) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 < number <= _LONGEST:
        raise _bad(name, value, f"a number of seconds above 0, at most {_LONGEST:g}")
