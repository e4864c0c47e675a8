"""A run on a server, asked: the words of a question become an address, its answer becomes what a folder gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gradtap.errors import NotARunError, RunNotFoundError, StoreError, UsageError
from gradtap.query.answer import Answer
from gradtap.query.words import ENDS, is_range, range_of
from gradtap.remote.address import API, Address
from gradtap.remote.arrays import ArrayFacts, array_facts, array_of, grad_of, most_bytes
from gradtap.remote.client import Client, Progress, Query, Reply
from gradtap.remote.identity import check_identity, check_step
from gradtap.remote.rows import asked, with_nan

if TYPE_CHECKING:
    from gradtap.query.formats import Payload
    from gradtap.types import GradSlice

FACTS_AT_ONCE = 50
"""Steps whose facts fit the headers of one answer, however long their numbers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlace:
    """A `Place` whose run is on a server, under the name that the server lists it by."""

    client: Client
    name: str

    @property
    def label(self) -> str:
        """The address of the run."""
        return f"{self.client.base}{API}{self._path}"

    def close(self) -> None:
        """Let go of the connections."""
        self.client.close()

    def notices(self) -> list[str]:
        """Sessions that do not read: their steps are missing in any answer."""
        # Not `info`, for which the server looks at every file of the run.
        rows = asked(self.client, "/runs", {"q": self.name}, name="runs", rows_name="runs", paged=True).rows
        mine = next((row for row in rows if self.name in (row["name"], row.get("run"))), {})
        return [
            f"DAMAGED: session {name} does not read and its steps are not listed: {why}"
            for name, why in mine.get("damaged", {}).items()
        ]

    def info(self) -> Answer:
        """See `gradtap.query.info`. Raises as `Client.fetch`, like all that follow."""
        return asked(self.client, self._path, {}, name="info")

    def params(self, match: str = "", *, step: str = "last") -> Answer:
        """See `gradtap.query.params`."""
        path, query = f"{self._path}/params", {"match": match, "step": _word(step)}
        return asked(self.client, path, query, name="params", rows_name="parameters", paged=True, pinned=_its_step)

    def steps(self, within: str = "", *, tags: bool = False) -> Answer:
        """See `gradtap.query.steps`."""
        query: Query = {"steps": within, "tags": 1 if tags else None}
        return asked(self.client, f"{self._path}/steps", query, name="steps", rows_name="steps", paged=True)

    def step(self, step: str, *, attempt: int | None = None, match: str = "") -> Answer:
        """See `gradtap.query.step`."""
        path, query = f"{self._path}/steps/{_word(step)}", {"attempt": attempt, "match": match}
        answer = asked(self.client, path, query, name="step", rows_name="parameters")
        check_step(self.label, answer.facts, step=step, attempt=attempt)
        return answer

    def norms(self, match: str = "", *, steps: str = "", stat: str = "l2") -> Answer:
        """See `gradtap.query.norms`."""
        query = {"match": match, "steps": steps, "stat": stat}
        answer = asked(self.client, f"{self._path}/norms", query, name="norms", rows_name="parameters")
        return with_nan(answer, "values")

    def audit(self) -> Answer:
        """See `gradtap.query.audit`."""
        return asked(self.client, f"{self._path}/audit", {}, name="audit", rows_name="findings")

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
        query: Query = {"slice": slice, "bins": bins, "scale": scale, "attempt": attempt}
        path = f"{self._path}/steps/{_word(step)}/grads/{_part(param)}/hist"
        answer = asked(self.client, path, query, name="hist", rows_name="bins")
        check_step(self.label, answer.facts, step=step, attempt=attempt)
        return answer

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
        """See `Run.grad`; `progress` counts bytes. Raises `StoreError` for an answer that is not whole."""
        query = _asking(slice, attempt, partial, as_consumed)
        raw: Query = {**query, "format": "raw", "dtype": "stored"}
        reply = self._values("GET", param, step, raw, progress)
        facts = self._completed(array_facts(reply.url, reply.headers, partial=partial), param, step, raw, partial)
        self._check(reply.url, facts, param, step, attempt)
        return grad_of(facts, array_of(facts, reply))

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
        """The bytes of a file format as the server made them; `progress` counts them."""
        from gradtap.remote.payload import payload_of

        query = _asking(slice, attempt, partial, as_consumed)
        query = {**query, "format": format, "dtype": dtype}
        reply = self._values("GET", param, step, query, progress)
        facts = array_facts(reply.url, reply.headers, partial=partial)
        facts = self._completed(facts, param, step, query, partial)
        self._check(reply.url, facts, param, step, attempt)
        return payload_of(facts, reply, format=format, dtype=dtype, slice=slice)

    @property
    def _path(self) -> str:
        return f"/runs/{_part(self.name)}"

    def _values(self, method: str, param: str, step: str, query: Query, progress: Progress | None = None) -> Reply:
        if is_range(step):
            path, query = f"{self._path}/grads/{_part(param)}", {**query, "steps": step}
        else:
            path = f"{self._path}/steps/{_word(step)}/grads/{_part(param)}"

        def bound(url: str, headers: Mapping[str, str], length: int | None) -> int:
            facts = array_facts(url, headers, partial=bool(query.get("partial")))
            most, form = most_bytes(facts, str(query["format"])), query["format"]
            if length is not None and (length > most or (form == "raw" and length != most)):
                raise StoreError(f"the answer of {url} has {length} bytes where {most} belong; ask again")
            return most

        return self.client.fetch(method, API + path, query, progress=progress, bound=bound)

    def _check(self, url: str, facts: ArrayFacts, param: str, step: str, attempt: int | None) -> None:
        def means(name: str) -> bool:
            """Whether the run has the parameter under what was asked for: an alias, or its index."""
            at = int(param) if re.fullmatch("[0-9]{1,9}", param) else None
            rows = [row for row in self.params().rows if row["name"] == name]
            return any(param in row["aliases"] or at == row["index"] for row in rows)

        check_identity(url, facts, param=param, step=step, attempt=attempt, means=means)

    def _completed(self, facts: ArrayFacts, param: str, step: str, query: Query, partial: bool) -> ArrayFacts:
        """The facts of a long stack: what does not fit the headers of one answer is asked for apart, without data."""
        if facts.whole:
            return facts
        steps = self._steps_of(facts, step)
        parts = []
        for at, chosen in _groups(steps):
            reply = self._values("HEAD", param, at, query)
            part = array_facts(reply.url, reply.headers, partial=partial)
            if part.steps != tuple(chosen) or not part.whole or (part.run, part.name) != (facts.run, facts.name):
                raise StoreError(f"the steps of {self.label} changed while they were read; ask again")
            parts.append(part)
        attempts = tuple(attempt for part in parts for attempt in part.attempts or ())
        factor = tuple(value for part in parts for value in part.factor or ())
        consumed = None
        if facts.as_consumed:
            consumed = tuple(value for part in parts for value in part.consumed or ())
        return replace(facts, steps=tuple(steps), attempts=attempts, factor=factor, consumed=consumed)

    def _steps_of(self, facts: ArrayFacts, step: str) -> Sequence[int]:
        if facts.steps is not None:
            return facts.steps
        wanted = range_of(step)
        rows = self.steps(f"{facts.span[0]}:{facts.span[1] + 1}:{wanted.step or 1}").rows
        steps = [row["step"] for row in rows if row["complete"]]
        if len(steps) != facts.count:
            raise StoreError(f"the steps of {self.label} changed while they were read; ask again")
        return steps


