"""A run opened for reading: the steps it holds and one gradient, slice or stack of them.

Here: from a step to an attempt, from a name to a parameter, and what to say where there is none. Not here: bytes
(`chunks`), what is complete (`captures`), putting pieces together (`assemble`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gradtap.errors import (
    DamagedError,
    FormatVersionError,
    ParamNotFoundError,
    StepNotFoundError,
    StoreError,
    UsageError,
    near_names,
    nearest,
)
from gradtap.matching import Select
from gradtap.read.assemble import SessionReader
from gradtap.read.attempts import Attempt, AttemptIndex, Place
from gradtap.read.chunks import FileCache
from gradtap.read.explain import explain_absent, in_flight
from gradtap.read.histogram import GradHistogram, histogram_of
from gradtap.read.info import RunInfo, chunk_bytes, describe, left_out, session_views
from gradtap.read.ledger import Ledger
from gradtap.read.norms import Norms, StepSummary, check_stat, read_norms, read_summary
from gradtap.read.place import folder_of, read_run_there
from gradtap.read.record import StepRecord, read_record
from gradtap.read.request import GradRequest, request
from gradtap.read.session import Session, SessionView, Signature, file_signature
from gradtap.read.steps import Steps, chosen_steps, one_attempt, one_step, span
from gradtap.selection import Selection
from gradtap.store.paths import SessionPaths
from gradtap.store.runfile import RUN_NAME, RunFile
from gradtap.types import GradSlice, ParamSpec, SessionPlan


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run for reading: the folder that was given to `gradtap.attach`. Needs no torch; the run may be live.

    Reads metadata alone: the cost does not grow with the number of captures. Raises `NotARunError` for a folder that
    holds no run, `UsageError` for what is no path, `FormatVersionError` for a newer format, `DamagedError` and
    `StoreError` where metadata does not read.
    A session that does not read is left out and named by `run.sessions` (state "damaged"), as long as another one does.
    """
    return Run(folder_of(path))


