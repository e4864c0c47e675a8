"""Hooks and instance patches that are counted, and removed without a trace. Knows no engine."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from gradtap.errors import AttachError

logger = logging.getLogger("gradtap")


class Handle(Protocol):
    """What torch returns for a registered hook."""

    def remove(self) -> None:
        """Take the hook away."""


class PatchSet:
    """The hooks and patched attributes of one attachment.

    A patch lives in the instance's `__dict__`, so the class and other instances stay as they are. Should someone patch
    over ours, ours cannot be taken out from under it: it stays, inert, and `remove` warns of it.
    """

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self._patched: list[tuple[Any, str, Any, bool, Any]] = []
        self.active = True

    def __len__(self) -> int:
        return len(self._handles) + len(self._patched)

    def hook(self, handle: Handle) -> None:
        """Keep a registered hook for removal."""
        self._handles.append(handle)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace method `name` of the instance `owner` by `make(original)` until `remove`."""
        original = getattr(owner, name)
        replacement = make(original)

        # Accelerate looks at signatures to see what it may pass on.
        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.active else original)(*args, **kwargs)

        had = name in vars(owner)
        self._patched.append((owner, name, vars(owner).get(name), had, guarded))
        vars(owner)[name] = guarded

    def remove(self) -> tuple[str, ...]:
        """Undo everything, newest first; names of patches that another patch covers and that stay, inert."""
        self.active = False
        stuck = []
        while self._patched:
            owner, name, before, had, ours = self._patched.pop()
            if vars(owner).get(name) is not ours:
                stuck.append(f"{type(owner).__name__}.{name}")
            elif had:
                vars(owner)[name] = before
            else:
                del vars(owner)[name]
        while self._handles:
            self._handles.pop().remove()
        if stuck:
            logger.warning(
                "gradtap: detached, but other code has patched over %s: that patch is left in place and works as "
                "before; gradtap's own below it does nothing any more",
                ", ".join(stuck),
            )
        return tuple(stuck)


_ATTACHED: weakref.WeakSet[Any] = weakref.WeakSet()


def check_free(target: Any) -> None:
    """Raises `AttachError` where `target` (an engine or a torch optimizer) is listened to already."""
    if target in _ATTACHED:
        raise AttachError(
            f"gradtap is attached to this {type(target).__name__} already; one recorder at a time: "
            "call close() on the first, or drop the second attach"
        )


def claim(target: Any) -> None:
    """Mark `target` as listened to. Raises `AttachError` where it is already."""
    check_free(target)
    _ATTACHED.add(target)


def release(target: Any) -> None:
    """Undo `claim`."""
    _ATTACHED.discard(target)
