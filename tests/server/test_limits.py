"""What is refused before it is read, and that what is suggested instead really fits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtap.errors import LimitError
from gradtap.selection import Selection, parse_slice
from gradtap_server.limits import Ask, Cost, Limits, Measure, breach, check_cost, first_steps
from gradtap_server.settings import ServerSettings

MIB = 2**20
AMPLIFICATION_FROM = ServerSettings().amplification_from


def limited(**changes: int) -> Limits:
    """The limits of a server that has these settings."""
    return Limits.of(ServerSettings(**changes))


ROOMY = limited(response_bytes=2**62, read_bytes=2**62, chunks=2**62, json_elements=2**62)


def flat_chunks(elements: int, *, step_factor: int = 1) -> Measure:
    """The cost where a parameter of 4-byte elements is stored in flat chunks of so many elements."""

    def measure(where: Selection, steps: int) -> Cost:
        total = math.prod(where.source)
        touched = [(a, b) for a in range(0, total, elements) if where.touches(a, b := min(a + elements, total))]
        return Cost(
            response_bytes=where.numel * 4 * steps,
            read_bytes=sum(b - a for a, b in touched) * 4 * steps * step_factor,
            chunks=len(touched) * steps,
            elements=where.numel * steps,
        )

    return measure


def ask(shape: tuple[int, ...], text: str = "", steps: int = 0, stride: int | None = None) -> Ask:
    where = Selection.of(text, shape)
    numbers = range(10, 10 + (stride or 1) * max(steps, 1), stride or 1)
    return Ask(where=where, steps=numbers, stacked=bool(steps), stride=stride)


def refused(what: Ask, measure: Measure, limits: Limits) -> dict[str, object]:
    with pytest.raises(LimitError) as caught:
        check_cost(what, measure, limits)
    return dict(caught.value.facts)


def test_what_fits_is_let_through() -> None:
    """An answer at the very limits passes, and its cost is given back."""
    limits = limited(response_bytes=400, read_bytes=400, chunks=10, json_elements=100)
    cost = check_cost(ask((10, 10)), flat_chunks(10), limits)
    assert cost == Cost(response_bytes=400, read_bytes=400, chunks=10, elements=100)


@pytest.mark.parametrize(
    ("limits", "name", "suggested"),
    [
        (limited(response_bytes=399), "response_bytes", "0:9, :"),
        (limited(response_bytes=79), "response_bytes", "0:1, :"),
        (limited(response_bytes=39), "response_bytes", "0:1, 0:9"),
        (limited(chunks=9), "chunks", "0:9, :"),
        (limited(read_bytes=399), "read_bytes", "0:9, :"),
        (limited(json_elements=25), "json_elements", "0:2, :"),
        (limited(json_elements=1), "json_elements", "0:1, 0:1"),
    ],
)
def test_whole_rows_are_suggested(limits: Limits, name: str, suggested: str) -> None:
    """One beyond a limit, as many whole leading rows as fit are suggested; else as many elements of the first."""
    facts = refused(ask((10, 10)), flat_chunks(10), limits)
    assert facts["limit"] == name
    assert facts["suggested_slice"] == suggested.replace(" ", "")
    assert (facts["response_bytes"], facts["read_bytes"], facts["chunks"]) == (400, 400, 10)
    assert ("limit_bytes" in facts) == name.endswith("_bytes")


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("2:9:3, ::-1", "2:6:3, 9::-1"),
        ("-1, :", "9, 0:8"),
        (":, 4", "0:8, 4"),
        ("::-2, 0:4", "9:6:-2, 0:4"),
    ],
)
def test_suggestion_keeps_the_form(text: str, suggested: str) -> None:
    """Strides, directions and single indices stay; what is suggested is the beginning of what was asked for."""
    limits = limited(response_bytes=80 if "::-1" in text else 32)
    assert refused(ask((10, 10), text), flat_chunks(10), limits)["suggested_slice"] == suggested.replace(" ", "")


def test_steps_are_left_out_first() -> None:
    """Of a stack, the first steps are suggested with the slice whole; one step with a part where even one is much."""
    limits = limited(response_bytes=1200)
    facts = refused(ask((10, 10), "", 7, 5), flat_chunks(10), limits)
    assert (facts["suggested_slice"], facts["suggested_steps"]) == (":,:", "10:21:5")
    facts = refused(ask((10, 10), "", 7), flat_chunks(10), limited(response_bytes=100))
    assert (facts["suggested_slice"], facts["suggested_steps"]) == ("0:2,:", "10:11")


def test_first_steps_name_themselves() -> None:
    """The suggested range begins at the first step and ends behind the last of them, with the stride asked for."""
    assert first_steps([4, 6, 8], 2, 2) == "4:7:2"
    assert first_steps([4, 5, 9], 3, None) == "4:10"
    assert first_steps([4, 5, 9], 1, 1) == "4:5"


def test_nothing_fits() -> None:
    """Where not one element fits, nothing is suggested and the message says so."""
    with pytest.raises(LimitError, match="no part of it fits") as caught:
        check_cost(ask((10, 10)), flat_chunks(10), limited(response_bytes=3))
    assert "suggested_slice" not in caught.value.facts


def test_amplification() -> None:
    """Beyond 32 MiB no more than eight times the answer may be read; up to there, and for one chunk, any answer may."""
    small = Cost(response_bytes=4, read_bytes=AMPLIFICATION_FROM, chunks=64)
    assert breach(small, limited()) is None
    found = breach(Cost(response_bytes=4, read_bytes=AMPLIFICATION_FROM + 1, chunks=64), limited())
    assert found is not None and found.name == "amplification" and found.most == AMPLIFICATION_FROM
    assert breach(Cost(response_bytes=4, read_bytes=AMPLIFICATION_FROM + 1, chunks=1), limited()) is None
    eight = Cost(response_bytes=5 * MIB, read_bytes=40 * MIB, chunks=64)
    assert breach(eight, limited()) is None
    assert breach(Cost(response_bytes=5 * MIB - 1, read_bytes=40 * MIB, chunks=64), limited()) is not None


def test_a_column_is_cut_by_what_it_reads() -> None:
    """A column of a matrix stored by rows is refused for what it reads; the suggested part of it fits."""
    measure = flat_chunks(MIB)
    what = ask((64, MIB), ":, 0")
    facts = refused(what, measure, limited())
    assert (facts["limit"], facts["suggested_slice"]) == ("amplification", "0:8,0")
    again = Ask(where=Selection.of(str(facts["suggested_slice"]), (64, MIB)), steps=(1,), stacked=False)
    assert check_cost(again, measure, limited()).chunks == 8


@st.composite
def selections(draw: st.DrawFn) -> tuple[tuple[int, ...], str]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    bound = st.none() | st.integers(-8, 8)
    parts = []
    for length in shape:
        if length and draw(st.booleans()):
            parts.append(str(draw(st.integers(-length, length - 1))))
        else:
            step = draw(st.none() | st.sampled_from([1, 2, 3, -1, -2]))
            parts.append(":".join("" if n is None else str(n) for n in (draw(bound), draw(bound), step)))
    return shape, ",".join(parts)


@given(
    selections(),
    st.integers(0, 4),
    st.integers(1, 5),
    st.integers(1, 200),
    st.integers(1, 400),
    st.integers(1, 9),
    st.integers(1, 60),
)
def test_every_suggestion_fits(
    picked: tuple[tuple[int, ...], str], steps: int, chunk: int, response: int, read: int, chunks: int, elements: int
) -> None:
    """Whatever is refused under whatever limits: the suggestion, parsed and asked for again, is let through.

    It is a leading part of what was asked for; where none is made, even one element is too much.
    """
    shape, text = picked
    limits = limited(response_bytes=response, read_bytes=read, chunks=chunks, json_elements=elements)
    what, measure = ask(shape, text, steps), flat_chunks(chunk)
    try:
        check_cost(what, measure, limits)
        return
    except LimitError as error:
        facts = error.facts
    if "suggested_slice" not in facts:
        first = Selection(source=shape, axes=tuple(a if isinstance(a, int) else a[:1] for a in what.where.axes))
        assert breach(measure(first, 1), limits) is not None
        return
    again = Selection.of(parse_slice(facts["suggested_slice"]), shape)
    assert again.numel > 0
    kept = what.steps
    if steps:
        low, high = (int(part) for part in facts["suggested_steps"].split(":"))
        kept = [step for step in what.steps if low <= step < high]
        assert kept
    check_cost(Ask(where=again, steps=kept, stacked=bool(steps)), measure, limits)
    for mine, asked in zip(again.axes, what.where.axes, strict=True):
        if isinstance(asked, range):
            assert isinstance(mine, range) and list(mine) == list(asked[: len(mine)])
        else:
            assert mine == asked


def test_suggestion_is_cheap() -> None:
    """Finding what fits of a very large parameter looks at few selections, most of them small."""
    sizes = []

    def measure(where: Selection, steps: int) -> Cost:
        sizes.append(where.numel)
        return Cost(response_bytes=where.numel * 4, read_bytes=where.numel * 4, chunks=where.numel // 2**17 + 1)

    what = ask((2**17, 2**15))
    facts = refused(what, measure, limited())
    assert facts["suggested_slice"] == "0:512,:"
    assert len(sizes) < 40
    assert sum(size > 2**26 for size in sizes) < 12
