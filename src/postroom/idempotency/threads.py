"""Threads of our own for what an event loop has done in threads.

Those who wait for another's transaction must not sit in the threads which that transaction needs to
come to its end: its route has the framework's threads, claims have theirs, and so have answers.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from postroom.idempotency.forks import renewed_in_child

__all__ = ["answering", "claiming"]

T = TypeVar("T")
THREADS = 40


class _Threads:
    """Started when first needed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.renew()
        renewed_in_child(self)

    def renew(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"postroom-{self._what}")


_claims, _answers = _Threads("claims"), _Threads("answers")


async def claiming(work: Callable[[], T]) -> T:
    """Do what may wait for another request with the same key."""
    return await _in(_claims.threads, work)


async def answering(work: Callable[[], T]) -> T:
    """Do what waits for no other request: commit, roll back, give a connection back."""
    return await _in(_answers.threads, work)


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads, lambda: context.run(work))
