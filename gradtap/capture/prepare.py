"""Who prepares what: `Accelerator.prepare`, listened to at the class while somebody wants to know.

A callback of a trainer, or a script that nobody edits, has no other way to the Accelerator. The class is as it was once
the last listener has gone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

Told = Callable[[Any], None]
"""Called with an Accelerator after each of its calls of `prepare`."""


class PrepareWatch:
    """The one patch of `Accelerator.prepare`, and who is told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Told] = []
        self._original: Any = None
        self._ours: Any = None

    def add(self, told: Told) -> Callable[[], None]:
        """Tell `told` of every prepare from now on; gives the function that ends it (and may be called twice)."""
        with self._lock:
            if not self._listeners:
                self._patch()
            self._listeners.append(told)
        return functools.partial(self._drop, told)

    def _drop(self, told: Told) -> None:
        with self._lock:
            if told in self._listeners:
                self._listeners.remove(told)
                if not self._listeners:
                    self._restore()

    def _patch(self) -> None:
        from accelerate import Accelerator

        original = Accelerator.prepare

        @functools.wraps(original)
        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(accelerator, *args, **kwargs)
            for told in tuple(self._listeners):
                told(accelerator)
            return result

        self._original, self._ours = original, prepare
        Accelerator.prepare = prepare

    def _restore(self) -> None:
        from accelerate import Accelerator

        # Should another have patched over ours, ours stays below it and tells nobody.
        if vars(Accelerator).get("prepare") is self._ours:
            Accelerator.prepare = self._original


watch_prepare = PrepareWatch().add
