"""The writing half, joined: an engine's step boundary on one side, a committed capture on the other.

    source (capture) -> plan -> staging (capture) -> recorder (encode, store)

The training thread only copies: everything that can wait is a command to the recorder's thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from gradtap.capture.detect import find_source
from gradtap.capture.rendezvous import Rendezvous
from gradtap.capture.source import GradSource
from gradtap.capture.staging import Staging
from gradtap.config import Settings
from gradtap.errors import AttachError, UsageError
from gradtap.flags import MODIFIED_AFTER_BACKWARD
from gradtap.matching import Select, select_params
from gradtap.options import AttachOptions, check_options
from gradtap.plan.chunks import rank_chunks
from gradtap.plan.planner import plan_session
from gradtap.plan.rules import Rule
from gradtap.store.job import Job, JobRequest, join_job
from gradtap.store.lock import RunLock
from gradtap.store.paths import SessionPaths
from gradtap.store.recorder import RankRecorder
from gradtap.tags import as_json
from gradtap.voice import Voice

CRASH_TIMEOUT = 2.0
"""Seconds that a crashing process waits for ranks that are perhaps gone, or wait for it in a collective."""

MOST_JUMP = 512
"""Steps that an engine may jump ahead within a session; the ledger has a row for each of them."""


def attach(
    target: Any,
    store: str | os.PathLike[str],
    *,
    select: Select | None = None,
    every: Any = 1,
    codec: str = "exact",
    summary: str = "full",
    on_full: str = "wait",
    on_error: str = "warn",
    budget: Any = None,
    keep: int = 0,
    micro: bool = False,
    first_step: int | None = None,
) -> Tap:
    """Record the full gradients that the optimizer of `target` is about to use. Call it on every rank.

    target: an `Accelerator` after `prepare`, a DeepSpeed engine, or `(model, optimizer)`. `gradtap.attach` also takes
        an HF Trainer or a Lightning Trainer, before it trains; what it gives then records while the trainer trains.
    store: folder of the run, shared by all ranks; made if absent. A run of the same model gets a new session.
    select: parameters to capture: a glob, a list of globs (`!` excludes), or a function over (name, shape).
    every: steps to capture: `n` (steps divisible by n), a list of steps, `"first 100, then every 50"`, or
        `"log-spaced"`.
    codec: `exact` or `fast`; both are lossless.
    summary: statistics kept for each capture: `none`, `basic` or `full` (with histograms).
    on_full: what happens when the host buffer is full: `wait`, or `drop` the whole capture and say so.
    on_error: after attach has returned, `warn` (training goes on) or `raise`.
    first_step: number of the first update to come, where neither the engine nor the optimizer can tell.
    budget, keep, micro: reserved; this version takes only their defaults.

    Raises `UsageError` for a wrong argument, `UnsupportedError` for an engine whose true gradient cannot be had,
    `RendezvousError` where the ranks do not meet, `LockedError` for a run that a live job holds, `OtherModelError`
    for a run of another model, `StoreError` for a path that cannot be written. Nothing stored before is changed, and
    nothing half made is left.
    """
    # First of all, so that the ranks' meetings stay in step whatever is wrong with one rank's arguments.
    rendezvous = Rendezvous.of_process_group(Settings().attach_timeout)
    with rendezvous.telling_failures():
        settings = Settings.from_environment()
        rendezvous.timeout = settings.attach_timeout
        options = check_options(
            store,
            select=select,
            every=every,
            codec=codec,
            summary=summary,
            on_full=on_full,
            on_error=on_error,
            budget=budget,
            keep=keep,
            micro=micro,
            first_step=first_step,
        )
        tap = Tap(find_source(target), options, settings)
        tap.join(rendezvous)
    return tap


class Tap:
    """A recorder attached to one training. Made by `attach`; also a context manager that closes it."""

    def __init__(self, source: GradSource, options: AttachOptions, settings: Settings) -> None:
        self._source, self._options, self._settings = source, options, settings
        self._plan = plan_session(source.params, source.ownership, world=source.facts.world, settings=settings)
        self._wanted = select_params(options.select, source.params)
        self._staging = Staging(
            self._plan,
            rank_chunks(self._plan, source.facts.rank),
            budget=settings.buffer_bytes or None,
            slab_bytes=settings.slab_bytes,
        )
        self._refuse_drop_of_large_steps()
        self._voice = Voice(raise_errors=options.on_error == "raise")
        self._job: Job[RankRecorder] | None = None
        self._recorder: RankRecorder
        self._rule: Rule | None = None
        self._pid = os.getpid()
        self._step: int | None = None
        self._open_step: int | None = None
        self._recording = True
        self._closed = False
        self._drops = 0

    @property
    def path(self) -> str:
        """The folder of the run."""
        return str(self._options.store)

    @property
    def session(self) -> str:
        """Name of this session in the run; empty before `join`."""
        return "" if self._job is None else self._job.paths.name

    @property
    def _selected(self) -> list[str] | None:
        """Names of the parameters that are captured; None for all."""
        return None if self._wanted is None else [self._source.params[i].name for i in sorted(self._wanted)]

    def join(self, rendezvous: Rendezvous) -> None:
        """Meet the other ranks in a session of the run, and begin. `attach` has called it.

        Raises as `attach`; every hook, thread and file is then gone again.
        """
        options = self._options
        terms: dict[str, Any] = {"every": options.rule.to_json(), "select": self._selected, "codec": options.codec}
        terms |= {"summary": options.summary, "first_step": options.first_step}
        request = JobRequest(store=options.store, codec=options.codec, summary=options.summary, terms=terms)
        facts = self._source.facts
        try:
            self._job = join_job(request, self._settings, self._plan, facts, rendezvous, self._prepare)
            self._recorder.start()
            atexit.register(self._at_exit)
            self._introduce()
        except BaseException:
            self._undo()
            raise

    def before_step(self) -> None:
        """The engine is about to update: copy what this rank owns. Called by the hook, on the training thread."""
        # A process forked after attach has no recorder's thread: what it trains is not this run's.
        if not self._recording or os.getpid() != self._pid:
            return
        begun = time.perf_counter()
        try:
            self._finish_last_step()
            self._capture(begun)
        except Exception as error:
            self._stop(error)

    def after_step(self) -> None:
        """The engine has updated. Its outcome is read at the next boundary, when it costs no wait."""

    def log(self, **tags: Any) -> None:
        """Keep tags (loss, data ids ...) with the current step: numbers, texts, lists, dicts, tensors, arrays.

        Between a window's first backward and its step that is the step to come; otherwise the last step recorded
        (before the first one: the first). A tag that cannot be kept is said once, and raised under
        `on_error="raise"`.
        """
        if self._closed or not self._recording:
            self._voice.once("tags", f"tags {sorted(tags)} were logged after recording had ended; they are not kept")
            return
        in_window = self._source.window_open or self._step is None
        try:
            self._recorder.tags(self._upcoming() if in_window else self._step or 1, as_json(tags))
        except UsageError as error:
            self._voice.failed("tags", str(error), error)

    def close(self) -> None:
        """Detach, write what is still in memory, and on rank 0 finish the session. Safe to call twice.

        Rank 0 waits for the other ranks to close too, `GRADTAP_CLOSE_TIMEOUT` seconds after their last progress.
        Raises `CaptureError` for a failure of the recorder under `on_error="raise"`; all is closed even then.
        """
        self._close(self._settings.close_timeout)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "recording" if self._recording else "stopped"
        return f"<gradtap tap on {self._source.facts.name}, {state}: {self.path}, session {self.session}>"

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._close(self._settings.close_timeout if kind is None else CRASH_TIMEOUT)

    def _prepare(self, paths: SessionPaths, lock: RunLock | None) -> RankRecorder:
        """Make the recorder's files and install the hooks, before this rank says that it is ready."""
        self._recorder = RankRecorder(
            paths,
            self._source.facts.rank,
            rule=self._options.rule,
            select=self._selected,
            settings=self._settings,
            report=self._voice.report,
            raise_errors=self._voice.raise_errors,
            lock=lock,
            on_end=self._staging.abort,
        )
        self._source.install(self)
        return self._recorder

    def _undo(self) -> None:
        self._closed, self._recording = True, False
        self._source.remove()
        if hasattr(self, "_recorder"):
            self._recorder.discard()
        self._staging.close()
        if self._job is not None:
            self._job.leave()

    def _at_exit(self) -> None:
        # Set by the interpreter when an exception has ended the program: the other ranks are perhaps gone.
        crashed = getattr(sys, "last_type", None) is not None
        self._close(CRASH_TIMEOUT if crashed else self._settings.close_timeout)

    def _close(self, timeout: float) -> None:
        """Every part is tried, whatever happens to the others; the first failure is said, or raised, at the end."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        parts: list[Callable[[], object]] = [self._source.remove]
        if self._recording:
            parts.append(self._finish_last_step)
        parts += [lambda: self._recorder.close(timeout), self._staging.close]
        if self._job is not None:
            parts.append(self._job.leave)
        failures = [error for part in parts if (error := _failure_of(part)) is not None]
        self._recording = False
        if self._source.facts.rank == 0 and not failures:
            whose = "" if self._source.facts.world == 1 else " on rank 0"
            done = f"{self._recorder.committed} captures recorded{whose}"
            self._voice.tell(f"{done} into {self.path}, session {self.session}")
        if self._drops > 1:
            self._voice.report(f"{self._drops} captures were dropped for want of buffers; the ledger marks them")
        for error in failures:
            self._voice.failed(f"close {type(error).__name__}", f"closing the recorder: {error}", error)

    def _capture(self, begun: float) -> None:
        step = self._next_step()
        if step is None:
            return
        due = self._due(step)
        facts = self._source.step_facts(step)
        if facts.flags & MODIFIED_AFTER_BACKWARD:
            self._say_modified(step)
        self._recorder.begin(facts, capture=due, wanted=self._wanted)
        self._open_step = self._step = step
        dropped = due and self._options.on_full == "drop" and not self._staging.room()
        if dropped:
            self._count_drop(step)
        waited = self._copy() if due and not dropped else 0.0
        self._recorder.end(step, dropped=dropped, seconds=time.perf_counter() - begun, wait_seconds=waited)

    def _copy(self) -> float:
        wanted = self._wanted
        chosen = (lambda param: True) if wanted is None else (lambda param: param in wanted)
        try:
            waited = self._staging.copy(self._source.gradients(), self._recorder.piece, chosen)
        except Exception as error:
            self._recorder.fail()
            rank = self._source.facts.rank
            message = f"rank {rank} could not copy its gradients at step {self._step}: {error}"
            self._voice.failed(f"copy {type(error).__name__}", message, error)
            return 0.0
        if not self._staging.fits:
            self._say_streaming(waited)
        return waited

    def _next_step(self) -> int | None:
        """Number of the update to come. An engine that counts otherwise has been restored: that is a new session."""
        step = self._upcoming()
        if self._step is None or self._step < step <= self._step + MOST_JUMP:
            return step
        if step == self._step:
            self._voice.once("again", f"step {step} came twice, as after a step that failed; its first capture stands")
            return None
        self._recording = False
        message = (
            f"the engine goes on from step {step} after step {self._step}, so a checkpoint was loaded: this session "
            "stops recording; close this tap and attach again to go on in a new session of the same run"
        )
        self._voice.failed("restored", message)
        return None

    def _upcoming(self) -> int:
        told = None if self._options.first_step is not None else self._source.next_step()
        if told is not None:
            return told
        return (self._options.first_step or 1) if self._step is None else self._step + 1

    def _due(self, step: int) -> bool:
        schedule = self._recorder.schedule
        if schedule is not None:
            return schedule.captures(step)
        # The recorder's thread has not read the log yet, which begins with this rule at the session's first step.
        self._rule = self._rule or self._options.rule.at(step)
        return self._rule.contains(step)

    def _finish_last_step(self) -> None:
        if self._open_step is not None:
            step, self._open_step = self._open_step, None
            self._recorder.outcome(step, self._source.outcome())

    def _introduce(self) -> None:
        """One line on rank 0: what is recorded, where to, and what was there before."""
        facts, params = self._source.facts, self._source.params
        if facts.rank != 0 or self._job is None:
            return
        stored = sum(param.stored for param in params) if self._wanted is None else len(self._wanted)
        again = "" if self._job.first else "; the run has earlier sessions, a step recorded again is a new attempt"
        self._voice.tell(
            f"recording {facts.name} on {facts.world} process{'es' if facts.world > 1 else ''}, {stored} of "
            f"{len(params)} parameters, into {self.path}, session {self.session}{again}"
        )

    def _say_modified(self, step: int) -> None:
        self._voice.once(
            "modified",
            f"something changed the gradients between backward and step {step} (clipping by torch's own function, or a "
            "GradScaler): what is recorded is the changed gradient, flagged modified-after-backward. "
            "accelerator.clip_grad_norm_ is seen, and the gradient taken before it",
        )

    def _refuse_drop_of_large_steps(self) -> None:
        staging = self._staging
        if self._options.on_full == "drop" and not staging.fits:
            raise AttachError(
                f'on_full="drop" needs a buffer that holds a whole capture: this rank owns {staging.step_bytes} bytes '
                f'and the buffer has {staging.budget}; raise GRADTAP_BUFFER_BYTES, or use on_full="wait"'
            )

    def _count_drop(self, step: int) -> None:
        self._drops += 1
        self._voice.once(
            "drop",
            f"the host buffer is full at step {step}, so this capture is dropped, as asked for; the ledger marks "
            "each one. A faster disk, a larger GRADTAP_BUFFER_BYTES or a larger `every` avoids it",
        )

    def _say_streaming(self, waited: float) -> None:
        staging = self._staging
        self._voice.once(
            "streaming",
            f"a capture of this rank is {staging.step_bytes} bytes and the host buffer {staging.budget}, so captures "
            f"stream through it while training waits: {waited:.3g} s at step {self._step}. GRADTAP_BUFFER_BYTES="
            f"{2 * staging.step_bytes} avoids it",
        )

    def _stop(self, error: Exception) -> None:
        """What went wrong outside of copying would go wrong at every step: stop, and let training go on."""
        self._recording = False
        self._voice.failed(
            "stopped",
            f"recording stops after step {self._step}: {type(error).__name__}: {error}; training goes on",
            error,
        )


def _failure_of(part: Callable[[], object]) -> Exception | None:
    try:
        part()
    except Exception as error:
        return error
    return None


__all__ = ["Tap", "attach"]
