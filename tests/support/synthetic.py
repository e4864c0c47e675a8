"""A real store without torch: one recorder for each rank in this process, fed with gradients that can be recomputed."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.config import Settings
from gradtap.encode.widen import restore
from gradtap.flags import UNTOUCHED
from gradtap.plan.chunks import rank_pieces
from gradtap.plan.planner import plan_session
from gradtap.plan.schedule import parse_rule
from gradtap.store.lock import LOCK_NAME, RunLock
from gradtap.store.paths import SessionPaths
from gradtap.store.recorder import RankRecorder
from gradtap.store.runfile import add_session, create_run
from gradtap.store.session import create_session
from gradtap.types import EngineFacts, Ownership, ParamSpec, SessionPlan, StagedPiece, StepFacts, StepOutcome

Array = NDArray[Any]

SMALL = Settings(
    capacity=4, max_time=4, shard_bytes=2**20, chunk_bytes=2**9, follow_interval=0.01, fsync="none", close_timeout=20.0
)
"""Everything small, so that a few steps cross every boundary: shards, growth, chunks within a parameter."""

NEVER = replace(SMALL, follow_interval=3600.0)
"""As SMALL, but nothing is published before the session is closed."""


def spec(name: str, *shape: int, **more: Any) -> ParamSpec:
    """A parameter of float32 unless said otherwise."""
    return ParamSpec(**({"name": name, "shape": shape, "dtype": "float32"} | more))


MODEL = (
    spec("embed.weight", 37, 13, aliases=("head.weight",)),
    spec("norm.scale"),
    spec("conv.weight", 5, 3, 2, 4),
    spec("frozen.bias", 11, status="frozen"),
    spec("loose.bias", 3, status="unoptimized"),
    spec("nothing", 0, 4),
    spec("mlp.weight", 29, 17),
    spec("mlp.bias", 29),
)
"""Odd sizes, a scalar, four dimensions, a tied weight, and one of each kind without gradients."""


def owners(kind: str, params: Sequence[ParamSpec], world: int) -> tuple[Ownership | None, ...]:
    """Ownership of one kind for all stored parameters; "cuts" is one flat buffer cut in equal parts, as ZeRO does."""
    ranks = tuple(range(world))
    if kind == "cuts":
        return tuple(_zero_cuts(params, world))
    made = {
        "whole": lambda i: Ownership(kind="whole", ranks=(i % world,)),
        "replicated": lambda i: Ownership(kind="replicated", ranks=ranks),
        "rows": lambda i: Ownership(kind="rows", ranks=ranks),
        "flat": lambda i: Ownership(kind="flat", ranks=ranks),
    }[kind]
    # A scalar has no rows to share.
    return tuple(
        None if not p.stored else made(i) if p.shape else Ownership(kind="whole", ranks=(0,))
        for i, p in enumerate(params)
    )


def _zero_cuts(params: Sequence[ParamSpec], world: int) -> Iterator[Ownership | None]:
    total = sum(p.numel for p in params if p.stored)
    share = -(-total // world)
    at = 0
    for p in params:
        if not p.stored:
            yield None
            continue
        inner = [b - at for b in range(share, total, share) if at < b < at + p.numel]
        bounds = (0, *inner, p.numel)
        first = at // share
        yield Ownership(kind="cuts", ranks=tuple(range(first, first + len(bounds) - 1)), bounds=bounds)
        at += p.numel


@dataclass(kw_only=True)
class Job:
    """One session being written: `step` for each update, then `close` or `kill`."""

    run: Path
    params: tuple[ParamSpec, ...] = MODEL
    kind: str = "cuts"
    world: int = 3
    settings: Settings = SMALL
    every: Any = 1
    seed: int = 0
    k: int = 0
    codec: str = "exact"
    summary: str = "full"
    groups: int = 2
    engine: str = "synthetic"
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    plan: SessionPlan = field(init=False)
    paths: SessionPaths = field(init=False)
    recorders: list[RankRecorder] = field(init=False)
    reports: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        ownership = owners(self.kind, self.params, self.world)
        self.plan = plan_session(self.params, ownership, world=self.world, settings=self.settings)
        nonce = secrets.token_hex(16)
        self.run.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock.acquire(self.run, nonce, stale_after=60)
        create_run(self.run)
        engine = EngineFacts(
            name=self.engine,
            rank=0,
            world=self.world,
            groups=self.groups,
            settings={"kind": self.kind, **self.engine_settings},
        )
        self.paths = create_session(
            self.run,
            plan=self.plan,
            engine=engine,
            nonce=nonce,
            codec=self.codec,
            summary=self.summary,
            settings=self.settings,
        )
        add_session(self.run, self.paths.name)
        rule = parse_rule(self.every)
        self.recorders = [
            RankRecorder(
                self.paths,
                rank,
                rule=rule,
                settings=self.settings,
                report=self.reports.append,
                lock=self._lock if rank == 0 else None,
            )
            for rank in range(self.world)
        ]
        for recorder in self.recorders:
            recorder.start()

    def gradient(self, param: int, step: int) -> Array:
        """What the engine holds: 1-D, in the captured dtype (bfloat16 as its bits), still times 2**k."""
        p = self.params[param]
        values = np.random.default_rng([self.seed, step, param]).standard_normal(p.numel) * 2.0**self.k
        if p.dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(p.dtype)

    def expected(self, name: str, step: int) -> Array:
        """What a reader must give for it."""
        at = [p.name for p in self.params].index(name)
        p = self.params[at]
        values, _ = restore(self.gradient(at, step), p.dtype, self.k)
        return values.reshape(p.shape)

    def step(
        self,
        step: int,
        *,
        dropped: Collection[int] = (),
        absent: Collection[int] = (),
        select: Collection[str] | None = None,
        untouched: Collection[str] | Mapping[int, Collection[str]] = (),
        outcome: bool = True,
        ended: Mapping[str, Any] = MappingProxyType({}),
        **facts: Any,
    ) -> None:
        """One update on all ranks. `absent` ranks never get there; `select` captures these parameters alone.

        `ended`: fields of the outcome that are not those of an update that was applied and not clipped.
        `untouched`: parameters that no backward reached, or by rank those that its own backward did not reach.
        """
        wanted = None
        if select is not None:
            wanted = frozenset(i for i, p in enumerate(self.params) if p.name in select and p.stored)
        for rank, recorder in enumerate(self.recorders):
            if rank in absent:
                continue
            mine = untouched.get(rank, ()) if isinstance(untouched, Mapping) else untouched
            made = self._facts(step, mine, facts)
            recorder.begin(made, capture=True, wanted=wanted)
            for piece in rank_pieces(self.plan, rank):
                if rank not in dropped and (wanted is None or piece.param in wanted):
                    values = self.gradient(piece.param, step)[piece.start : piece.stop]
                    recorder.piece(
                        StagedPiece(param=piece.param, start=piece.start, stop=piece.stop, values=values), _nothing
                    )
            recorder.end(step, dropped=rank in dropped, seconds=0.25, wait_seconds=0.0)
            if outcome:
                plain = {"state": "applied", "norm_engine": float("nan"), "clip_coef": 1.0}
                recorder.outcome(step, StepOutcome(**(plain | ended)))

    def steps(self, steps: Iterable[int], **more: Any) -> Job:
        """Several updates; itself."""
        for step in steps:
            self.step(step, **more)
        return self

    def flush(self) -> None:
        """Wait until all ranks have written what they were given."""
        for recorder in self.recorders:
            done = threading.Event()
            recorder._put(lambda _, done=done: done.set(), None)
            assert done.wait(30), "a recorder hangs"

    def close(self) -> None:
        """End in order: all ranks, rank 0 last, then the lock."""
        for recorder in reversed(self.recorders):
            recorder.close(self.settings.close_timeout)
        self._lock.release()

    def kill(self) -> None:
        """Stop as a killed job does: what was journaled stays, nothing is closed, the lock names a dead process."""
        self.flush()
        for recorder in self.recorders:
            recorder._commands.put(None)
            recorder._thread.join()
        follower = self.recorders[0]._follower
        assert follower is not None
        follower._stop.set()
        follower._thread.join()
        lock = self.run / LOCK_NAME
        lock.write_text(json.dumps(json.loads(lock.read_text()) | {"start": 1}))

    def wait_published(self, captures: int, timeout: float = 20.0) -> None:
        """Wait until rank 0 has published that many complete captures."""
        from gradtap.store.row_specs import STEP_PATH, by_path, merged_specs
        from gradtap.store.rows import read_rows
        from gradtap.store.session import read_head

        rows = by_path(merged_specs(read_head(self.paths).layout))[STEP_PATH]
        deadline = time.monotonic() + timeout
        while np.count_nonzero(read_rows(self.paths.zarr, rows, 0, 4096) >= 0) < captures:
            assert time.monotonic() < deadline, f"{captures} captures were never published: {self.reports}"
            time.sleep(0.01)

    def _facts(self, step: int, untouched: Collection[str], more: dict[str, Any]) -> StepFacts:
        touched = np.array([-1 if p.name in untouched or not p.stored else 0 for p in self.params], np.int32)
        plain = {
            "step": step,
            "time": 1.0e9 + step,
            "k": self.k,
            "factor": 1.0,
            "loss_scale": 2.0**self.k,
            "micro_seen": 2,
            "accum_engine": 2,
            "accum_loop": 2,
            "divisor": 2.0,
            "clip_limit": 1.0,
            "learning_rates": tuple(0.1 * (i + 1) for i in range(self.groups)),
            "touched": touched,
            "flags": UNTOUCHED if untouched else 0,
        }
        return StepFacts(**(plain | more))


def _nothing() -> None:
    """The memory of a staged piece is not reused here."""
