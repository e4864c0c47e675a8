from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from gradtap.cli.pictures import BLOCKS, HISTOGRAM_ROWS, ODD, ODD_COLOUR, RAMP, heatmap, histogram, sparkline

ROWS = ("first.weight", "second.weight")


def drawn(picture: object, width: int = 60, *, colour: bool = False) -> list[str]:
    """The lines that a picture prints."""
    screen = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    screen.print(picture)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def test_plain_heatmap_rises_with_the_logarithm() -> None:
    """Without colour the smallest value gets the lightest character and the largest the heaviest, by log10."""
    lines = drawn(heatmap([[1e-4, 1e-2, 1.0]], ["w"], [1, 2, 3]))
    assert lines[0] == f"w {RAMP[0]}{RAMP[5]}{RAMP[-1]}"


def test_colour_heatmap_uses_one_background_per_cell() -> None:
    """With colour a cell is a blank on a background, blue for low and yellow for high."""
    line = drawn(heatmap([[1e-4, 1.0]], ["w"], [1, 2]), colour=True)[0]
    assert "48;2;0;34;78" in line
    assert "48;2;254;232;56" in line


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_nonfinite_cells_have_their_own_mark(odd: float) -> None:
    """NaN and infinities never look like a value of the scale, in colour or without."""
    picture = heatmap([[1.0, odd, 2.0]], ["w"], [1, 2, 3])
    assert drawn(picture)[0][3] == ODD
    assert "48;2;" + ";".join(map(str, ODD_COLOUR)) in drawn(picture, colour=True)[0]


def test_no_color_gives_plain_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR wins over a terminal that could show colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    line = drawn(heatmap([[1e-4, math.nan, 1.0]], ["w"], [1, 2, 3]), colour=True)[0]
    assert line == f"w {RAMP[0]}{ODD}{RAMP[-1]}"


def test_heatmap_fits_its_width_and_keeps_the_largest() -> None:
    """A hundred steps in a narrow terminal are joined, no line is wider, and the one spike stays visible."""
    values = [[1.0] * 100, [1.0] * 100]
    values[1][57] = 1e3
    lines = drawn(heatmap(values, ROWS, range(100), "norms"), width=40)
    assert max(map(len, lines)) <= 40
    assert lines[0] == "norms"
    assert RAMP[-1] not in lines[1]
    assert lines[2].count(RAMP[-1]) == 1


def test_joined_columns_show_a_nan_among_them() -> None:
    """A NaN is shown even where its neighbours in the same cell are finite."""
    row = [1.0] * 100
    row[3] = math.nan
    assert drawn(heatmap([row], ["w"], range(100)), width=30)[0].count(ODD) == 1


@pytest.mark.parametrize("values", [[[0.0, 0.0]], [[math.nan, math.nan]], [[5.0, 5.0]], [[]], []])
def test_heatmap_draws_degenerate_matrices(values: list[list[float]]) -> None:
    """All-zero, all-NaN, constant and empty matrices are drawn without an error."""
    columns = range(len(values[0])) if values else ()
    assert drawn(heatmap(values, ROWS[: len(values)], columns))


def test_long_names_keep_both_ends() -> None:
    """A name wider than a third of the terminal loses its middle, not the ends that tell parameters apart."""
    line = drawn(heatmap([[1.0]], ["transformer.layers.11.attention.query.weight"], [1]), width=45)[0]
    assert line.startswith("tran")
    assert "ry.weight" in line
    assert "~" in line


def test_histogram_leaves_out_empty_bins_and_keeps_the_total() -> None:
    """Only filled bins have bars, and joining neighbours loses no count."""
    counts = [0] * 10 + [1] * 50 + [0] * 500 + [1] * 40 + [0] * 10
    lines = drawn(histogram(counts, [float(i) for i in range(611)]))
    assert len(lines) <= HISTOGRAM_ROWS
    assert lines[0].split()[0] == "8"
    assert all(int(line.split()[3]) > 0 for line in lines)
    assert sum(int(line.split()[3]) for line in lines) == 90


def test_histogram_of_nothing_says_so() -> None:
    """No finite value at all is said in words."""
    assert drawn(histogram([0, 0], [0.0, 1.0, 2.0])) == ["no finite values"]


def test_sparkline_spans_all_heights() -> None:
    """The smallest value gets the lowest block, the largest the highest, NaN its own mark."""
    line = sparkline([0.0, 1.0, math.nan])
    assert line == BLOCKS[0] + BLOCKS[-1] + ODD


def test_sparkline_is_no_longer_than_asked() -> None:
    """Many values are joined by their largest."""
    line = sparkline([0.0] * 99 + [1.0], width=10)
    assert len(line) == 10
    assert line[-1] == BLOCKS[-1]


def test_names_that_would_look_alike_get_more_room() -> None:
    """Shortened to a third of the screen they would be the same; up to half of it, they are told apart."""
    names = [f"blocks.{i}.attention.projection.{kind}.weight" for i in range(4) for kind in ("query", "key")]
    shown = [line.split()[0] for line in drawn(heatmap([[1.0, 2.0]] * len(names), names, [1, 2]), 90)[: len(names)]]
    assert len(set(shown)) == len(names) and max(map(len, shown)) <= 45
