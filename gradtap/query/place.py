"""What can be asked of a run wherever it lies: `LocalPlace` asks its files, `RemotePlace` a server. Same answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gradtap.query.answer import Answer
from gradtap.query.formats import Payload
from gradtap.types import GradSlice

Progress = Callable[[int, int], None]


class Place(Protocol):
    """One run. Steps are words: a number, `first` or `last`; ranges of steps are `A:B:C`, each part optional.

    Every method raises the errors of `gradtap.errors` that the query itself raises, from a server too.
    """

    @property
    def label(self) -> str:
        """How messages call it: the folder, or the address."""

    def notices(self) -> list[str]:
        """What a user must know before any answer: sessions that do not read."""

    def info(self) -> Answer:
        """State, engine, sessions, steps, parameters, bytes."""

    def params(self, match: str = "", *, step: str = "last") -> Answer:
        """One row for each parameter that matches, in the model's order, with its norm at a step."""

    def steps(self, within: str = "", *, tags: bool = False) -> Answer:
        """One row for each step of a range that the ledger has, captured or not."""

    def step(self, step: str, *, attempt: int | None = None, match: str = "") -> Answer:
        """All that is known of one step, and one row of stored statistics for each parameter."""

    def norms(self, match: str = "", *, steps: str = "", stat: str = "l2") -> Answer:
        """Parameter x step matrix of a stored statistic: a row for each parameter."""

    def audit(self) -> Answer:
        """Faults of the training loop that the ledger shows: a row for each finding."""

    def hist(
        self,
        param: str,
        step: str,
        *,
        slice: str = "",
        bins: int | None = None,
        scale: str = "log2",
        attempt: int | None = None,
    ) -> Answer:
        """The histogram of a gradient: the stored one, or counted anew from the values of a slice."""

    def grad(
        self,
        param: str,
        step: str,
        *,
        slice: str = "",
        attempt: int | None = None,
        partial: bool = False,
        as_consumed: bool = False,
        progress: Progress | None = None,
    ) -> GradSlice:
        """The gradient or a slice of it; stacked over a new leading axis where `step` is a range.

        `progress` is called with what is done and the whole, in a unit of the place's own.
        """

    def payload(
        self,
        param: str,
        step: str,
        *,
        slice: str = "",
        attempt: int | None = None,
        partial: bool = False,
        as_consumed: bool = False,
        format: str = "npy",
        dtype: str = "stored",
        progress: Progress | None = None,
    ) -> Payload:
        """The same as bytes of a file format."""

    def close(self) -> None:
        """Let go of files or connections."""
