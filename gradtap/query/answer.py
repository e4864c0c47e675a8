"""One answer to one question: single facts, and rows of one name. JSON of it is the same wherever it was asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a query has to say. `facts` are the single values, `rows` the repeated ones, under `rows_name` in JSON.

    Values are plain: numbers, text, None, lists and mappings of them; NaN and infinities are allowed here.
    """

    query: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    rows_name: str = ""

    @property
    def schema(self) -> str:
        """Name and version of the form: `gradtap.<query>/1`."""
        return f"gradtap.{self.query}/1"

    def body(self) -> dict[str, Any]:
        """The one JSON object: the schema, the facts, the rows. NaN and infinities as in `plain`."""
        rows = {self.rows_name: self.rows} if self.rows_name else {}
        return plain({"schema": self.schema, **self.facts, **rows})


def plain(body: Mapping[str, Any]) -> dict[str, Any]:
    """The object as JSON takes it: NaN and infinities, which JSON lacks, are null and counted under "nonfinite"."""
    lost: Counter[str] = Counter()
    made: dict[str, Any] = _plain(body, lost)
    if lost:
        made["nonfinite"] = {name: lost[name] for name in ("nan", "posinf", "neginf")}
    return made


def _plain(value: Any, lost: Counter[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, lost) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item, lost) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        lost["nan" if math.isnan(value) else "posinf" if value > 0 else "neginf"] += 1
        return None
    return value
