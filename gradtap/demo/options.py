"""What `gradtap demo` can be asked for, and the fixed facts of its training. Nothing here runs anything."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from gradtap.errors import UsageError

Engine = Literal["deepspeed", "ddp", "torch"]
ENGINES: tuple[str, ...] = get_args(Engine)
STAGES = (1, 2)
MOST_PROCESSES = 64
MOST_SEED = 2**63 - 1

ACCUMULATION = 2
"""Micro-batches in one optimizer step."""

CLIP_NORM = 1.0
"""Global norm above which the gradient is scaled down before the update."""

LEARNING_RATE = 1e-3

TOLERANCE = 1e-4
"""Largest relative L2 error of a parameter's float32 gradient at which the check holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One demo. `processes=None` means two (one for engine `torch`, which has no other way).

    Raises `UsageError` for a value that is not allowed.
    """

    store: str = "runs/demo.gradtap"
    steps: int = 30
    processes: int | None = None
    stage: int = 2
    engine: str = "deepspeed"
    seed: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        if not self.store:
            raise UsageError("the store is an empty path; give a folder such as --store runs/demo.gradtap")
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; allowed are 1 and up, such as --steps 30")
        if self.engine not in ENGINES:
            raise UsageError(f"engine is {self.engine!r}; allowed are {', '.join(ENGINES)}")
        if self.stage not in STAGES:
            raise UsageError(f"stage is {self.stage}; the demo trains with ZeRO stage 1 or 2, such as --stage 2")
        if not 0 <= self.seed <= MOST_SEED:
            raise UsageError(f"seed is {self.seed}; allowed are 0 and up, to {MOST_SEED}, such as --seed 1")
        self._refuse_processes()

    def _refuse_processes(self) -> None:
        if self.processes is None:
            return
        if not 1 <= self.processes <= MOST_PROCESSES:
            raise UsageError(f"processes is {self.processes}; allowed are 1 to {MOST_PROCESSES}, such as --processes 2")
        if self.engine == "torch" and self.processes != 1:
            raise UsageError(
                f"processes is {self.processes}; engine torch trains in 1 process; for more take "
                "--engine ddp or --engine deepspeed"
            )

    @property
    def world(self) -> int:
        """Number of training processes."""
        if self.processes is not None:
            return self.processes
        return 1 if self.engine == "torch" else 2

    @property
    def checked_steps(self) -> tuple[int, ...]:
        """The first, the middle and the last step, each once: those whose gradients are computed again."""
        return tuple(sorted({1, (self.steps + 1) // 2, self.steps}))

    def save(self, path: Path) -> None:
        """Write the options for a child process. Raises `OSError` for a path that cannot be written."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Options:
        """Options that `save` wrote. Raises `OSError` or `UsageError`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
