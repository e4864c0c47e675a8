"""Settings from environment variables: a prefix and the field's name in capitals. Not here: what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from gradtap.errors import UsageError, nearest

PREFIX = "GRADTAP_"
"""Of every variable that gradtap reads."""

SERVER_PREFIX = "GRADTAP_SERVER_"
"""Of the settings of the HTTP service."""

TOKEN = "GRADTAP_TOKEN"
"""What the command line shows to a server: no setting of anything."""

_WORDS = {"int": "a whole number", "float": "a number", "bool": "1 or 0"}
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read_settings(
    cls: type, prefix: str, environment: Mapping[str, str], *, beside: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of a dataclass that the environment sets, as int, float, bool or text after the field's annotation.

    Variables of `beside` are somebody else's, as are all that begin with one of its names that end in "_". Raises
    `UsageError` for any other variable with the prefix that is no field's, with near names, and naming the variable for
    a value of another kind.
    """
    kinds = {prefix + field.name.upper(): field for field in fields(cls)}
    found: dict[str, Any] = {}
    for variable in sorted(name for name in environment if name.startswith(prefix)):
        if variable in beside or variable.startswith(tuple(other for other in beside if other.endswith("_"))):
            continue
        text = environment[variable]
        if variable not in kinds:
            known = nearest(variable, kinds) or f"; known are {', '.join(kinds)}"
            raise UsageError(f"{variable}={text!r} in the environment is no setting of gradtap{known}")
        found[kinds[variable].name] = _parse(variable, str(kinds[variable].type), text)
    return found


def bad_setting(variable: str, value: object, allowed: str) -> UsageError:
    """The error for a value that is not allowed."""
    return UsageError(f"{variable} is {value!r}; it must be {allowed}")


def _parse(variable: str, kind: str, text: str) -> object:
    try:
        if kind == "bool":
            return _BOOLS[text.strip().lower()]
        return {"int": int, "float": float}.get(kind, str)(text)
    except (ValueError, KeyError) as error:
        raise bad_setting(variable, text, _WORDS[kind]) from error
