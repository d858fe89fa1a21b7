"""Whether a worker lives and whether it can work; two questions with two answers.

Healthy: its event loop turns and its background tasks move. Only a restart mends the contrary.
Ready: besides, the database and the brokers can be reached. A restart mends nothing of that.

Read from other threads while the loop may be stuck, so it holds plain values and no locks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from postroom.databases.database import WorkerLink

__all__ = ["Health", "Vitals"]

LOOP_SECONDS = 5.0
TASK_SECONDS = 8.0
SILENT_SECONDS = 5.0
BEAT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Health:
    """What is wrong, in sentences without secrets; nothing is best."""

    unhealthy: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()  # what cannot be sent while the rest flows

    @property
    def healthy(self) -> bool:
        """Whether the process works; a restart would help where it does not."""
        return not self.unhealthy

    @property
    def ready(self) -> bool:
        """Whether messages can flow."""
        return not self.unhealthy and not self.unready


class Vitals:
    """When the loop and each background task of a worker last moved."""

    def __init__(self, kind: str = "relay", clock: Callable[[], float] = time.monotonic) -> None:
        self._kind = kind
        self._clock = clock
        self._loop_at: float | None = None
        self._ended: str | None = None
        self._tasks: dict[str, tuple[asyncio.Task[Any], Callable[[], WorkerLink] | None]] = {}
        self._beats: dict[str, float] = {}

    async def keep_beating(self) -> None:
        """Show that the loop turns."""
        self._ended = None
        while True:
            self._loop_at = self._clock()
            await asyncio.sleep(BEAT_SECONDS)

    def add(
        self, task: asyncio.Task[Any], link: Callable[[], WorkerLink] | None = None
    ) -> asyncio.Task[Any]:
        """Watch over a task until it is forgotten. One that beats may be slow on its `link`."""
        self._tasks[task.get_name()] = (task, link)
        return task

    def forget(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """They end because they should."""
        for task in tasks:
            self._tasks.pop(task.get_name(), None)
            self._beats.pop(task.get_name(), None)

    def beat(self, name: str) -> None:
        """The task of this name has come round once more."""
        self._beats[name] = self._clock()

    def end(self, why: str) -> None:
        """The worker works no more."""
        self._ended = why

    @property
    def started(self) -> bool:
        """Whether the worker has begun to work."""
        return self._loop_at is not None

    def wrong(self) -> list[str]:
        """What only a restart would mend."""
        if self._ended is not None:
            return [f"the {self._kind} has ended: {self._ended}"]
        now, found = self._clock(), []
        if self._loop_at is not None and now - self._loop_at > LOOP_SECONDS:
            # Nothing else can move then, and it is no other task's fault.
            return [f"the event loop has not turned for {now - self._loop_at:.0f} s"]
        for name, (task, _) in list(self._tasks.items()):
            if task.done():
                found.append(f"the background task {name!r} has ended")
        for name, at in list(self._beats.items()):
            _, link = self._tasks.get(name, (None, None))
            if now - at > TASK_SECONDS and not (link is not None and _waits(link())):
                found.append(f"the background task {name!r} has not moved for {now - at:.0f} s")
        return found


def _waits(link: WorkerLink) -> bool:
    """Whether the database is to blame: it keeps a statement waiting, or has gone."""
    return link.lost or link.asked_at is not None
