"""How the ranks of one job come to write into one session: lock, session, and what each tells the others."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gradtap.config import Settings
from gradtap.errors import RendezvousError
from gradtap.store.files import make_dirs
from gradtap.store.lock import RunLock
from gradtap.store.paths import SessionPaths
from gradtap.store.runfile import RUN_NAME, add_session, create_run, refuse_foreign_folder
from gradtap.store.session import create_session, wait_session
from gradtap.types import EngineFacts, SessionPlan

T = TypeVar("T")

FIRST_SESSION = "0000"

Prepare = Callable[[SessionPaths, RunLock | None], T]
"""Makes what a rank needs in the session, before it says that it is ready."""


class Meeting(Protocol):
    """Point to point talk of the ranks at attach; no collective."""

    def announce(self, message: Mapping[str, Any]) -> None:
        """Rank 0: tell the others."""

    def receive(self) -> Mapping[str, Any]:
        """Other ranks: what rank 0 announced."""

    def ready(self, error: str | None) -> None:
        """Other ranks: say that this rank is ready, or why not."""

    def wait_ready(self) -> None:
        """Rank 0: wait for all others."""

    def conclude(self, error: str | None) -> None:
        """Rank 0: the attach stands, or why not."""

    def verdict(self) -> None:
        """Other ranks: wait for rank 0's conclusion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a job wants to record into."""

    store: Path
    codec: str
    summary: str
    terms: Mapping[str, Any]
    """What all ranks must ask for alike, by argument of attach; JSON."""


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """A rank's part in a session, and what was prepared in it; rank 0 also holds the run's lock."""

    paths: SessionPaths
    lock: RunLock | None
    prepared: T
    first: bool
    """Whether this is the run's first session."""

    def leave(self) -> None:
        """Give the lock back, where this rank holds it."""
        if self.lock is not None:
            self.lock.release()


def join_job(
    request: JobRequest,
    settings: Settings,
    plan: SessionPlan,
    facts: EngineFacts,
    meeting: Meeting,
    prepare: Prepare[T],
) -> Job[T]:
    """Rank 0 makes the session and tells the others its nonce; they wait to see it in the store; each prepares.

    Raises what rank 0 met, on every rank; `RendezvousError` where the ranks do not meet in time.
    """
    if facts.rank == 0:
        return _lead(request, settings, plan, facts, meeting, prepare)
    announced = meeting.receive()
    _refuse_other_terms(request.terms, announced["terms"])
    nonce = str(announced["nonce"])
    paths = wait_session(request.store, nonce, plan=plan, timeout=settings.attach_timeout / 2)
    prepared = prepare(paths, None)
    meeting.ready(None)
    meeting.verdict()
    return Job(paths, None, prepared, paths.name == FIRST_SESSION)


def _lead(
    request: JobRequest,
    settings: Settings,
    plan: SessionPlan,
    facts: EngineFacts,
    meeting: Meeting,
    prepare: Prepare[T],
) -> Job[T]:
    nonce = secrets.token_hex(16)
    refuse_foreign_folder(request.store)
    make_dirs(request.store)
    lock = RunLock.acquire(request.store, nonce, stale_after=settings.lock_stale)
    fresh = not (request.store / RUN_NAME).exists()
    try:
        create_run(request.store, request.store.name.removesuffix(".gradtap"))
        paths = create_session(
            request.store,
            plan=plan,
            engine=facts,
            nonce=nonce,
            codec=request.codec,
            summary=request.summary,
            settings=settings,
        )
        prepared = _list_when_met(request, paths, nonce, meeting, lambda: prepare(paths, lock))
    except BaseException:
        lock.release()
        if fresh:
            _remove_empty(request.store)
        raise
    meeting.conclude(None)
    return Job(paths, lock, prepared, paths.name == FIRST_SESSION)


def _remove_empty(run_dir: Path) -> None:
    """Take back a run that was only just made and in which no session came about."""
    with contextlib.suppress(OSError):
        (run_dir / "sessions").rmdir()
        (run_dir / RUN_NAME).unlink()
        run_dir.rmdir()


def _refuse_other_terms(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for name, value in theirs.items():
        if ours[name] != value:
            raise RendezvousError(
                f"attach got another {name} on this rank than on rank 0 ({ours[name]!r}, there {value!r}); give all "
                "ranks the same arguments"
            )


def _list_when_met(
    request: JobRequest, paths: SessionPaths, nonce: str, meeting: Meeting, prepare: Callable[[], T]
) -> T:
    """A session that some rank never saw holds nothing: it is removed, not listed."""
    try:
        meeting.announce({"nonce": nonce, "terms": request.terms})
        prepared = prepare()
        meeting.wait_ready()
        add_session(request.store, paths.name)
        return prepared
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
