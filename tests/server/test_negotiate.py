"""`format=` and `Accept`: which form wins."""

from __future__ import annotations

import pytest

from gradtap.errors import NotAcceptableError
from gradtap_server.negotiate import chosen_form, parse_accept

OFFERS = {
    "raw": "application/octet-stream",
    "npy": "application/x-npy",
    "json": "application/json",
    "safetensors": "application/x-safetensors",
}

CHOICES = [
    (None, "raw"),
    ("", "raw"),
    ("*/*", "raw"),
    ("application/*", "raw"),
    ("application/json", "json"),
    ("APPLICATION/JSON", "json"),
    ("application/json; charset=utf-8", "json"),
    ("application/json, text/plain, */*", "json"),
    ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "raw"),
    ("application/x-npy;q=0.2, application/json;q=0.9", "json"),
    ("application/x-npy;q=0.9 , application/json;q=0.2", "npy"),
    ("application/octet-stream;q=0, */*", "npy"),
    ("application/octet-stream;q=0.1, application/*;q=0.5", "npy"),
    ("application/json;q=0.5, */*;q=0.5", "json"),
    ("application/json;q=0.3, application/json;q=0.8, application/x-npy;q=0.5", "json"),
    ("nonsense, application/json;q=nan, application/json;q=7, application/x-safetensors", "safetensors"),
]


@pytest.mark.parametrize(("accept", "form"), CHOICES)
def test_accept_chooses(accept: str | None, form: str) -> None:
    """The heaviest range wins, the most exact one counts for each type, a named type beats a wildcard, raw is first."""
    assert chosen_form(None, accept, OFFERS) == form


@pytest.mark.parametrize("form", OFFERS)
def test_format_beats_accept(form: str) -> None:
    """A form named in the address is sent whatever `Accept` says, even where that fits nothing."""
    assert chosen_form(form, "image/png;q=0.1", OFFERS) == form


@pytest.mark.parametrize("accept", ["text/html", "image/*", "application/json;q=0", "*/*;q=0", "*/*;q=0.0, text/csv"])
def test_nothing_fits(accept: str) -> None:
    """Where nothing fits, the error names all that is supported."""
    with pytest.raises(NotAcceptableError) as caught:
        chosen_form(None, accept, OFFERS)
    assert caught.value.facts["supported"] == OFFERS


def test_unknown_format_gives_near_names() -> None:
    """A misspelt format is answered with what there is and what may have been meant."""
    with pytest.raises(NotAcceptableError, match="did you mean npy") as caught:
        chosen_form("np", None, OFFERS)
    assert caught.value.facts["did_you_mean"][0] == "npy"
    assert caught.value.facts["supported"] == OFFERS


def test_accept_parses() -> None:
    """Weights are read, blanks and case do not matter, and broken parts are left out."""
    header = " Text/HTML ;level=1; Q=0.25 ,*/* ; q=.5,,;q=1, a/b/c, image/png;q=x"
    assert parse_accept(header) == {"text/html": 0.25, "*/*": 0.5}
