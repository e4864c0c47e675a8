"""Which parameters a `select=` or `match=` names: globs over dotted names, or a function over (name, shape)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gradtap.errors import ParamNotFoundError, UsageError, near_names, nearest

if TYPE_CHECKING:
    from gradtap.types import ParamSpec

Select = str | Sequence[str] | Callable[[str, tuple[int, ...]], bool]
"""A glob, globs (one that begins with `!` excludes), or a function over (name, shape)."""


def matches(select: Select, param: ParamSpec) -> bool:
    """Whether `select` names the parameter. Globs: included by any (all, where only exclusions are given), and
    excluded by none.
    """
    if callable(select):
        return bool(select(param.name, param.shape))
    globs = [select] if isinstance(select, str) else list(select)
    include = [g for g in globs if not g.startswith("!")]
    exclude = [g[1:] for g in globs if g.startswith("!")]
    names = (param.name, *param.aliases)
    chosen = not include or any(fnmatchcase(n, g) for n in names for g in include)
    return chosen and not any(fnmatchcase(n, g) for n in names for g in exclude)


def found_by(text: str, params: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Parameters of which a name or alias holds the text, or matches it whole where it has wildcards; in their order.

    A name in full is that parameter alone, empty is all, a leading `!` turns it round.
    """
    # A name is taken as it stands first: one with brackets in it is a glob that does not match itself.
    if own := [p for p in params if text in (p.name, *p.aliases)]:
        return own
    sign = "!" if text.startswith("!") else ""
    part = text.removeprefix("!")
    glob = text if any(wild in part for wild in "*?[") else f"{sign}*{part}*"
    return [p for p in params if matches(glob, p)]


def near_params(text: str, params: Sequence[ParamSpec]) -> list[str]:
    """Names of the parameters that a misspelt name or part of one may have meant, best first."""
    bare = text.strip("!*")
    whole = near_names(bare, [p.name for p in params])
    if whole:
        return whole
    parts = {part: p.name for p in reversed(params) for part in p.name.split(".")}
    return [parts[part] for part in near_names(bare, parts)]


def select_params(select: Select | None, params: Sequence[ParamSpec]) -> frozenset[int] | None:
    """Indices of the stored parameters that `select` names; None for all.

    Raises `UsageError` for a select of a wrong type, `ParamNotFoundError` where it names no stored parameter.
    """
    if select is None:
        return None
    globs = isinstance(select, str) or (
        isinstance(select, Sequence) and bool(select) and all(isinstance(g, str) for g in select)
    )
    if not globs and not callable(select):
        raise UsageError(
            f"select is {select!r}; give a glob such as '*.weight', a list of globs ('!*.bias' excludes), or a "
            "function over (name, shape)"
        )
    try:
        chosen = frozenset(i for i, p in enumerate(params) if p.stored and matches(select, p))
    except Exception as error:
        if not callable(select):
            raise
        raise UsageError(f"the select function failed: {type(error).__name__}: {error}") from error
    known = [p.name for p in params if p.stored]
    if not callable(select):
        _refuse_idle_globs([select] if isinstance(select, str) else list(select), known)
    if not chosen:
        raise ParamNotFoundError(f"select {select!r} names no captured parameter; there are {', '.join(known[:5])} ...")
    return chosen


def _refuse_idle_globs(globs: Sequence[str], known: Sequence[str]) -> None:
    """A glob that matches nothing is a typo, most of all in an exclusion."""
    for glob in globs:
        bare = glob.removeprefix("!")
        if not any(fnmatchcase(name, bare) for name in known):
            near = nearest(bare.strip("*."), {part for name in known for part in (name, name.rsplit(".", 1)[-1])})
            there = near or f"; there are {', '.join(known[:5])} ..."
            raise ParamNotFoundError(f"select {glob!r} names no captured parameter{there}")
