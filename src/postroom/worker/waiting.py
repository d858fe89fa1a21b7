"""Waiting without being late for a stop, and coming to an end though one is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["finish", "pause", "undisturbed"]

T = TypeVar("T")
_under_way: set[asyncio.Task[Any]] = set()  # an event loop itself would forget them


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep, but not longer than until one must stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()


async def undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Let a statement on a shared link end by itself, though whoever asked is cancelled: a
    statement cut short would take the link from all the others."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Come to the end of something though one is cancelled meanwhile; that is said afterwards. Who
    is cancelled again does not wait for it any longer."""
    task = asyncio.ensure_future(work)
    _under_way.add(task)
    task.add_done_callback(_ended)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _ended(task: asyncio.Task[Any]) -> None:
    _under_way.discard(task)
    if not task.cancelled():
        task.exception()  # whoever waited has it; who has left does not want it
