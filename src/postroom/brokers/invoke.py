"""Running what may block or fail from a broker: in a thread of its own, its error as safe text."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from postroom.signals import redact

__all__ = ["describe", "in_thread"]

_TEXT_LIMIT = 500
T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work`, which must not raise, in a daemon thread; the future gets what it returns.

    Not in an executor: Python waits for an executor's threads when it exits, so one call that
    hangs would keep a stopped worker alive for ever. Cancelling the future does not stop the work.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def run() -> None:
        result = context.run(work)
        with contextlib.suppress(RuntimeError):  # the loop ended before the work did
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="postroom-broker", daemon=True).start()
    return future


def describe(error: BaseException) -> str:
    """The error as one short text without passwords."""
    name = type(error).__name__
    try:
        said = str(error)
    except Exception:
        said = "(its text cannot be read)"
    # Cut twice: first because redaction reads the whole text, last because it may lengthen it.
    text = redact(said[: 4 * _TEXT_LIMIT]).strip()
    return f"{name}: {text}"[:_TEXT_LIMIT] if text else name
