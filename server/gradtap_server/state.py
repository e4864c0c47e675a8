"""What every request can reach: the settings, the runs, the threads for reads, the counters. One object for an app."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import anyio
from fastapi import Depends, Request

from gradtap.query.local import LocalPlace
from gradtap.read.catalog import Catalog
from gradtap_server.metrics import Metrics
from gradtap_server.settings import ServerSettings

QUICK_AT_ONCE = 40
"""Threads for look-ups: each takes milliseconds, so more would only wait for the same processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Shared by all requests of one app.

    `limiter`: reads of gradients run in a thread of it, so many at a time; `quick`: all else that touches a disk, in
    threads of its own, so that a hung disk takes none of what the rest of the service needs. `held`: room for large
    answers.
    """

    settings: ServerSettings
    catalog: Catalog
    metrics: Metrics
    limiter: anyio.CapacityLimiter
    quick: anyio.CapacityLimiter
    held: anyio.CapacityLimiter

    @property
    def shared(self) -> bool:
        """Whether caches between may keep answers: not where a token is needed to get them."""
        return self.settings.token is None

    def lasts(self, run: str) -> bool:
        """Whether the id of a run names this one alone: a copy of its folder has the same, and may hold other bytes."""
        return self.catalog.count(run) == 1

    def place(self, run: str) -> LocalPlace:
        """The run of that name or id, ready for queries. Raises as `Catalog.open`."""
        opened = self.catalog.open(run)
        return LocalPlace(run=opened, label=opened.path.name)


def make_state(settings: ServerSettings, catalog: Catalog) -> State:
    """The state of a new app."""
    return State(
        settings=settings,
        catalog=catalog,
        metrics=Metrics(catalog),
        limiter=anyio.CapacityLimiter(settings.reads_at_once),
        quick=anyio.CapacityLimiter(QUICK_AT_ONCE),
        held=anyio.CapacityLimiter(settings.answers_at_once),
    )


def state_of(request: Request) -> State:
    """The state of the app that serves this request."""
    state = request.app.state.gradtap
    assert isinstance(state, State)
    return state


Here = Annotated[State, Depends(state_of)]
"""A parameter of a route that receives the state."""
