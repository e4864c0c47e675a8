"""The background thread of one rank: everything that happens after a gradient is in host memory.

The training thread only puts commands into a queue; their order is the order of the disk. What bounds memory is the
pool of host buffers: each goes back through `done` as soon as its piece is encoded, or has failed.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradtap.config import Settings
from gradtap.errors import CaptureError
from gradtap.plan.rules import Rule
from gradtap.plan.schedule import Schedule
from gradtap.store.capture_writer import CaptureWriter
from gradtap.store.follower import Follower
from gradtap.store.lock import RunLock
from gradtap.store.numbering import Numbering
from gradtap.store.paths import SessionPaths
from gradtap.store.session import read_head
from gradtap.types import Report, StagedPiece, StepFacts, StepOutcome

Command = Callable[[CaptureWriter], None]


class RankRecorder:
    """Records what one rank owns. All methods but `close` return at once.

    `rule` and `select` (names of parameters, None for all) go into the schedule log, which rank 0 begins.
    `report(message)` is called once for each kind of failure, from the background thread. With `raise_errors`, the
    first failure is raised as `CaptureError` from the next `begin` or from `close`. `on_end(reason)` is called when the
    background thread ends, however it does: nobody gives buffers back after that.
    """

    def __init__(
        self,
        paths: SessionPaths,
        rank: int,
        *,
        rule: Rule,
        settings: Settings,
        report: Report,
        select: Sequence[str] | None = None,
        raise_errors: bool = False,
        lock: RunLock | None = None,
        on_end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._paths, self._rank, self._report = paths, rank, report
        self._raise_errors, self._on_end = raise_errors, on_end
        head = read_head(paths)
        self._numbering = Numbering(paths, rank=rank, rule=rule, select=select, timeout=settings.attach_timeout)
        share = settings if rank else replace(settings, open_files=max(1, settings.open_files // 2))
        self._writer = CaptureWriter(paths, head, rank, settings=share, numbering=self._numbering)
        self._follower = Follower(paths, head, settings=share, report=report, lock=lock) if rank == 0 else None
        self._commands: queue.SimpleQueue[tuple[Command, int | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"gradtap-recorder-{rank}", daemon=True)
        self._seen: set[str] = set()
        self._error: Exception | None = None
        self._step: int | None = None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule as last read by the background thread; None before the first step."""
        return self._numbering.schedule

    @property
    def committed(self) -> int:
        """Captures that this rank has committed so far."""
        return self._writer.committed

    def start(self) -> None:
        """Start the background thread, and on rank 0 the one that publishes complete captures."""
        self._thread.start()
        if self._follower is not None:
            self._follower.start()

    def begin(self, facts: StepFacts, *, capture: bool, wanted: frozenset[int] | None = None) -> None:
        """Open a step; `wanted` are the parameters selected for capture, None for all of them.

        Raises `CaptureError` for an earlier failure under `raise_errors`.
        """
        self._raise_pending()
        self._step = facts.step
        self._put(lambda writer: writer.begin(facts, capture=capture, wanted=wanted), facts.step)

    def piece(self, piece: StagedPiece, done: Callable[[], None]) -> None:
        """Hand over one staged piece of the open step; `done` is called when its memory is free again."""

        def write(writer: CaptureWriter) -> None:
            try:
                writer.piece(piece)
            finally:
                done()

        self._put(write, self._step)

    def fail(self) -> None:
        """Say that the open step could not be captured."""
        self._put(lambda writer: writer.fail(), self._step)

    def end(
        self, step: int, *, dropped: bool = False, seconds: float = float("nan"), wait_seconds: float = 0.0
    ) -> None:
        """All pieces of the step have been handed over. `seconds` is what capture took of the training thread."""
        self._put(lambda writer: writer.end(dropped=dropped, seconds=seconds, wait_seconds=wait_seconds), step)

    def outcome(self, step: int, outcome: StepOutcome) -> None:
        """What became known of a step after the optimizer moved."""
        self._put(lambda writer: writer.outcome(step, outcome), step)

    def tags(self, step: int, tags: Mapping[str, Any]) -> None:
        """Keep user tags of a step.

        Raises `TypeError` for a value that is not JSON.
        """
        line = json.dumps({"step": step, "tags": dict(tags)}, allow_nan=False).encode() + b"\n"
        self._put(lambda writer: writer.tags(line), step)

    def discard(self) -> None:
        """Give files back without having started: attach did not come about."""
        self._writer.discard()
        if self._follower is not None:
            self._follower.discard()

    def close(self, timeout: float) -> None:
        """Write what is still queued, seal, and mark this rank closed; on rank 0 also finish the session.

        Raises `CaptureError` for a failure under `raise_errors`.
        """
        self._put(lambda writer: writer.close(), None)
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()
        if self._follower is not None:
            self._follower.close(timeout)
        self._raise_pending()

    def _put(self, command: Command, step: int | None) -> None:
        self._commands.put((command, step))

    def _work(self) -> None:
        died = "the recorder's thread has ended"
        try:
            while (item := self._commands.get()) is not None:
                command, step = item
                try:
                    command(self._writer)
                except Exception as error:
                    self._failed(error, step)
        except BaseException as error:
            # Not even this may leave training waiting for a buffer that nobody gives back.
            died = f"the recorder's thread has died: {type(error).__name__}: {error}"
            raise
        finally:
            self._on_end(died)

    def _failed(self, error: Exception, step: int | None) -> None:
        self._error = self._error or error
        kind = f"{type(error).__name__}: {getattr(error, 'errno', None) or error}"
        if kind in self._seen:
            return
        self._seen.add(kind)
        verify = f"`gradtap verify {self._paths.run}` tells what is there"
        if step is None:
            self._report(f"rank {self._rank} could not finish its recording: {error}. {verify}")
            return
        self._report(
            f"rank {self._rank} could not record at step {step}: {error}. What was not committed stays incomplete; "
            f"later captures are tried again. {verify}"
        )

    def _raise_pending(self) -> None:
        if self._raise_errors and self._error is not None:
            error, self._error = self._error, None
            raise CaptureError(f"recording failed on rank {self._rank}: {error}") from error
