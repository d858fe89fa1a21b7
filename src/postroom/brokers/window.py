"""The messages on their way over one connection: so many at once, and an answer for each.

Promise: each message a window was told to expect gets exactly one outcome, and a window once lost
stays lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from postroom.brokers.base import Outcome, Unknown
from postroom.messages import Message

__all__ = ["MAX_OUTSTANDING", "MAX_OUTSTANDING_BYTES", "Sending", "Window"]

MAX_OUTSTANDING = 4096
MAX_OUTSTANDING_BYTES = 16 * 1024 * 1024
_LOOK_SECONDS = 0.1


class Sending:
    """One batch on its way: the outcomes known so far, and how many answers are awaited."""

    __slots__ = ("batch", "outcomes", "waiting")

    def __init__(self, batch: Sequence[Message], size: int | None = None) -> None:
        self.batch = batch
        self.outcomes: list[Outcome | None] = [None] * (len(batch) if size is None else size)
        self.waiting = 0

    @property
    def answered(self) -> bool:
        return self.waiting == 0


class Window:
    """What awaits its answer, by the number it was sent under: at most about so much of it."""

    def __init__(self, *, max_rows: int, max_bytes: int) -> None:
        self.lost = False
        self.error: BaseException | None = None
        self.heard = 0  # signs of life so far
        self.waiting: dict[int, tuple[Sending, int, int]] = {}
        self.bytes = 0
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._blocked = False
        self._loop = asyncio.get_running_loop()
        self._sleepers: list[asyncio.Future[None]] = []

    @property
    def full(self) -> bool:
        return len(self.waiting) >= self._max_rows or self.bytes >= self._max_bytes

    def expect(self, number: int, sending: Sending, index: int, size: int) -> None:
        """From now on an answer to this message is awaited."""
        self.waiting[number] = (sending, index, size)
        self.bytes += size
        sending.waiting += 1

    def awaited(self, sending: Sending) -> set[int]:
        """Which messages of a batch still lack their answer."""
        return {index for owner, index, _ in self.waiting.values() if owner is sending}

    # Answers.

    def settle(self, number: int, outcome: Outcome) -> None:
        """The answer to one message. One that nobody awaits any more is nothing."""
        entry = self.waiting.pop(number, None)
        if entry is None:
            return
        sending, index, size = entry
        self.bytes -= size
        sending.waiting -= 1
        sending.outcomes[index] = outcome
        if sending.waiting == 0 or (self._blocked and self._half_empty()):
            self.wake()

    def settle_all(self, judge: Callable[[Message | None], Outcome | None]) -> None:
        """Answer for whatever `judge` has an outcome for; it gets None for what is no message."""
        for number, (sending, index, _) in list(self.waiting.items()):
            if outcome := judge(sending.batch[index] if sending.batch else None):
                self.settle(number, outcome)

    def forget(self, sending: Sending) -> None:
        """Await no more answers for a batch, and give its place to others."""
        if sending.waiting:
            for number, (owner, _, size) in list(self.waiting.items()):
                if owner is sending:
                    del self.waiting[number]
                    self.bytes -= size
            sending.waiting = 0
        self.wake()

    def lose(self, why: str = "") -> None:
        """The connection is gone: nobody knows what became of messages without an answer."""
        if not self.lost:
            self.lost = True
            text = f"the connection was lost before the answer came{f': {why}' if why else ''}"
            unknown = Unknown("connection_lost", text, down="broker")
            self.settle_all(lambda _: unknown)
            self.wake()

    # Waiting.

    async def until(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until something is so; False if it is not by the deadline or can no longer be."""
        while not ready():
            remaining = deadline - self._loop.time()
            if self.lost or remaining <= 0:
                return False
            await self._woken(min(remaining, _LOOK_SECONDS))
        return True

    async def until_room(self, deadline: float) -> bool:
        """Wait until the window is half empty again, so that writing goes on in large pieces."""
        self._blocked = True
        return await self.until(self._half_empty, deadline)

    async def _woken(self, seconds: float) -> None:
        """Wait for `wake`, or so many seconds. Each who waits has a future of its own, so that one
        who is cancelled disturbs no other."""
        waiter = self._loop.create_future()
        self._sleepers.append(waiter)
        timer = self._loop.call_later(seconds, _rouse, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def wake(self) -> None:
        """Let all who wait look again."""
        sleepers, self._sleepers = self._sleepers, []
        for waiter in sleepers:
            _rouse(waiter)

    def _half_empty(self) -> bool:
        return 2 * len(self.waiting) <= self._max_rows and 2 * self.bytes <= self._max_bytes


def _rouse(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
