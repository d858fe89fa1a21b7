"""Waking relays of other processes: NOTIFY after commit, on a connection of its own.

Inside the caller's transaction a NOTIFY would make all commits take turns and forbid prepared
transactions. Here the first hint is sent immediately. Between hints there is a pause, paced by the
rate of commits: a short pause at a low rate, so that the relay sees each commit immediately, and a
long one at a high rate, because the relay is awake anyway and each NOTIFY costs the writers. A lost
hint costs a poll, never a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from postroom import signals
from postroom.databases.database import Database, WorkerLink
from postroom.databases.pooling import pooling
from postroom.errors import ConfigurationError

__all__ = ["Listener", "Notifier", "Pace", "listen"]

CHANNEL = "postroom"
QUIET_SECONDS = 0.001
BUSY_SECONDS = 0.02
BUSY_RATE = 400.0  # commits per second
WINDOW_SECONDS = 0.05
ALIVE_SECONDS = 15.0
AGAIN_SECONDS = 5.0


async def listen(link: WorkerLink, callback: Callable[[], None]) -> None:
    """Call back for every notification until the connection is lost."""
    driver = link.driver
    if hasattr(driver, "add_listener"):
        await driver.add_listener(CHANNEL, lambda *_: callback())
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            async with asyncio.timeout(ALIVE_SECONDS):
                await driver.fetchval("SELECT 1")
    await driver.execute(f"LISTEN {CHANNEL}")
    while True:
        async for _ in driver.notifies(timeout=ALIVE_SECONDS):
            callback()
        await driver.execute("SELECT 1")


class Listener:
    """Wakes one relay on notifications; without them polling goes on, so a loss costs only time."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        self._told = False
        if self._database.dialect != "postgresql":
            raise ConfigurationError(
                f"notify_url needs PostgreSQL, not {self._database.dialect}; leave it out: "
                "the relay polls"
            )

    async def run(self, callback: Callable[[], None]) -> None:
        """Call back for every notification, for ever, whatever becomes of the connection."""
        while True:
            try:
                await self._listen(callback)
            except Exception as error:
                # Whatever the driver raises when this connection goes: only a hint is lost.
                text = signals.redact(f"{type(error).__name__}: {error}")
                signals.emit("notify.lost", error=text)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _listen(self, callback: Callable[[], None]) -> None:
        link = await self._database.connect()
        try:
            if link.pooled and (mode := await pooling(self._database)) != "session":
                await link.close()
                await self._stay_silent(mode)
            await listen(link, callback)
        finally:
            await link.close()

    async def _stay_silent(self, mode: str) -> None:
        """A pooler would hand what we listen for to somebody else, so it is said once and left."""
        if not self._told:
            self._told = True
            signals.emit(
                "notify.pooled",
                database=self._database.target.safe,
                pooling=mode,
                advice="LISTEN does not pass this pooler, so the relay polls; "
                "set notify_url to a URL of the server itself",
            )
        await asyncio.get_running_loop().create_future()


class Notifier:
    """Sends the hints of one process, from a thread of its own. Started at the first hint."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        if self._database.dialect != "postgresql":
            raise ConfigurationError(
                f"notify needs PostgreSQL, not {self._database.dialect}; leave it out: relays poll"
            )
        self._lock = threading.Lock()
        self._pid = 0
        self._commits = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted: asyncio.Event | None = None

    def hint(self) -> None:
        """Something was committed. Returns at once."""
        self._commits += 1  # threads may lose a count to each other: it paces hints, no more
        if self._pid != os.getpid():
            self._start()
        loop, wanted = self._loop, self._wanted
        if loop is not None and wanted is not None and not wanted.is_set():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wanted.set)

    def _start(self) -> None:
        # After a fork the thread is gone, so the child starts its own.
        with self._lock:
            if self._pid == os.getpid():
                return
            ready = threading.Event()
            thread = threading.Thread(
                target=self._run, args=(ready,), name="postroom notify", daemon=True
            )
            thread.start()
            ready.wait(1)
            self._pid = os.getpid()

    def _run(self, ready: threading.Event) -> None:
        asyncio.run(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._wanted = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        while True:
            await self._wanted.wait()
            try:
                link = await self._database.connect()
                try:
                    await self._notify_with(link.driver)
                finally:
                    await link.close()
            except Exception as error:
                text = signals.redact(f"{type(error).__name__}: {error}")
                signals.emit("notify.lost", error=text)
            self._wanted.clear()
            await asyncio.sleep(1)

    async def _notify_with(self, driver: Any) -> None:
        assert self._wanted is not None
        pace = Pace(time.monotonic(), self._commits)
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            async with asyncio.timeout(ALIVE_SECONDS):
                await driver.execute(f"NOTIFY {CHANNEL}")
            await asyncio.sleep(pace.after(time.monotonic(), self._commits))


class Pace:
    """The pause after each hint, by the rate of commits over the last window."""

    def __init__(self, now: float = 0.0, commits: int = 0) -> None:
        self._since, self._before = now, commits
        self._pause = QUIET_SECONDS

    def after(self, now: float, commits: int) -> float:
        """Return the seconds to pause after a hint; `commits` is the number of all commits."""
        seconds = now - self._since
        if seconds >= WINDOW_SECONDS:
            busy = commits - self._before > BUSY_RATE * seconds
            self._pause = BUSY_SECONDS if busy else QUIET_SECONDS
            self._since, self._before = now, commits
        return self._pause
