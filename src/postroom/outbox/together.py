"""Concurrent asks served together: sixteen lanes cost one statement, not sixteen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from postroom.config import RelaySettings

__all__ = ["Budget", "Gate", "Pulse", "Together"]

A = TypeVar("A")
R = TypeVar("R")


class Together(Generic[A, R]):
    """Whoever asks while a call is under way shares the next one.

    `serve` takes all that wait and answers each in order. If it fails, all of them fail.
    `invite` is called before each call, for others that may want to share it.
    """

    def __init__(
        self,
        serve: Callable[[Sequence[A]], Awaitable[Sequence[R]]],
        invite: Callable[[], None] = lambda: None,
    ) -> None:
        self._serve = serve
        self._invite = invite
        self._waiting: list[tuple[A, asyncio.Future[R]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def ask(self, item: A) -> R:
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await future

    async def close(self) -> None:
        """End whatever is under way; its askers are cancelled."""
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner

    async def _run(self) -> None:
        try:
            while self._waiting:
                self._invite()
                # One turn of the loop, so that lanes that woke together ask together.
                await asyncio.sleep(0)
                served = [pair for pair in self._waiting if not pair[1].done()]
                self._waiting = []
                if served:
                    await self._serve_these(served)
        finally:
            self._runner = None
            for _, future in self._waiting:
                future.cancel()

    async def _serve_these(self, served: list[tuple[A, asyncio.Future[R]]]) -> None:
        try:
            answers = await self._serve([item for item, _ in served])
        except asyncio.CancelledError:
            for _, future in served:
                future.cancel()
            raise
        except Exception as error:
            for _, future in served:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), answer in zip(served, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


PARTS = 4  # as many as there are steps in a batch's way


class Budget:
    """How much may be in memory at once, in rows and bytes; each lane has one batch of it."""

    def __init__(self, limits: RelaySettings) -> None:
        self._rows, self._bytes = limits.in_flight_rows, limits.in_flight_bytes
        self._batch_rows, self._batch_bytes = limits.batch_rows, limits.batch_bytes
        self._taken: dict[int, tuple[int, int]] = {}
        self._freed = asyncio.Event()

    @property
    def left(self) -> tuple[int, int]:
        """The rows and bytes that may still be taken."""
        return self._rows - self.rows, self._bytes - sum(size for _, size in self._taken.values())

    @property
    def rows(self) -> int:
        """The rows that lanes have in memory now; may be asked from any thread."""
        return sum(rows for rows, _ in list(self._taken.values()))

    async def portion(self, lanes: int) -> tuple[int, int, int]:
        """Wait until there is room, and say how much of it so many lanes may read now: rows of each
        lane, rows in all, and bytes in all. A read brings one row at least.

        The lanes that work share the whole, and it is read in parts: while one is read, others are
        written into the journal, sent and settled.
        """
        while min(self.left) <= 0:
            self._freed.clear()
            await self._freed.wait()
        rows, size = self.left
        each = min(self._batch_rows, rows, max(1, self._rows // (lanes + len(self._taken))))
        return each, min(rows, max(each, self._rows // PARTS)), min(size, self._batch_bytes)

    def take(self, lane: int, rows: int, size: int) -> None:
        """The lane has read its next batch; whatever it had before is over."""
        self._taken[lane] = (rows, size)

    def give(self, lane: int) -> None:
        """The lane's batch is settled, or void."""
        self._taken.pop(lane, None)
        self._freed.set()


class Gate:
    """Many may send together, or one suspect alone."""

    def __init__(self) -> None:
        self._inside = 0
        self._alone = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._alone:
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._alone:
            await self._empty.wait()
            yield


class Pulse:
    """When to look again: soon after work was found, ever later when idle, at once on a hint."""

    def __init__(self, shortest_seconds: float, longest_seconds: float) -> None:
        self._shortest = shortest_seconds
        self._longest = longest_seconds
        self._pause = shortest_seconds
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.hints = 0

    async def wait(self, seen: int) -> None:
        """Return at the next beat; all waiters wake together. `seen` is the value of `hints` before
        the caller looked: a hint that came since then is not lost: return immediately."""
        if self.hints != seen:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(self._pause, self._beat)
            self._pause = min(self._pause * 2, self._longest)
        future = loop.create_future()
        self._waiters.add(future)
        try:
            await future
        finally:
            self._waiters.discard(future)

    def busy(self) -> None:
        """There was work: look again soon."""
        self._pause = self._shortest

    def hint(self) -> None:
        """Something was committed, or should be looked at: everyone wakes now."""
        self._pause = self._shortest
        self.hints += 1
        self._beat()

    def share(self, under_way: int) -> None:
        """Let the waiters share a read that is made anyway, while messages are in flight: hints are
        rare then, and a read costs little more for all lanes. The next beat stays when it is."""
        if under_way:
            self._wake()

    def _beat(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
