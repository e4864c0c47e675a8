"""The arguments of `attach`, checked before anything is touched."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtap.encode.codecs import PROFILES
from gradtap.errors import UsageError, nearest
from gradtap.matching import Select
from gradtap.plan.rules import Rule, parse_rule

SUMMARY_LEVELS = ("none", "basic", "full")
ON_FULL = ("wait", "drop")
ON_ERROR = ("warn", "raise")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """Checked arguments of `attach`."""

    store: Path
    select: Select | None
    rule: Rule
    codec: str
    summary: str
    on_full: str
    on_error: str
    first_step: int | None


def check_options(
    store: str | os.PathLike[str],
    *,
    select: Any,
    every: Any,
    codec: Any,
    summary: Any,
    on_full: Any,
    on_error: Any,
    budget: Any,
    keep: Any,
    micro: Any,
    first_step: Any,
) -> AttachOptions:
    """The arguments of `attach` as one value.

    Raises `UsageError` naming the argument, its value and what is allowed.
    """
    _one_of("codec", codec, tuple(PROFILES))
    _one_of("summary", summary, SUMMARY_LEVELS)
    _one_of("on_full", on_full, ON_FULL)
    _one_of("on_error", on_error, ON_ERROR)
    _not_yet("budget", budget, None)
    _not_yet("keep", keep, 0)
    _not_yet("micro", micro, False)
    return AttachOptions(
        store=_store_path(store),
        select=select,
        rule=parse_rule(every),
        codec=codec,
        summary=summary,
        on_full=on_full,
        on_error=on_error,
        first_step=_first_step(first_step),
    )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        hint = nearest(str(value), allowed)
        raise UsageError(f"{name} is {value!r}; allowed are {', '.join(allowed)}{hint}")


def _not_yet(name: str, value: object, only: object) -> None:
    if value != only:
        raise UsageError(f"{name}={value!r} is not supported by this version of gradtap; leave it at {only!r}")


def _store_path(store: str | os.PathLike[str]) -> Path:
    try:
        text = os.fspath(store)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"store is {store!r}; give the path of a folder such as 'runs/mine.gradtap'")
    if "://" in text:
        raise UsageError(
            f"store is {text!r}; this version writes to folders only: give a path such as 'runs/mine.gradtap'"
        )
    return Path(text).absolute()


def _first_step(step: Any) -> int | None:
    if step is None:
        return None
    try:
        number = 0 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"first_step is {step!r}; give the number of the first update to come, 1 or more")
    return int(number)
