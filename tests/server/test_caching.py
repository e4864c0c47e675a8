"""Entity tags and what a cache is told."""

from __future__ import annotations

import itertools

import pytest
from starlette.requests import Request

from gradtap_server.caching import Freshness, known, tag_of, unchanged

TAG = '"abc"'

NAMED = ["*", " * ", '"abc"', 'W/"abc"', '"x", "abc"', '"x",W/"abc" , "y"', '"a,b", "abc"', '"x" , , "abc"']
NOT_NAMED = [None, "", "abc", '"ab"', '"abc', 'W/"x"', '"ABC"', '"x,abc,y"', '"*"', 'w"abc', "W/*"]
NOT_NAMED += [
    '"abc"garbage',
    'W/ "abc"',
    'x"abc"',
    '"abc" "y"',
    '"abc", y',
    'w/"abc"',
    '*, "abc"',
    '"abc"' + " " * 60_000 + "x",
]


@pytest.mark.parametrize("header", NAMED)
def test_tag_is_named(header: str) -> None:
    """A list, a weak form, blanks and the star all name an answer that the client has."""
    assert known(TAG, header)


@pytest.mark.parametrize("header", NOT_NAMED)
def test_tag_is_not_named(header: str | None) -> None:
    """Another tag, another case, an unquoted or a broken one name nothing."""
    assert not known(TAG, header)


def test_tags_differ_with_any_identifier() -> None:
    """Two answers share a tag only where all identifiers are equal, also where their texts run together alike."""
    made = [("a", "b"), ("ab",), ("ab", ""), ("", "ab"), ("a", "b", None), ("a", ("b",)), ("a", 1), ("a", "1")]
    tags = [tag_of(*identifiers) for identifiers in made]
    assert all(one != other for one, other in itertools.combinations(tags, 2))
    assert tag_of("a", ("b", 2)) == tag_of("a", ("b", 2))
    assert tags[0].startswith('"') and tags[0].endswith('"') and not tags[0].startswith("W/")


def request(*if_none_match: str) -> Request:
    headers = [(b"if-none-match", value.encode()) for value in if_none_match]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": headers})


def test_unchanged_needs_a_tag() -> None:
    """A 304 is made only for a client that names the tag, in one header or in several."""
    fresh = Freshness(tag=TAG)
    assert unchanged(request(), fresh) is None
    assert unchanged(request('"other"'), fresh) is None
    answer = unchanged(request('"other"', 'W/"abc"'), fresh)
    assert answer is not None and answer.status_code == 304 and answer.body == b""
    assert answer.headers["etag"] == TAG
    assert "content-length" not in answer.headers


@pytest.mark.parametrize(
    ("fresh", "control"),
    [
        (Freshness(tag=TAG), "no-cache"),
        (Freshness(tag=TAG, shared=False), "no-cache, private"),
        (Freshness(tag=TAG, settled=True), "public, max-age=31536000, immutable"),
        (Freshness(tag=TAG, settled=True, shared=False), "private, max-age=31536000, immutable"),
    ],
)
def test_cache_control(fresh: Freshness, control: str) -> None:
    """What is settled may be kept for good, the rest must be asked about; with a token by the client's cache alone."""
    headers = fresh.headers()
    assert headers["Cache-Control"] == control
    assert headers["ETag"] == TAG and headers["Vary"] == "Accept"
    assert "Content-Location" not in headers


def test_location_is_sent() -> None:
    """The lasting address of an answer goes with it, and with the 304 in its place."""
    fresh = Freshness(tag=TAG, location="/api/v1/x?attempt=1")
    assert fresh.headers()["Content-Location"] == "/api/v1/x?attempt=1"
    answer = unchanged(request(TAG), fresh)
    assert answer is not None and answer.headers["content-location"] == "/api/v1/x?attempt=1"
