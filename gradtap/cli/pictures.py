"""Pictures for a terminal: a heat map of parameters x steps, a histogram, a sparkline.

They fit the width they are given, and fall back from colour to plain characters where there is no colour.
No data is read here, and nothing is counted: a picture gets numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

RAMP = " .:-=+*#%@"
"""Low to high where there is no colour; ten levels that differ by ink."""

COLOURS = ((0, 34, 78), (87, 93, 109), (165, 156, 116), (254, 232, 56))
"""Low to high from blue to yellow: even in lightness, and told apart with any common colour blindness."""

ODD_COLOUR = (204, 51, 119)
"""NaN, infinite or missing: a hue that the scale never has."""

ODD = "!"
"""NaN, infinite or missing where there is no colour."""

BLOCKS = "▁▂▃▄▅▆▇█"
"""Eight heights of one character, for sparklines."""

BAR_WIDTH = 40
"""Columns of the longest bar; with its label it fits the narrowest usual terminal."""

HISTOGRAM_ROWS = 24
"""Most rows of a histogram: one screen with its header."""


@dataclass(frozen=True, slots=True)
class Heatmap:
    """A matrix of non-negative numbers, one text cell each: log10 of the value gives the colour.

    `values[i][j]` belongs to `rows[i]` (from the top) and `columns[j]`. Wider than the terminal, neighbouring
    columns are joined by their largest value, and a NaN among them is shown rather than hidden.
    """

    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        colour = console.color_system is not None and not console.no_color
        label = _label_width(self.rows, options.max_width)
        room = max(1, options.max_width - label - 1)
        binned = [_joined(row, room) for row in self.values]
        low, high = _log_range(binned)
        if self.title:
            yield Text(self.title, style="bold")
        for name, row in zip(self.rows, binned, strict=True):
            line = Text(f"{_shortened(name, label):<{label}} ")
            for value in row:
                _add_cell(line, value, low, high, colour)
            line.no_wrap = True
            yield line
        width = max(map(len, binned), default=0)
        yield from self._legend(label, width, low, high, colour)

    def _legend(self, label: int, width: int, low: float, high: float, colour: bool) -> Iterator[Text]:
        from rich.text import Text

        if self.columns:
            first, last = str(self.columns[0]), str(self.columns[-1])
            yield Text(" " * (label + 1) + first + last.rjust(width - len(first)) if width > len(first) else first)
        scale = Text(f"10^{low:.1f} ")
        for i in range(10):
            _add_cell(scale, 10 ** (low + (high - low) * i / 9), low, high, colour)
        scale.append(f" 10^{high:.1f}   ")
        _add_cell(scale, math.nan, low, high, colour)
        scale.append(" NaN, infinite or missing")
        if len(self.columns) > width:
            scale.append(f"   each cell: largest of up to {-(-len(self.columns) // width)} steps")
        yield scale


def heatmap(values: Any, rows: Sequence[str], columns: Sequence[Any], title: str = "") -> Heatmap:
    """A heat map of a matrix (array or nested sequence, rows x columns of non-negative numbers), to print with rich."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return Heatmap(plain, tuple(map(str, rows)), tuple(map(str, columns)), title)


def histogram(counts: Sequence[int], edges: Sequence[float], zero: int | None = None) -> RenderableType:
    """Bars of `counts[i]` for `edges[i]` to `edges[i + 1]`: empty bins left out, as many neighbours joined as must be.

    Bin `zero` is that of the value 0 alone and is joined with none.
    """
    from rich.bar import Bar
    from rich.table import Table

    rows = _bins(counts, edges, zero)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    largest = max((count for count, _ in rows), default=0)
    for count, label in rows:
        grid.add_row(label, str(count), Bar(largest, 0, count, width=BAR_WIDTH))
    return grid if rows else "no finite values"


