"""What a loop changes after attach that the session's plan cannot follow: said, or refused. Knows no engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gradtap.capture.names import NamedParam, dtype_name
from gradtap.errors import UnsupportedError
from gradtap.types import ParamSpec

logger = logging.getLogger("gradtap")

_CURE = "close the recorder and attach again to record them too, in a new session"


class ChangeWatch:
    """Compares the parameters at a step boundary with those at attach. Each kind of change is said once.

    `groups` gives the optimizer's parameter groups as they are now.
    """

    def __init__(
        self, named: Sequence[NamedParam], specs: Sequence[ParamSpec], groups: Callable[[], Sequence[dict[str, Any]]]
    ) -> None:
        self._frozen = [entry for entry, spec in zip(named, specs, strict=True) if spec.status == "frozen"]
        self._stored = [(entry, entry.param.dtype) for entry, spec in zip(named, specs, strict=True) if spec.stored]
        self._groups = groups
        self._held = self._count()
        self._said: set[str] = set()

    def look(self, step: int) -> None:
        """Warn of what is not recorded from here on.

        Raises `UnsupportedError` where a recorded parameter was cast: its gradient no longer fits the session's arrays.
        """
        added = self._count() - self._held
        if added > 0:
            self._say("parameters added to the optimizer after attach", str(added), step)
        thawed = [entry.name for entry in self._frozen if entry.param.requires_grad]
        if thawed:
            self._say("parameters frozen at attach and trainable now", f"{len(thawed)}: {_first(thawed)}", step)
        for entry, dtype in self._stored:
            if entry.param.dtype != dtype:
                raise UnsupportedError(
                    f"parameter {entry.name} is {dtype_name(entry.param.dtype)} and was {dtype_name(dtype)} at attach; "
                    "a session stores one dtype: cast the model before attach, or close the recorder and attach again"
                )

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._groups())

    def _say(self, what: str, which: str, step: int) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("gradtap: not recorded: %s (%s; seen first at step %d); %s", what, which, step, _CURE)


def learning_rates(groups: Sequence[dict[str, Any]], count: int) -> tuple[float, ...]:
    """The rates of the first `count` groups, as many as the session was set up with; NaN for one that is gone."""
    rates = [float(group.get("lr", float("nan"))) for group in groups[:count]]
    return (*rates, *[float("nan")] * (count - len(rates)))


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
