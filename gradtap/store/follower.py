"""The thread on rank 0 that makes complete captures visible, keeps the lock alive, and finishes the session."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from gradtap import words
from gradtap.config import Settings
from gradtap.store.lock import RunLock
from gradtap.store.paths import SessionPaths
from gradtap.store.publisher import Publisher
from gradtap.store.session import SessionHead, write_head
from gradtap.types import Report

CLOSE_POLL = 0.05
"""Seconds between two looks for the other ranks' closed marks."""

BUSY_SHARE = 10
"""The follower rests this many times as long as a round took: with many ranks it must not eat a core."""


class Follower:
    """Runs a `Publisher` at most once an interval. A failed round is reported once and tried again."""

    def __init__(
        self, paths: SessionPaths, head: SessionHead, *, settings: Settings, report: Report, lock: RunLock | None
    ) -> None:
        self._paths, self._head, self._settings, self._report, self._lock = paths, head, settings, report, lock
        self._publisher = Publisher(paths, head, settings=settings, report=report)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="gradtap-follower", daemon=True)
        self._seen: set[str] = set()
        self._beat = time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Publish to the end, then seal, trim and close the session, where all ranks closed their journals.

        Waits for the other ranks as long as they make progress, `timeout` seconds after the last of it.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._finish(timeout)
        except Exception as error:
            self._say_once(f"finishing the session failed: {error}; it stays readable: {self._paths.run}")
        finally:
            self._publisher.close()

    def discard(self) -> None:
        """Give files back without having started."""
        self._publisher.close()

    def _finish(self, timeout: float) -> None:
        if missing := self._wait_closed(timeout):
            self._round()
            self._report(
                f"{words.ranks(missing)} did not close the recorder within {timeout:g} s; the session stays open on "
                f"disk and readable: {self._paths.run}"
            )
            return
        if self._round():
            self._publisher.trim()
            write_head(self._paths, replace(self._head, closed=time.time()))
            self._publisher.seal()

    def _work(self) -> None:
        rest = self._settings.follow_interval
        while not self._stop.wait(rest):
            begun = time.monotonic()
            self._round()
            self._heartbeat()
            rest = max(self._settings.follow_interval, BUSY_SHARE * (time.monotonic() - begun))

    def _round(self) -> bool:
        """Publish all there is; False where that failed."""
        try:
            while self._publisher.publish():
                self._heartbeat()
            return True
        except Exception as error:
            # Whatever it is: the thread must live on, for it also keeps the lock.
            self._say_once(f"publishing completed captures failed: {error}; they stay readable from the journals")
            return False

    def _heartbeat(self) -> None:
        if self._lock is None or time.monotonic() - self._beat < self._settings.heartbeat:
            return
        self._beat = time.monotonic()
        try:
            self._lock.heartbeat()
        except Exception as error:
            self._say_once(f"the run's lock could not be kept: {error}")

    def _wait_closed(self, timeout: float) -> list[int]:
        progress, since = self._publisher.progress(), time.monotonic()
        while missing := self._publisher.unclosed():
            if (now := self._publisher.progress()) != progress:
                progress, since = now, time.monotonic()
            # Other ranks may write for long: the lock must not grow stale, nor readers wait for it.
            self._heartbeat()
            self._round()
            if time.monotonic() - since > timeout:
                return missing
            time.sleep(CLOSE_POLL)
        return []

    def _say_once(self, message: str) -> None:
        if message not in self._seen:
            self._seen.add(message)
            self._report(message)
