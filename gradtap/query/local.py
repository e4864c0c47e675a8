"""A run in files, asked: the words of a question become arguments of `Run`, its results become answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradtap.query.answer import Answer
from gradtap.query.audit import audit
from gradtap.query.formats import GradHead, Payload, encode
from gradtap.query.hist import hist
from gradtap.query.info import info
from gradtap.query.norms import norms
from gradtap.query.params import params
from gradtap.query.step import step as one_step
from gradtap.query.steps import steps
from gradtap.query.words import is_range, range_of, step_of

if TYPE_CHECKING:
    from gradtap.read import Run
    from gradtap.read.request import GradRequest, Progress
    from gradtap.types import GradSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlace:
    """A `Place` whose run lies in a folder; `label` is how the user called it."""

    run: Run
    label: str

    def close(self) -> None:
        """Let go of the run's files."""
        self.run.close()

    def notices(self) -> list[str]:
        """Sessions that do not read: their steps are missing in any answer."""
        return [
            f"DAMAGED: session {name} does not read and its steps are not listed: {why}"
            for name, why in self.run.damaged.items()
        ]

    def info(self) -> Answer:
        """See `gradtap.query.info`."""
        return info(self.run)

    def params(self, match: str = "", *, step: str = "last") -> Answer:
        """See `gradtap.query.params`."""
        return params(self.run, match, step=step)

    def steps(self, within: str = "", *, tags: bool = False) -> Answer:
        """See `gradtap.query.steps`."""
        return steps(self.run, within, tags=tags)

    def step(self, step: str, *, attempt: int | None = None, match: str = "") -> Answer:
        """See `gradtap.query.step`."""
        return one_step(self.run, step, attempt=attempt, match=match)

    def norms(self, match: str = "", *, steps: str = "", stat: str = "l2") -> Answer:
        """See `gradtap.query.norms`."""
        return norms(self.run, match, steps=steps, stat=stat)

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
        """See `gradtap.query.hist`."""
        return hist(self.run, param, step, slice=slice, bins=bins, scale=scale, attempt=attempt)

    def audit(self) -> Answer:
        """See `gradtap.query.audit`."""
        return audit(self.run)

    def request(self, param: str, step: str, **options: Any) -> GradRequest:
        """What `grad` would read, without reading a chunk. Options as of `requested`."""
        return requested(self.run, param, step, **options)

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
        """See `Run.grad`. Raises as it does."""
        options = {"slice": slice, "attempt": attempt, "partial": partial, "as_consumed": as_consumed}
        return self.request(param, step, **options).read(progress)

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
        """The same as bytes of a file format. Raises `UsageError` for an unknown format or dtype."""
        options = {"slice": slice, "attempt": attempt, "partial": partial, "as_consumed": as_consumed}
        wanted = self.request(param, step, **options)
        return encode(wanted.read(progress), head_of(self.run, wanted), format=format, dtype=dtype)


def requested(
    run: Run,
    param: str,
    step: str,
    *,
    slice: str = "",
    attempt: int | None = None,
    partial: bool = False,
    as_consumed: bool = False,
) -> GradRequest:
    """The request that words make: a stack where `step` is a range.

    `param` is a name, or an index into the run's parameters where no parameter has that name. Raises as `Run.grad`.
    """
    name = param_of(run, param)
    options: dict[str, Any] = {"slice": slice or None, "attempt": attempt, "partial": partial}
    options |= {"as_consumed": True} if as_consumed else {}
    if is_range(step):
        return run.request(name, steps=range_of(step), **options)
    return run.request(name, step_of(run, step), **options)


def param_of(run: Run, text: str) -> str:
    """The name that a text means: itself, or that of the parameter at an index where none has the text as a name."""
    known = run.params
    if text.isdigit() and text.isascii() and len(text) <= 9 and int(text) < len(known):
        names = {name for p in known for name in (p.name, *p.aliases)}
        if text not in names:
            return known[int(text)].name
    return text


def head_of(run: Run, wanted: GradRequest) -> GradHead:
    """What a file says of a gradient beside its values, all known before a chunk is read."""
    return GradHead(
        run=run.id,
        name=wanted.param.name,
        shape=wanted.shape,
        dtype=wanted.dtype.name,
        dtype_captured=wanted.dtype_captured,
        steps=wanted.steps,
        attempts=wanted.attempts,
        flags=wanted.flags,
        factor=wanted.factor,
        complete=None if wanted.partial else True,
        stacked=wanted.stacked,
        slice=str(wanted.where),
        consumed=wanted.consumed,
    )