def remote_place(address: Address, run: str | None = None, *, client: Client | None = None) -> RemotePlace:
    """The run of that name on the server; without a name the only one there is.

    Raises `UsageError` where the address names another run, and with the names where there are several;
    `NotARunError` where there is none; what `Client` raises.
    """
    if run is not None and address.run not in (None, run):
        raise UsageError(f"the address names the run {address.run!r} and --run {run!r}; give one of them")
    asking = Client.from_environment(address.base) if client is None else client
    try:
        name = run or address.run or _only_run(asking)
        if not name.strip("."):
            raise RunNotFoundError(f"no run {name!r}")
        return RemotePlace(client=asking, name=name)
    except BaseException:
        asking.close()
        raise


def runs_of(client: Client) -> Answer:
    """One row for each run of a server: `gradtap.query.runs`."""
    return asked(client, "/runs", {}, name="runs", rows_name="runs", paged=True)


def _only_run(client: Client) -> str:
    names = [str(row["name"]) for row in runs_of(client).rows]
    if not names:
        raise NotARunError(f"the server at {client.base} has no run yet")
    if len(names) > 1:
        raise UsageError(
            f"{len(names)} runs are there: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}; choose one with "
            f"--run, such as --run {names[0]}"
        ).noting(runs=names)
    return names[0]


def _asking(slice: str, attempt: int | None, partial: bool, as_consumed: bool) -> Query:
    flags = {"partial": 1 if partial else None, "as_consumed": 1 if as_consumed else None}
    return {"slice": slice, "attempt": attempt, **flags}


def _its_step(first: Mapping[str, Any]) -> Query:
    """The step that the first of several pages is of."""
    return {} if first.get("step") is None else {"step": str(first["step"])}


def _part(text: str) -> str:
    """A name as one part of a path, slashes and all."""
    made = quote(text, safe="", errors="surrogateescape")
    # A part of dots alone would be taken for the folder above.
    return made if made.strip(".") else made.replace(".", "%2E")


def _word(step: str) -> str:
    """A step as a part of a path. Raises `UsageError` for what would lead elsewhere."""
    if step not in ENDS and not re.fullmatch(r"\s*-?[0-9]{1,19}\s*", step):
        raise UsageError(f"step is {step[:80]!r}; give a number, `first` or `last`")
    return step.strip()


def _groups(steps: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """The steps in ranges of a few, each with its words; every range has one stride and no step more."""
    at = 0
    while at < len(steps):
        stride = steps[at + 1] - steps[at] if at + 1 < len(steps) else 1
        end = at + 1
        while end < len(steps) and end - at < FACTS_AT_ONCE and steps[end] - steps[end - 1] == stride:
            end += 1
        yield f"{steps[at]}:{steps[end - 1] + 1}:{stride}", steps[at:end]
        at = end
