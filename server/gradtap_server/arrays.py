"""Gradients as HTTP carries them: the headers that say what the bytes are. Not here: sending them (`sending`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from starlette.responses import Response

from gradtap.query.formats import GradHead

LONGEST_LIST = 2048
"""Characters of a header that lists something for each step; proxies take 8 KiB of headers, all together."""

ENDINGS = {"raw": "bin", "npy": "npy", "json": "json", "safetensors": "safetensors"}
"""How the name of a downloaded file ends."""


def head_only(*, media_type: str, length: int | None, headers: Mapping[str, str]) -> Response:
    """The answer to HEAD: the headers of a GET, `length` bytes long where that is known before anything is read."""
    response = Response(headers=headers, media_type=media_type)
    del response.headers["content-length"]
    if length is not None:
        response.headers["content-length"] = str(length)
    return response


def array_headers(head: GradHead, *, dtype: str, rounded: int | None = None) -> dict[str, str]:
    """What the bytes are: `dtype` names their elements. `rounded` counts those it could not hold, None if unknown."""
    made = {
        "Shape": ",".join(map(str, head.shape)),
        "Dtype": dtype,
        "Byteorder": "little",
        "Run": head.run,
        "Name": quote(head.name, safe=""),
        "Source-Dtype": head.dtype_captured,
        "Flags": ",".join(head.flags),
        **_places(head),
    }
    if head.complete is not None:
        made["Complete"] = json.dumps(head.complete)
    if rounded is not None:
        made["Rounded"] = str(rounded)
    return {f"X-Gradtap-{name}": text for name, text in made.items()}


def _places(head: GradHead) -> dict[str, str]:
    if not head.stacked:
        one = {"Step": str(head.steps[0]), "Attempt": str(head.attempts[0]), "Factor": repr(head.factor[0])}
        return one | ({} if head.consumed is None else {"Consumed": repr(head.consumed[0])})
    made = {"Count": str(len(head.steps)), "Steps": _listed(head.steps) or f"{head.steps[0]}..{head.steps[-1]}"}
    for name, values in (("Attempt", head.attempts), ("Factor", head.factor)):
        # One value stands for all of a long list where they are equal; a list that is too long is left out.
        text = _listed(values) or (repr(values[0]) if len(set(values)) == 1 else "")
        made |= {name: text} if text else {}
    if head.consumed is not None:
        same = repr(head.consumed[0]) if len(set(head.consumed)) == 1 else ""
        # Empty where it is too long: that the values are multiplied must be said all the same.
        made["Consumed"] = _listed(head.consumed) or same
    return made


def _listed(values: Sequence[float]) -> str:
    text = ",".join(map(repr, values))
    return text if len(text) <= LONGEST_LIST else ""


def download_headers(head: GradHead, form: str) -> dict[str, str]:
    """Makes a browser save the answer, under a name that any file system takes."""
    safe = "".join(letter if letter.isprintable() and letter not in '/\\:*?"<>|' else "_" for letter in head.name)
    steps = "-".join(str(step) for step in dict.fromkeys((head.steps[0], head.steps[-1])))
    name = f"{safe[:120].lstrip('.')}.step{steps}.{ENDINGS[form]}"
    plain = quote(name) == name
    return {
        "Content-Disposition": f'attachment; filename="{name}"'
        if plain
        else f"attachment; filename*=utf-8''{quote(name)}"
    }
