"""How a recorder speaks once attach has returned: a warning once for each kind of failure, or `CaptureError`."""

from __future__ import annotations

import logging
import sys
import threading

from gradtap.errors import CaptureError

logger = logging.getLogger("gradtap")


class Voice:
    """Warns through the logger `gradtap`; with `raise_errors`, failures are raised instead. For any thread."""

    def __init__(self, *, raise_errors: bool) -> None:
        self.raise_errors = raise_errors
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, message: str) -> None:
        """Say what goes as it should: to the logger where the program has set logging up, else to standard error."""
        if logging.getLogger().handlers or logger.handlers:
            logger.info("%s", message)
        elif sys.stderr is not None:
            sys.stderr.write(f"[gradtap] {message}\n")
            sys.stderr.flush()

    def report(self, message: str) -> None:
        """Say a message."""
        logger.warning("gradtap: %s", message)

    def once(self, kind: str, message: str) -> None:
        """Say a message, unless one of its kind has been said."""
        with self._lock:
            fresh = kind not in self._said
            self._said.add(kind)
        if fresh:
            self.report(message)

    def failed(self, kind: str, message: str, error: Exception | None = None) -> None:
        """Say a failure once for its kind; raises `CaptureError` from `error` with `raise_errors`."""
        if self.raise_errors:
            raise error if isinstance(error, CaptureError) else CaptureError(message) from error
        self.once(kind, message)
