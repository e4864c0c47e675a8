"""Array names."""

from __future__ import annotations

import pytest

from gradtap.errors import UsageError
from gradtap.plan.naming import MAX_BYTES, array_names, encode_name, flat_name, piece_name


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("a/b\\c%d@e:f", "a%2Fb%5Cc%25d%40e%3Af"),
        ("_orig_mod.w", "%5Forig_mod.w"),
        (".hidden", "%2Ehidden"),
        ("w.", "w%2E"),
        ("w ", "w%20"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("a\nb\x7f\x85", "a%0Ab%7F%C2%85"),
        ("größe", "größe"),
        ("x\ud800", "x%ED%A0%80"),
        ("zarr.json", "%7Aarr.json"),
        ("Zarr.JSON", "%5Aarr.JSON"),
        ("", "%"),
    ],
)
def test_encode_name(name: str, array: str) -> None:
    """A name is percent-encoded just where a store or a file system would trip over it."""
    assert encode_name(name) == array


def test_encode_name_long() -> None:
    """A name over 200 bytes becomes a prefix and a hash of the true name, at most 200 bytes."""
    one, other = encode_name("ä" * 150 + "1"), encode_name("ä" * 150 + "2")
    assert len(one.encode()) <= MAX_BYTES and one != other and one.startswith("ä" * 80)
    assert encode_name("a" * MAX_BYTES) == "a" * MAX_BYTES


def test_array_names_case() -> None:
    """Names that are equal when case is folded all get a hash, whatever their order; others stay plain."""
    one = dict(zip(("W", "w", "v"), array_names(["W", "w", "v"]), strict=True))
    other = dict(zip(("v", "w", "W"), array_names(["v", "w", "W"]), strict=True))
    assert one == other
    assert one["v"] == "v" and one["W"].startswith("W~") and one["w"].startswith("w~")
    assert one["W"].casefold() != one["w"].casefold()


def test_array_names_normal_form() -> None:
    """Two spellings of one letter in Unicode do not meet on a file system that knows only one."""
    one, other = array_names(["\u00e9", "e\u0301"])
    assert one.split("~")[1] != other.split("~")[1]


def test_array_names_against_hashed() -> None:
    """A parameter that is really called like a hashed name gets a hash of its own."""
    hashed = array_names(["W", "w"])[1]
    names = array_names(["W", "w", hashed])
    assert names[1] == hashed and len({name.casefold() for name in names}) == 3


def test_array_names_twice() -> None:
    """One name for two parameters is refused and named."""
    with pytest.raises(UsageError, match="'a' is given twice"):
        array_names(["a", "b", "a"])


def test_piece_names_cannot_meet_names() -> None:
    """A parameter called like a piece is encoded, so it is not taken for one."""
    assert piece_name("w", 12) == "w@12" and flat_name("w") == "w@flat"
    assert set(array_names(["w", "w@12", "w@flat"])).isdisjoint({"w@12", "w@flat"})
