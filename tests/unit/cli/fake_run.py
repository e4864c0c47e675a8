"""A run that lies in memory: what the verbs ask of `gradtap.read.Run`, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gradtap.errors import ParamNotFoundError, StepNotFoundError, nearest
from gradtap.flags import names_of
from gradtap.read.info import RunInfo
from gradtap.read.norms import Norms
from gradtap.read.session import SessionView
from gradtap.selection import Selection
from gradtap.types import ArrayPlan, GradSlice, ParamSpec, SessionPlan

PARAMS = (
    ParamSpec(name="embed.weight", shape=(3, 4), dtype="bfloat16"),
    ParamSpec(name="layers.0.weight", shape=(2, 5), dtype="float32"),
    ParamSpec(name="layers.0.frozen", shape=(2,), dtype="float32", status="frozen"),
    ParamSpec(name="temperature", shape=(), dtype="float32"),
)


def session(**changes: Any) -> SessionView:
    """A closed session of two processes."""
    facts: dict[str, Any] = {
        "name": "0000", "state": "closed", "engine": "deepspeed-zero2", "world": 2, "groups": 1, "settings": {},
        "codec": "exact", "summary": "full", "created": 1.7e9, "closed": 1.7e9 + 60, "captures": 3, "incomplete": 1,
        "first_step": 1, "versions": {},
    }  # fmt: skip
    return SessionView(**facts | changes)


def array(name: str, param: int, start: int, stop: int) -> ArrayPlan:
    """A one-dimensional piece in one chunk."""
    length = stop - start
    return ArrayPlan(
        name=name, param=param, start=start, stop=stop, shape=(length,), dtype="float32", time=4, shard=(length,),
        chunk=(length,), owners=(0,),
    )  # fmt: skip


class FakeLedger:
    """Columns of five steps: 1 to 3 and 5 complete, 4 dropped."""

    def __init__(self) -> None:
        self.steps = (1, 2, 3, 4, 5)
        self._columns: dict[str, list[Any]] = {
            "session": ["0000"] * 5,
            "capture": [0, 1, 2, 3, 4],
            "record": ["committed", "committed", "committed", "dropped", "committed"],
            "time": [1.7e9 + i for i in range(5)],
            "raw_bytes": [4096] * 5,
            "stored_bytes": [2048] * 5,
            "state": ["applied", "skipped-overflow", "applied", "applied", "unknown"],
            "norm": [1.5, math.nan, 0.25, 0.5, 2.0],
            "flags": [0, 64, 0, 0, 9],
        }

    def __getitem__(self, name: str) -> Any:
        return np.array(self._columns[name])

    def __contains__(self, name: str) -> bool:
        return name in self._columns


class FakeRun:
    """Three stored parameters, four complete steps."""

    def __init__(self, path: str = "runs/fake.gradtap", *, steps: Sequence[int] = (1, 2, 3, 5)) -> None:
        self.path = Path(path)
        self.steps = tuple(steps)
        self.params = PARAMS
        self.sessions = (session(),)
        self.ledger = FakeLedger()
        self.damaged: dict[str, str] = {}
        self.out: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        """Of the run."""
        return "ab" * 16

    @property
    def plan(self) -> SessionPlan:
        """Arrays of the stored parameters: the first is cut in two."""
        arrays = (
            array("embed.weight@0", 0, 0, 5),
            array("embed.weight@5", 0, 5, 12),
            array("layers.0.weight", 1, 0, 10),
            array("temperature", 3, 0, 1),
        )
        return SessionPlan(world=2, params=PARAMS, arrays=arrays)

    def close(self) -> None:
        """Holds nothing."""

    def request(
        self, name: str, step: int, *, slice: str | None, attempt: int | None, partial: bool
    ) -> SimpleNamespace:
        """Reads as `grad` does, when it is told to."""
        return SimpleNamespace(read=lambda progress=None: self.grad(name, step, slice=slice, attempt=attempt))

    def info(self) -> RunInfo:
        """Facts that fit the rest."""
        return RunInfo(
            path=self.path, name="fake", id="ab" * 16, tags={}, gradtap="0.1.0", sessions=self.sessions,
            steps=len(self.steps), first_step=min(self.steps, default=None), last_step=max(self.steps, default=None),
            params=3, frozen=1, unoptimized=0, not_selected=len(self.out), elements=23,
            raw_bytes=3000 if self.steps else 0, stored_bytes=1500 if self.steps else 0, index_bytes=20, other_bytes=10,
        )  # fmt: skip

    def left_out(self, step: int | None = None) -> frozenset[str]:
        """What a test says that the selection leaves out."""
        return self.out

    def attempts(self, step: int) -> tuple[int, ...]:
        """Step 2 was recorded twice."""
        return (1, 2) if step == 2 else (1,)

    def attempt_counts(self, steps: Sequence[int]) -> list[int]:
        """How often each was recorded; 0 for those that are not complete."""
        return [len(self.attempts(step)) if step in self.steps else 0 for step in steps]

    def tags_of(self, step: int) -> dict[str, Any]:
        """Step 3 has a loss."""
        return {"loss": 0.5} if step == 3 else {}

    def norms(self, match: Sequence[str], steps: Sequence[int]) -> Norms:
        """Norms 1, 2, 3 in model order."""
        self._there(steps[0])
        values = np.arange(1.0, len(match) + 1).reshape(-1, 1)
        return Norms(stat="l2", params=tuple(match), steps=tuple(steps), values=values)

    def grad(self, name: str, step: int, *, slice: str | None, attempt: int | None = None) -> GradSlice:
        """Elements 0, -1, 2, -3 ... of a parameter."""
        self._there(step)
        spec = next((p for p in PARAMS if p.name == name), None)
        if spec is None:
            raise ParamNotFoundError(f"no parameter {name!r}{nearest(name, [p.name for p in PARAMS])}")
        count = np.arange(spec.numel, dtype=np.float32)
        values = (count * np.where(count % 2, -1, 1)).astype(np.float32).reshape(spec.shape)
        return GradSlice(
            values=values[Selection.of(slice, spec.shape).key] if slice else values, name=name, steps=(step,),
            attempts=(attempt or 1,), dtype_captured=spec.dtype, complete=True, flags=names_of(8), factor=(0.5,),
        )  # fmt: skip

    def _there(self, step: int) -> None:
        if step not in self.steps:
            raise StepNotFoundError(f"no step {step}; the nearest are 3 and 5")
