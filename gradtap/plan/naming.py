"""Parameter names to array names. The true name is kept in the array's attributes; nothing here decodes."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence

from gradtap.errors import UsageError

MAX_BYTES = 200
_HASH_DIGITS = 16
_RESERVED = frozenset("/\\%@:")
_GROUP_FILE = "zarr.json"


def encode_name(name: str) -> str:
    r"""The name of one array: at most 200 bytes of UTF-8, valid as a file name, without "@" (kept for pieces).

    Percent-encoded: `/ \ % @ :`, control characters, lone surrogates, a leading `_` or `.`, a trailing dot or
    space, and the first letter of `zarr.json`, which is the group's own file. The empty name is a bare `%`.
    A longer name becomes a prefix, `~` and a hash of the true name.
    """
    if not name:
        return "%"
    last = len(name) - 1
    text = "".join(_escape(c) if _must_escape(c, i == 0, i == last) else c for i, c in enumerate(name))
    if text.casefold() == _GROUP_FILE:
        text = _escape(text[0]) + text[1:]
    return text if len(text.encode()) <= MAX_BYTES else _hashed(text, name)


def array_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names of the arrays of parameters `names`, no two equal even where a file system folds case.

    All names that would meet get a hash suffix, so the answer does not depend on their order.
    Raises `UsageError` for a name that is given twice.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"parameter name {twice[0]!r} is given twice; each parameter needs a name of its own")
    found = [encode_name(name) for name in names]
    while True:
        keys = Counter(_folded(text) for text in found)
        meeting = [i for i, text in enumerate(found) if keys[_folded(text)] > 1]
        if not meeting:
            return tuple(found)
        fresh = [(i, _hashed(encode_name(names[i]), names[i])) for i in meeting]
        if all(found[i] == text for i, text in fresh):
            raise UsageError(
                f"parameters {names[meeting[0]]!r} and {names[meeting[1]]!r} get one array name; rename one"
            )
        for i, text in fresh:
            found[i] = text


def piece_name(base: str, start: int) -> str:
    """Array name of the piece of array `base` that starts at element `start`."""
    return f"{base}@{start}"


def flat_name(base: str) -> str:
    """Array name of a parameter that is stored as one flat array."""
    return f"{base}@flat"


def _must_escape(char: str, first: bool, last: bool) -> bool:
    if char in _RESERVED or unicodedata.category(char) in ("Cc", "Cs"):
        return True
    return (first and char in "_.") or (last and char in ". ")


def _escape(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


def _hashed(text: str, name: str) -> str:
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    room = MAX_BYTES - _HASH_DIGITS - 1
    return f"{text.encode()[:room].decode(errors='ignore')}~{digest}"


def _folded(text: str) -> str:
    # Some file systems also store one normal form of Unicode for all.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
