"""What is still to be done about a key when the database answers again.

A claim that was given up may have reached a database that did not answer. It would hold its key
though nobody carries anything out, so whoever gave it up looks for it for a while, and undoes it.
Should that fail, the key is told indeterminate once the lease is over: nothing is done twice.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from postroom.errors import PostroomError

if TYPE_CHECKING:
    from postroom.idempotency.engines import Engines

__all__ = ["Afterwards"]

PAUSE_SECONDS = 1.0
LOOKS = 3  # what it was asked, it may do a moment after it has answered others
LONGEST_SECONDS = 900.0


class Afterwards:
    """There are never more of them than connections on which something was asked in vain."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._closing = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def in_thread(self, make: Any) -> None:
        """Run the flow that `make()` gives, a few times, once the database answers."""
        work = threading.Thread(
            target=self._run, args=(make, self._closing), daemon=True, name="postroom-afterwards"
        )
        work.start()

    def in_loop(self, make: Any) -> None:
        """The same in the event loop that runs."""
        task = asyncio.ensure_future(self._run_async(make))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_async(self) -> None:
        """Do no more of it in this event loop."""
        loop = asyncio.get_running_loop()
        mine = [task for task in self._tasks if task.get_loop() is loop]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

    def end(self) -> None:
        """Do no more of it in threads."""
        self._closing.set()
        self._closing = threading.Event()

    def _run(self, make: Any, closing: threading.Event) -> None:
        looks, until = LOOKS, time.monotonic() + LONGEST_SECONDS
        while looks and time.monotonic() < until and not closing.wait(PAUSE_SECONDS):
            with suppress(PostroomError):
                self._engines.ask(make)
                looks -= 1

    async def _run_async(self, make: Any) -> None:
        looks, until = LOOKS, time.monotonic() + LONGEST_SECONDS
        while looks and time.monotonic() < until:
            await asyncio.sleep(PAUSE_SECONDS)
            with suppress(PostroomError):
                await self._engines.ask_async(make)
                looks -= 1
