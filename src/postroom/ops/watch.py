"""`postroom status --watch`: look again and again, and go on while the database is away."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.errors import PostroomError
from postroom.ops.status import Rates, look

__all__ = ["Frame", "frames", "until_told"]

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
TREND_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One look. `error` says why there is none; `state` is then the last one there was."""

    at: dt.datetime
    state: dict[str, Any]
    rates: dict[str, float]
    backlog: tuple[float, ...]
    error: str | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The frame for programs."""
        at = self.at.isoformat(timespec="milliseconds")
        if self.error:
            return {"at": at, "error": self.error}
        return {"at": at, **self.state, "rates": self.rates}


class _Stopped(Exception):
    """Told to stop in the middle of a look."""


async def frames(
    url: str, *, interval_seconds: float, stopping: asyncio.Event
) -> AsyncIterator[Frame]:
    """A look every interval until `stopping`. The first must succeed: a wrong URL is said."""
    database = Database(url, timeout_seconds=PATIENCE_SECONDS)
    rates = Rates()
    shown: dict[str, Any] = {}
    speed: dict[str, float] = {}
    backlog: deque[float] = deque(maxlen=max(2, min(60, int(TREND_SECONDS / interval_seconds))))
    link: WorkerLink | None = None
    try:
        while not stopping.is_set():
            begun, error = time.monotonic(), None
            try:
                if link is None:
                    link = await _unless(stopping, database.connect())
                shown = await _unless(stopping, look(link))
                speed = rates.add(shown)
                backlog.append(shown["pending"] + shown["held"])
            except _Stopped:
                return
            except (DatabaseLost, PostroomError) as trouble:
                told = database.explain(trouble)
                if not shown:
                    raise told from trouble
                error = str(told)
                if link is not None:
                    await link.close()
                link = None
            yield Frame(dt.datetime.now(dt.UTC), shown, speed, tuple(backlog), error)
            with contextlib.suppress(TimeoutError):
                left = interval_seconds - (time.monotonic() - begun)
                await asyncio.wait_for(stopping.wait(), max(0.01, left))
    finally:
        if link is not None:
            await link.close()


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but leave it when told to stop: a database that hangs keeps nobody here."""
    task = asyncio.ensure_future(work)
    told = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Stopped
    finally:
        for each in (task, told):
            each.cancel()
        await asyncio.gather(task, told, return_exceptions=True)


@contextlib.contextmanager
def until_told(stopping: asyncio.Event, *, keys: bool) -> Iterator[None]:
    """Stop at Ctrl-C and SIGTERM, and with `keys` at the key q; the terminal is left as it was."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # elsewhere Ctrl-C interrupts the loop
            loop.add_signal_handler(number, stopping.set)
    restore = _listen_for_q(loop, stopping) if keys else None
    try:
        yield
    finally:
        if restore is not None:
            restore()


def _listen_for_q(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> Any:
    try:
        import termios
        import tty
    except ImportError:
        return None
    if not sys.stdin.isatty():
        return None
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    tty.setcbreak(handle)

    def pressed() -> None:
        key = os.read(handle, 1)
        if key in (b"q", b"Q"):
            stopping.set()
        elif not key:
            loop.remove_reader(handle)

    loop.add_reader(handle, pressed)

    def restore() -> None:
        loop.remove_reader(handle)
        termios.tcsetattr(handle, termios.TCSADRAIN, before)

    return restore
