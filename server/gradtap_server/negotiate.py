"""Which form of an answer a client gets: `format=` first, else what `Accept` prefers among what there is."""

from __future__ import annotations

from collections.abc import Mapping

from gradtap.errors import NotAcceptableError, near_names, nearest

Ranges = dict[str, float]
"""Media range of an `Accept` header, such as `image/*`, and its weight from 0 to 1."""


def chosen_form(format: str | None, accept: str | None, offers: Mapping[str, str]) -> str:
    """The name of the form to send. `offers`: media type by name, the first is the default.

    Raises `NotAcceptableError` for a `format` that is not offered, and where `accept` allows for none of them.
    """
    if format:
        if format not in offers:
            raise NotAcceptableError(
                f"format is {format!r}; allowed are {', '.join(offers)}{nearest(format, offers)}"
            ).noting(supported=dict(offers), did_you_mean=near_names(format, offers))
        return format
    ranges = parse_accept(accept)
    if not ranges:
        return next(iter(offers))
    # Of two that are liked equally, one that was named beats one that a wildcard let in; then the order of offers.
    best = max(offers, key=lambda name: _liking(offers[name], ranges))
    if _liking(offers[best], ranges)[0] <= 0:
        raise NotAcceptableError(
            f"Accept is {str(accept)[:200]!r}, which fits none of {', '.join(offers.values())}; name one "
            f"of them there, or ask for format={next(iter(offers))}"
        ).noting(supported=dict(offers))
    return best


def parse_accept(header: str | None) -> Ranges:
    """The media ranges of an `Accept` header, lower case. Parts that do not parse are left out."""
    found: Ranges = {}
    for part in (header or "").split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weight = _weight(parameters)
        if media.count("/") == 1 and weight is not None:
            found[media] = max(weight, found.get(media, 0.0))
    return found


def _weight(parameters: list[str]) -> float | None:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                return None
            return weight if 0 <= weight <= 1 else None
    return 1.0


def _liking(media: str, ranges: Ranges) -> tuple[float, int]:
    """How much the client wants a media type, and how exactly it named it; the most exact of its ranges counts."""
    kind = media.partition("/")[0]
    for exactness, wanted in ((2, media), (1, f"{kind}/*"), (0, "*/*")):
        if wanted in ranges:
            return ranges[wanted], exactness
    return 0.0, -1
