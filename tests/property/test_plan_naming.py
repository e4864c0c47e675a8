"""Array names of any parameter names."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from gradtap.plan.naming import array_names

LETTERS = st.text(st.sampled_from("aAbBßẞéÉ_.@/\\%:~ 1\n\ud800") | st.characters(), max_size=5)
NAMES = st.lists(LETTERS | LETTERS.map(lambda text: text * 120), unique=True, max_size=12)


@given(NAMES, st.randoms(use_true_random=False))
def test_names_are_safe_and_distinct(names: list[str], random: object) -> None:
    """Names differ on any file system, are legal in Zarr, fit in 200 bytes, and do not depend on the order."""
    found = array_names(names)
    assert len({unicodedata.normalize("NFC", text.casefold()) for text in found}) == len(names)
    for text in found:
        assert 0 < len(text.encode()) <= 200 and text[0] not in "_." and text[-1] not in ". "
        assert not set(text) & set("/\\@:\n\0") and text.casefold() != "zarr.json"
    random.shuffle(shuffled := list(names))  # type: ignore[attr-defined]
    assert dict(zip(shuffled, array_names(shuffled), strict=True)) == dict(zip(names, found, strict=True))