class Run:
    """One run, as of now: what is recorded while it is open appears at the next access. For any thread.

    Use it as a context manager, or `close` it, to let go of its files early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The process may go to another folder while the run is open.
        self._root = path.absolute()
        self._lock = threading.RLock()
        self._files = FileCache()
        self._readers: dict[str, SessionReader] = {}
        self._damaged: dict[str, StoreError] = {}
        self._signature: object = None
        self._index = AttemptIndex()
        self._file: RunFile = self._read()

    def __repr__(self) -> str:
        return f"<gradtap run {self.name!r} at {self.path}: {len(self.steps)} steps, {len(self.params)} parameters>"

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all open files. The run can still be read; it opens them anew."""
        self._files.close()
        for reader in self._readers.values():
            reader.captures.close()

    @property
    def name(self) -> str:
        """The run's name."""
        return self._file.name

    @property
    def id(self) -> str:
        """The run's own identifier, 32 hexadecimal digits; stays when the folder is moved."""
        return self._file.run

    @property
    def tags(self) -> dict[str, Any]:
        """Tags of the run."""
        return dict(self._file.tags)

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """All parameters in the model's order, those without gradients too; as of the newest session."""
        readers = self._sessions()
        return readers[-1].session.plan.params if readers else ()

    @property
    def plan(self) -> SessionPlan | None:
        """How the newest session lays out its arrays; None for a run without sessions."""
        readers = self._sessions()
        return readers[-1].session.plan if readers else None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps with a complete capture, ascending. Looked up anew at each access; cheap while nothing changed."""
        return self._attempts().steps

    @property
    def sessions(self) -> tuple[SessionView, ...]:
        """What is known of each start or resume, oldest first."""
        with self._lock:
            readers = self._sessions()
            return session_views(self._file, readers, self._damaged)

    @property
    def damaged(self) -> dict[str, str]:
        """Sessions that do not read, by name, and why; their steps are not listed. `gradtap verify` says more."""
        self._sessions()
        return {name: str(error) for name, error in self._damaged.items()}

    @property
    def ledger(self) -> Ledger:
        """The scale ledger as of now: one row for each step, captured or not."""
        with self._lock:
            index, readers = self._attempts(), self._sessions()
        return Ledger([reader.ledger for reader in readers], index.newest())

    def volume(self) -> tuple[int, int]:
        """Bytes of the chunks of all complete captures, before and after encoding. Reads the ledger alone."""
        sizes = [chunk_bytes(reader) for reader in self._sessions()]
        return sum(raw for raw, _ in sizes), sum(stored for _, stored in sizes)

    def info(self) -> RunInfo:
        """What is in the run: sessions, parameters, steps, sizes. Counts files, reads no gradient."""
        with self._lock:
            steps, readers = self.steps, self._sessions()
            return describe(self.path, self._file, readers, steps, self._damaged)

    def left_out(self, step: int | None = None) -> frozenset[str]:
        """Names of the stored parameters that the selection in force at a step leaves out; the newest step if None.

        Empty for a run without sessions.
        """
        readers, index = self._sessions(), self._attempts()
        if not readers:
            return frozenset()
        places = () if step is None else index.places(one_step(step))
        at = step if step is not None else index.steps[-1] if index.steps else None
        return left_out((places[-1].reader if places else readers[-1]).session, at)

    def tags_of(self, step: int) -> dict[str, Any]:
        """What the training logged with a step: `{name: value}`, empty where it logged nothing.

        Those of the session whose attempt is in force; of tags with one name the latest counts. Raises
        `StepNotFoundError` for a step that no session made, `DamagedError` for tags that do not read.
        """
        number = one_step(step)
        places = self._attempts().places(number)
        if places:
            return places[-1].reader.tags.of(number)
        with self._lock:
            ledger, readers = self.ledger, self._sessions()
        return readers[ledger.session_of(number)].tags.of(number)

    def attempts(self, step: int) -> tuple[int, ...]:
        """Numbers of the complete captures of a step, from 1; the last one is in force.

        Raises `StepNotFoundError`, or `IncompleteError` for a step in flight or dropped.
        """
        return tuple(attempt.number for attempt in self.locate(step))

    def attempt_counts(self, steps: Sequence[int]) -> list[int]:
        """How many complete captures each of many steps has, which is the number of the one in force; 0 for none."""
        return self._attempts().counts(steps)

    def locate(self, step: int) -> tuple[Attempt, ...]:
        """Where each attempt at a step lies: its session, and its index along axis 0 of that session's arrays.

        Raises as `attempts`.
        """
        places = self._attempts().places(one_step(step)) or self._absent(one_step(step))
        return tuple(Attempt(number=p.attempt, session=p.reader.session.name, capture=p.capture) for p in places)

    def in_force(self, steps: Sequence[int]) -> tuple[Place, ...]:
        """The newest complete capture of each of these steps. Raises as `attempts`."""
        index = self._attempts()
        return tuple(self._place(each, index, attempt=None, partial=False) for each in steps)

    def grad(
        self,
        name: str,
        step: int | None = None,
        *,
        steps: Steps | None = None,
        slice: Any = None,
        attempt: int | None = None,
        partial: bool = False,
        as_consumed: bool = False,
    ) -> GradSlice:
        """The gradient of a parameter at a step, or stacked over `steps` along a new leading axis.

        `name` may be an alias (tied weights). `steps`: step numbers, all of which must be there, or a Python slice of
        step numbers (`slice(100, 200)`: those recorded from 100 up to 199). `slice`: a part of the parameter, as text
        (`"0:10, :, -1"`) or as a NumPy index; only the chunks that it touches are read. `attempt`: 1 for the first
        capture of a step that was recorded again; the last by default. `partial=True` also serves a capture that not
        every rank committed, with NaN for what is missing and `complete=False`. `as_consumed=True` gives what the
        optimizer consumed: clipped, and divided by the loss scale that the engine divided by; `consumed` says what the
        stored values were multiplied with. A step for which that is not known, or that was skipped, is refused.

        Values are float32 (float64 for a float64 gradient), as stored: `factor` times them is the gradient as defined.
        Raises `ParamNotFoundError`, `StepNotFoundError`, `IncompleteError`, `SelectionError`, `UsageError`, and
        `DamagedError` for stored bytes that are not what was committed.
        """
        options: dict[str, Any] = {"attempt": attempt, "partial": partial, "as_consumed": as_consumed}
        return self.request(name, step, steps=steps, slice=slice, **options).read()

    def request(
        self,
        name: str,
        step: int | None = None,
        *,
        steps: Steps | None = None,
        slice: Any = None,
        attempt: int | None = None,
        partial: bool = False,
        as_consumed: bool = False,
    ) -> GradRequest:
        """What `grad` would read, looked at without reading a chunk: shape, bytes, chunks, flags. Arguments as there.

        Raises as `grad`, but for what only the journals and chunks tell.
        """
        index = self._attempts()
        param = self._param(name)
        where = Selection.of(slice, param.shape)
        if (step is None) == (steps is None):
            raise UsageError(f"give either step= or steps=; this run has {span(index.steps)}")
        chosen = (one_step(step),) if step is not None else chosen_steps(steps, index.steps)
        places = [self._place(each, index, attempt=attempt, partial=partial) for each in chosen]
        options = {"stacked": step is None, "partial": partial, "as_consumed": as_consumed}
        return request(self.id, param, where, places, whole=not self._damaged, **options)

    def norms(self, match: Select | None = None, steps: Steps | None = None, stat: str = "l2") -> Norms:
        """Parameter x step matrix of a stored statistic; reads summaries only.

        `match`: None (all), a name or part of one, a glob (`layers.*.weight`), several (`!` excludes), or a function
        over (name, shape). `steps` as in `grad`; all by default. `stat`: l2, l1, absmax, mean, std, zeros, nan or inf.
        Raises `ParamNotFoundError`, `StepNotFoundError`, `UsageError`, and `IncompleteError` where no summaries were
        stored.
        """
        check_stat(stat)
        known = self.steps
        places = self.in_force(sorted(set(known if steps is None else chosen_steps(steps, known))))
        return read_norms([(p.step, p.reader, p.capture) for p in places], self.params, match=match, stat=stat)

    def record(self, step: int, *, attempt: int | None = None) -> StepRecord:
        """Ledger row, tags and place of one complete capture of a step. Raises as `grad` does for the step."""
        return read_record(self._place(one_step(step), self._attempts(), attempt=attempt, partial=False))

    def summary(self, step: int, match: Select | None = None, *, attempt: int | None = None) -> StepSummary:
        """Every stored statistic of the parameters that match, at one step; reads summaries only.

        Raises as `norms`; no statistics at all where the step's session stored none.
        """
        place = self._place(one_step(step), self._attempts(), attempt=attempt, partial=False)
        return read_summary(place, self.params, match)

    def hist(
        self,
        name: str,
        step: int,
        *,
        slice: Any = None,
        bins: int | None = None,
        scale: str = "log2",
        attempt: int | None = None,
    ) -> GradHistogram:
        """The histogram of a gradient at a step.

        As it is, the stored one: 193 bins by sign and power of two. With a `slice`, `bins`, or `scale="linear"` it is
        counted anew from the values: `bins` (64 if not given, 1 to 512) equal ones from the smallest to the largest.
        Raises as `grad`; `IncompleteError` where none was stored, `UsageError` for another scale or number of bins.
        """
        wanted = self.request(name, step, slice=slice, attempt=attempt)
        return histogram_of(wanted, bins=bins, scale=scale, stored=slice is None)

    def _place(self, step: int, index: AttemptIndex, *, attempt: int | None, partial: bool) -> Place:
        places = index.places(step)
        if attempt is None:
            if places:
                return places[-1]
            begun = in_flight(step, self._sessions()) if partial else None
            return begun or self._absent(step)[-1]
        if not 1 <= one_attempt(attempt) <= len(places or self._absent(step)):
            there = f"attempts 1 to {len(places)}" if len(places) > 1 else "attempt 1 alone"
            raise StepNotFoundError(f"step {step} has no attempt {attempt}; it has {there}")
        return places[attempt - 1]

    def _absent(self, step: int) -> list[Place]:
        raise explain_absent(step, self._sessions(), self.steps)

    def _param(self, name: str) -> ParamSpec:
        if not isinstance(name, str):
            raise UsageError(f"the name of a parameter is {name!r}; give one name as text, see run.params")
        readers = self._sessions()
        if not readers:
            raise ParamNotFoundError(f"the run at {self.path} has no session yet, so no parameter {name!r}")
        session = readers[-1].session
        if name not in session.by_name:
            known = [p.name for p in session.plan.params]
            near = nearest(name, known)
            raise ParamNotFoundError(
                f"no parameter {name!r} in this run{near + ' See' if near else '; see'} run.params"
            ).noting(did_you_mean=near_names(name, known))
        param = session.plan.params[session.by_name[name]]
        if param.status == "frozen":
            raise ParamNotFoundError(f"{name!r} has no gradients: it is frozen (requires_grad is off)")
        if param.status == "unoptimized":
            raise ParamNotFoundError(
                f"{name!r} has no gradients: it is trainable, but in no parameter group of the optimizer"
            )
        return param

    def _attempts(self) -> AttemptIndex:
        with self._lock:
            readers = self._sessions()
            versions = tuple((r.session.name, r.captures.refresh()) for r in readers)
            if versions != self._index.versions:
                self._index = self._index.grown(versions, readers)
            return self._index

    def _sessions(self) -> list[SessionReader]:
        with self._lock:
            if (file_signature(self._root / RUN_NAME), self._damaged_signatures()) != self._signature:
                self._file = self._read()
            return [self._readers[name] for name in self._file.sessions if name in self._readers]

    def _damaged_signatures(self) -> list[Signature | None]:
        # A damaged session may have been restored from a copy.
        return [file_signature(SessionPaths(self._root, name).session_json) for name in self._damaged]

    def _read(self) -> RunFile:
        signature = file_signature(self._root / RUN_NAME)
        try:
            file = read_run_there(self._root)
        except RecursionError as error:
            raise StoreError(f"{self.path / RUN_NAME} does not read ({error}); run `gradtap verify`") from error
        readers: dict[str, SessionReader] = {}
        damaged: dict[str, StoreError] = {}
        for name in file.sessions:
            try:
                readers[name] = self._readers.get(name) or SessionReader(Session(self._root, name), self._files)
            except FormatVersionError:
                # A newer gradtap went on with this run: without that session older attempts would pass for current.
                raise
            except StoreError as error:
                damaged[name] = error
        if damaged and not readers:
            raise _all_damaged(self.path, damaged)
        self._readers, self._damaged = readers, damaged
        self._signature = signature, self._damaged_signatures()
        return file


def _all_damaged(path: Path, damaged: dict[str, StoreError]) -> StoreError:
    first = next(iter(damaged.values()))
    if len(damaged) == 1:
        return first
    return DamagedError(f"none of the sessions {', '.join(damaged)} of {path} reads; the first: {first}")
