"""The picture that `gradtap watch` keeps on a terminal: the last steps, and the norm of many more as a line."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradtap.cli.news import News
from gradtap.cli.pictures import sparkline
from gradtap.cli.steps import steps_listing

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

KEPT = 1000
"""Steps whose norms the line shows, joined where there is less room."""

AROUND = 7
"""Lines of the screen that are no steps: title, norms, headings, and room for the prompt."""


class Screen:
    """Grows by news, and is drawn anew as a whole."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=KEPT)
        self._state = ""
        self._count = 0

    def add(self, news: News) -> None:
        """Take in what is new."""
        self._rows.extend(news.rows)
        self._count += len(news.rows)
        self._state = news.state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(f"{self._label}: {self._state}", style="bold", no_wrap=True, overflow="ellipsis")
        if not self._rows:
            yield Text("no complete step yet")
            return
        norms = [math.nan if row["norm"] is None else row["norm"] for row in self._rows]
        line = sparkline(norms, max(8, options.max_width - 24))
        yield Text(f"norm  {line}  {len(norms)} steps", no_wrap=True, overflow="ellipsis")
        yield Text("")
        room = max(3, (options.height or console.size.height) - AROUND)
        yield steps_listing(list(self._rows)[-room:])
