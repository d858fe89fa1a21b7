"""The hint that something was committed, for whoever in this process wants to look at once.

A hint is only that: it may come a moment before the commit is visible, come for nothing, or not
come at all. It costs or saves a poll, never a message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from postroom import signals

__all__ = ["committed", "hint", "listen"]

_log = logging.getLogger("postroom")
_lock = threading.Lock()
_callbacks: tuple[Callable[[], None], ...] = ()


def listen(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` after commits, from the committing thread; returns a function that ends it.

    It must be quick and must not block: the caller's request waits for it.
    """
    global _callbacks
    with _lock:
        _callbacks = (*_callbacks, callback)

    def unlisten() -> None:
        global _callbacks
        with _lock:
            _callbacks = tuple(known for known in _callbacks if known is not callback)

    return unlisten


def committed(count: int, *, hinted: bool = False) -> None:
    """So many messages were committed, for certain: count them, and hint unless that was done."""
    if count:
        signals.emit("message.committed", count=count)
        if not hinted:
            hint()


def hint() -> None:
    """Tell every listener that something was committed. One that fails does not disturb."""
    for callback in _callbacks:
        try:
            callback()
        except Exception:
            _log.exception("a listener of committed messages failed")
