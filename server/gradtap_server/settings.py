"""What an operator may set of the service: each limit with its reason, each by an environment variable too."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from gradtap.environment import SERVER_PREFIX, bad_setting, read_settings
from gradtap.errors import UsageError
from gradtap.store.files import naming

LIMITS = (
    *("response_bytes", "read_bytes", "amplification", "amplification_from", "chunks", "json_elements", "cells"),
    *("page", "page_max", "answers_at_once", "timeout"),
)
"""The settings that a client can run into; `GET /api/v1` names them."""

_LONGEST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the service answers. Environment: `GRADTAP_SERVER_` + the field's name in capitals.

    Every field is checked at construction: `UsageError` names the variable, the value and what is allowed. `StoreError`
    for a `token_file` that does not read.
    """

    stores: str = ""
    """Folders to serve, each a run or a folder of runs, with ":" between them (";" on Windows)."""

    token: str | None = field(default=None, repr=False)
    """What a client must show as `Authorization: Bearer`; without one, anybody on this machine may read."""

    token_file: str | None = None
    """A file that holds the token, as secrets are mounted; as in `token`, its first and last blanks do not count."""

    insecure_no_auth: bool = False
    """Answer on addresses beyond this machine without a token: anybody who reaches them may read every gradient."""

    hosts: str = ""
    """Names, with commas between them, that clients may call this service by beside loopback's; `*` for any."""

    root_path: str = ""
    """The path under which a proxy shows the service, such as `/gradients`."""

    response_bytes: int = 64 * 2**20
    """Bytes of one answer. Two at a time stay well within the memory of a small container."""

    read_bytes: int = 256 * 2**20
    """Decoded bytes that one answer may need: a strided slice can touch every chunk for a few values."""

    amplification: int = 8
    """Decoded bytes that one answer may need for each of its own, above `amplification_from`."""

    amplification_from: int = 32 * 2**20
    """Decoded bytes that any answer may need, however small it is."""

    chunks: int = 1000
    """Stored chunks that one answer may read: each is a seek on a disk."""

    json_elements: int = 65536
    """Values in one JSON answer: as text they take four times the bytes and a hundred times the time."""

    cells: int = 4 * 10**6
    """Cells of one matrix of norms, parameters times steps."""

    page: int = 200
    """Rows of a page where none were asked for."""

    page_max: int = 1000
    """Most rows of a page."""

    threads: int = 0
    """Reads of gradients at a time; 0 for two for each core. Metadata has threads of its own."""

    answers_at_once: int = 8
    """Large answers, of 1 MiB and more, that are held in memory at a time, from their read to their last byte."""

    timeout: float = 30.0
    """Seconds that a client waits for an answer, and that an answer waits for a client that takes nothing of it."""

    rescan: float = 1.0
    """Least seconds between two looks for new runs."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int":
                _check_count(each.name, value, least=0 if each.name == "threads" else 1)
            elif each.type == "float":
                _check_seconds(each.name, value)
        if self.page > self.page_max:
            raise _bad("page", self.page, f"no more than {_variable('page_max')}, {self.page_max}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise _bad(
                "root_path", self.root_path, "empty, or a path such as /gradients that begins with /, ends without"
            )
        if self.token is not None and self.token_file is not None:
            raise UsageError(f"both {_variable('token')} and {_variable('token_file')} are set; set one of them")
        if self.token_file is not None:
            object.__setattr__(self, "token", _token_in(self.token_file))
            object.__setattr__(self, "token_file", None)
        if self.token is not None:
            # What a client shows is stripped too; with the blanks nobody could get in.
            object.__setattr__(self, "token", self.token.strip())
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise UsageError(
                f"{_variable('token')} is empty or has odd characters; it must be letters, digits and signs, such as "
                "what `python3 -c 'import secrets; print(secrets.token_hex(32))'` prints"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ServerSettings:
        """The defaults, with `GRADTAP_SERVER_*` variables over them.

        Raises `UsageError` for a variable of an unknown name, and naming the variable for a value that is not allowed.
        """
        return cls(**read_settings(cls, SERVER_PREFIX, os.environ if environment is None else environment))

    @property
    def folders(self) -> tuple[str, ...]:
        """The stores one by one."""
        return tuple(part for part in self.stores.split(os.pathsep) if part)

    @property
    def host_names(self) -> frozenset[str]:
        """The names of `hosts`, lower case."""
        return frozenset(name.strip().lower() for name in self.hosts.split(",") if name.strip())

    @property
    def reads_at_once(self) -> int:
        """Threads for reads of gradients."""
        return self.threads or 2 * (os.cpu_count() or 1)

    @property
    def auth(self) -> str:
        """`token`, or `none`."""
        return "none" if self.token is None else "token"

    def limits(self) -> dict[str, int | float]:
        """The limits that a client can run into, by name."""
        return {name: getattr(self, name) for name in LIMITS}


def _token_in(path: str) -> str:
    with naming("read the token file", path), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def _variable(name: str) -> str:
    return SERVER_PREFIX + name.upper()


def _bad(name: str, value: object, allowed: str) -> UsageError:
    return bad_setting(_variable(name), value, allowed)


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(name, value, f"a whole number, at least {least}")


def _check_seconds(name: str, value: object) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    least = name == "rescan"
    if not (number > 0 or (least and number == 0)) or number > _LONGEST:
        raise _bad(name, value, f"a number of seconds {'from' if least else 'above'} 0, at most {_LONGEST:g}")