def histogram_title(counts: Sequence[int], zero: int) -> str:
    """What a row of the histogram of powers of two spans, after joining."""
    power = 2 ** _joining(counts, zero)
    return "values by sign and magnitude, a row for each " + ("power of two" if power == 2 else f"factor of {power}")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """One line of eight heights, linear from the smallest to the largest value; `!` for NaN and infinities."""
    joined = _joined(values, width)
    finite = [value for value in joined if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    steps = len(BLOCKS) - 1
    return "".join(
        BLOCKS[round((value - low) / (high - low) * steps) if high > low else steps // 2]
        if math.isfinite(value)
        else ODD
        for value in joined
    )


def _joined(row: Sequence[float], room: int) -> list[float]:
    """At most `room` values: the largest of each group of neighbours, or NaN where the group has one."""
    group = max(1, -(-len(row) // room))
    parts = [row[i : i + group] for i in range(0, len(row), group)]
    return [math.nan if any(math.isnan(value) for value in part) else max(part) for part in parts]


def _log_range(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    logs = [math.log10(value) for row in rows for value in row if math.isfinite(value) and value > 0]
    low, high = min(logs, default=0.0), max(logs, default=0.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _add_cell(line: Text, value: float, low: float, high: float, colour: bool) -> None:
    if not math.isfinite(value):
        line.append(" " if colour else ODD, style=f"on rgb({_rgb(ODD_COLOUR)})" if colour else "")
        return
    level = min(1.0, max(0.0, (math.log10(value) - low) / (high - low))) if value > 0 else 0.0
    if colour:
        line.append(" ", style=f"on rgb({_rgb(_blend(level))})")
    else:
        line.append(RAMP[min(int(level * len(RAMP)), len(RAMP) - 1)])


def _blend(level: float) -> tuple[int, int, int]:
    spot = level * (len(COLOURS) - 1)
    left = min(int(spot), len(COLOURS) - 2)
    red, green, blue = (
        round(a + (b - a) * (spot - left)) for a, b in zip(COLOURS[left], COLOURS[left + 1], strict=True)
    )
    return red, green, blue


def _rgb(colour: tuple[int, int, int]) -> str:
    return ",".join(map(str, colour))


def _label_width(names: Sequence[str], room: int) -> int:
    """Columns for the names: a third of the room, more where shortened names would be alike, half at the most."""
    longest = max(map(len, names), default=0)
    width = min(longest, max(8, room // 3))
    while width < min(longest, room // 2) and len({_shortened(name, width) for name in names}) < len(set(names)):
        width += 1
    return width


def _shortened(name: str, width: int) -> str:
    """The name, with its middle left out when it is too long: both ends tell parameters apart."""
    if len(name) <= width:
        return name
    tail = (width - 1) * 2 // 3
    return f"{name[: width - 1 - tail]}~{name[len(name) - tail :]}"


def _bins(counts: Sequence[int], edges: Sequence[float], zero: int | None) -> list[tuple[int, str]]:
    """Sum and label of each row."""
    size = _joining(counts, zero)
    parts: dict[tuple[int, int], list[int]] = {}
    for i in range(len(counts)):
        parts.setdefault(_row(i, zero, size), []).append(i)
    rows = []
    for side, part in ((key[0], part) for key, part in sorted(parts.items())):
        if count := sum(counts[i] for i in part):
            label = "0" if zero is not None and side == 0 else f"{edges[part[0]]:.2g} .. {edges[part[-1] + 1]:.2g}"
            rows.append((int(count), label))
    return rows


def _joining(counts: Sequence[int], zero: int | None) -> int:
    """The fewest bins a row must span so that the rows fit one screen."""
    filled = [i for i, count in enumerate(counts) if count]
    size = 1
    while len({_row(i, zero, size) for i in filled}) > HISTOGRAM_ROWS:
        size += 1
    return size


def _row(i: int, zero: int | None, size: int) -> tuple[int, int]:
    """Side of zero and place of a bin; either side is counted from zero, so that both have the same bounds."""
    if zero is None:
        return 0, i // size
    side = (i > zero) - (i < zero)
    return side, side * ((abs(i - zero) - 1) // size) if side else 0
