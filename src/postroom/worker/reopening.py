"""Opening what a worker lost: one back-off for databases and brokers, of relays and consumers.

Promise: a worker that has started outlives any outage. Whatever an attempt raises is reported and
followed by another attempt; only errors that need a person end the worker.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from postroom.worker.waiting import pause

__all__ = ["reopen"]

T = TypeVar("T")
FIRST_SECONDS = 0.1
MOST_SECONDS = 5.0


async def reopen(
    attempt: Callable[[], Awaitable[T]],
    *,
    stopping: asyncio.Event,
    report: Callable[[Exception, float], None],
    cause: Exception | None = None,
    failures: int = 0,
    final: tuple[type[Exception], ...] = (),
) -> T | None:
    """Return the result of the first attempt that succeeds; None if `stopping` is set before.

    `report` receives each error and the seconds until the next attempt, first of all `cause`, the
    loss itself. The pauses grow with `failures`. Errors of the types in `final` are raised.
    """
    while True:
        seconds = min(FIRST_SECONDS * 2.0 ** min(failures, 10), MOST_SECONDS)
        seconds *= 0.5 + random.random() / 2
        if cause is not None:
            report(cause, round(seconds, 3))
        await pause(stopping, seconds)
        if stopping.is_set():
            return None
        try:
            return await attempt()
        except final:
            raise
        except Exception as error:
            cause, failures = error, failures + 1
