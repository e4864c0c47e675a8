"""A tap that begins when a trainer begins: checked at once, attached later, closed with the training.

Shared by `gradtap.hf` and `gradtap.lightning`; knows neither.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from gradtap.errors import AttachError
from gradtap.options import check_options
from gradtap.tap import Tap, attach


class PendingTap:
    """The recorder of a trainer's next training. `tap` is the attached recorder, None before and after.

    Made with the arguments of `attach` but its target. Raises `UsageError` as `attach` does, at once.
    """

    def __init__(self, store: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        given = inspect.signature(attach).bind(None, store, **options)
        given.apply_defaults()
        given.arguments.pop("target")
        self._path = str(check_options(**given.arguments).store)
        self._store, self._options = store, dict(options)
        self._closed = False
        self._last = ""
        self.tap: Tap | None = None

    @property
    def path(self) -> str:
        """The folder of the run."""
        return self._path

    @property
    def session(self) -> str:
        """Name of the session that is recorded, or was last; empty before the first."""
        return self._last

    def begin(self, target: Any, *, first_step: int | None = None) -> Tap | None:
        """Attach to `target`; `first_step` holds where the options name none. None after `close`.

        A session that an earlier training left open is closed first. Raises as `attach`.
        """
        self.end()
        if self._closed:
            return None
        options = {"first_step": first_step} | {k: v for k, v in self._options.items() if v is not None}
        self.tap = attach(target, self._store, **options)
        self._last = self.tap.session
        return self.tap

    def end(self, error: BaseException | None = None) -> None:
        """The training has ended, in `error` where one is given: close the session, without a long wait then."""
        tap, self.tap = self.tap, None
        if tap is not None:
            tap.__exit__(None if error is None else type(error), error, None)

    def log(self, **tags: Any) -> None:
        """Keep tags with the current step, as `Tap.log`. Raises `AttachError` where no training is being recorded."""
        if self.tap is None:
            raise AttachError(f"tags {sorted(tags)} were logged while no training is recorded; log them while it runs")
        self.tap.log(**tags)

    def close(self) -> None:
        """End the session, and record no further training. Safe to call twice."""
        self._closed = True
        self.end()

    def __enter__(self) -> PendingTap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._closed = True
        self.end(error)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "waiting for a training" if self.tap is None else "recording"
        return f"<gradtap tap of a trainer, {state}: {self.path}>"
