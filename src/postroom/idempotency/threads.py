"""Threads of our own for what an event loop has done in threads.

Those who wait for another's transaction must not sit in the threads which that transaction needs to
come to its end: its route has the framework's threads, claims have theirs, and so have answers.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

__all__ = ["answering", "claiming"]

T = TypeVar("T")
THREADS = 40


@cache
def _threads(what: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix=f"postroom-{what}")


async def claiming(work: Callable[[], T]) -> T:
    """Do what may wait for another request with the same key."""
    return await _in(_threads("claims"), work)


async def answering(work: Callable[[], T]) -> T:
    """Do what waits for no other request: commit, roll back, give a connection back."""
    return await _in(_threads("answers"), work)


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads, lambda: context.run(work))
