"""What a check of a store found: findings (damage), notes (what is worth knowing, and no damage), and counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_PER_FILE = 20
"""Findings reported of one file; the rest are counted. A lost shard of a million chunks must not fill the screen."""

Progress = Callable[[int, int], None]
"""Called with what is done and the whole, in journal records."""


ADVICE = re.compile(
    r"(; nothing was read in its place)?[;:,]? run `gradtap verify[^`]*`( to see [^;,]*| on the run [^;,]*)?"
)
"""What an error says to a reader of gradients, and is idle in the answer of a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing found: in which file, of which parameter and step where that is known, what, and what to do."""

    file: str
    param: str | None
    step: int | None
    what: str
    cure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a check. `checked` counts sessions, arrays, journals, records, chunks and bytes looked at."""

    path: str
    deep: bool
    findings: tuple[Damage, ...]
    notes: tuple[Damage, ...]
    checked: Mapping[str, int]

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.findings


class Findings:
    """Collects what checks find, relative to the run's folder."""

    def __init__(self, run: Path, *, deep: bool, progress: Progress | None) -> None:
        self.run, self.deep = run, deep
        self.checked: Counter[str] = Counter(sessions=0, arrays=0, journals=0, records=0, chunks=0, bytes=0)
        self._progress = progress
        self._done = self._total = 0
        self._found: list[Damage] = []
        self._notes: list[Damage] = []
        self._of_file: Counter[str] = Counter()

    def damage(self, file: Path, what: str, cure: str, *, param: str | None = None, step: int | None = None) -> None:
        """Add a finding."""
        made = self._made(file, what, cure, param, step)
        self._of_file[made.file] += 1
        if self._of_file[made.file] <= MOST_PER_FILE:
            self._found.append(made)

    def of_file(self, file: Path) -> int:
        """How many findings there are of a file so far."""
        return self._of_file[self._inside(file)]

    def note(self, file: Path, what: str, cure: str, *, step: int | None = None) -> None:
        """Add what is no damage."""
        self._notes.append(self._made(file, what, cure, None, step))

    def expect(self, records: int) -> None:
        """Say that this many more records will be looked at."""
        self._total += records

    def advance(self, records: int = 1) -> None:
        """Say that records have been looked at."""
        self._done += records
        if self._progress is not None:
            self._progress(self._done, self._total)

    def report(self) -> VerifyReport:
        """All of it."""
        more = [
            Damage(
                file=file,
                param=None,
                step=None,
                what=f"{count - MOST_PER_FILE} more findings in this file are not listed",
                cure="as above",
            )
            for file, count in self._of_file.items()
            if count > MOST_PER_FILE
        ]
        return VerifyReport(
            path=str(self.run),
            deep=self.deep,
            findings=(*self._found, *more),
            notes=tuple(self._notes),
            checked=dict(self.checked),
        )

    def _made(self, file: Path, what: str, cure: str, param: str | None, step: int | None) -> Damage:
        said = self._short(what, file, param, step)
        return Damage(file=self._inside(file), param=param, step=step, what=said, cure=cure)

    def _inside(self, file: Path) -> str:
        return str(file.relative_to(self.run) if file.is_relative_to(self.run) else file)

    def _short(self, what: str, file: Path, param: str | None, step: int | None) -> str:
        """What an error says, without the file, parameter and step that the finding names by itself."""
        said = ADVICE.sub("", what)
        said = said.replace(f"{file}: ", "").replace(f"{file} (", "(").replace(f"{file} ", "it ")
        said = said.replace(f"{self.run}/", "")
        if param is not None and step is not None:
            said = said.replace(f"; parameter {param!r}, step {step}, ", "; ")
        return re.sub(r"^\((chunk [^)]*)\)", r"\1", said)
