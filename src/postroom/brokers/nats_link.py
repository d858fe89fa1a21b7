"""One connection to NATS: the window of messages on their way, and the answers coming back.

Promise: each message it was told to expect gets exactly one outcome, and a link once lost stays
lost: bytes that were not sent by then never are.

The connection speaks to nats-py's private parts where its public ones do not serve, all in here:
`publish` builds headers so slowly that it halves the rate, messages are read as slowly, and `close`
alone waits for ever on a server that has stopped reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from postroom.brokers.base import Outcome, Transient, Unknown
from postroom.brokers.invoke import describe
from postroom.brokers.nats_wire import answer_of
from postroom.messages import Message

__all__ = ["Link", "Sending"]

_LOOK_SECONDS = 0.1
_SHUT_SECONDS = 1.0
_REFUSED = re.compile(r'permissions violation for publish to "([^"]+)"')
_closing: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly


class Sending:
    """One batch on its way: the outcomes known so far, and how many answers are awaited."""

    __slots__ = ("batch", "outcomes", "waiting")

    def __init__(self, batch: Sequence[Message]) -> None:
        self.batch = batch
        self.outcomes: list[Outcome | None] = [None] * len(batch)
        self.waiting = 0

    @property
    def answered(self) -> bool:
        return self.waiting == 0


class Link:
    """A connection, and what is on its way over it: at most about `max_rows` and `max_bytes`."""

    def __init__(self, client: Any, *, inbox: str, max_rows: int, max_bytes: int) -> None:
        self.client = client
        self.inbox = f"{inbox}.{uuid.uuid4().hex}"
        self.lost = False
        self.barred = False  # it may not listen to its own inbox
        self.error: Exception | None = None
        self.heard = 0  # signs of life so far
        self._subscription: Any = None
        self._prefix = f"{self.inbox}.".encode()
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._sent = 0
        self._waiting: dict[bytes, tuple[Sending, int, int]] = {}
        self._bytes = 0
        self._blocked = False
        self._loop = asyncio.get_running_loop()
        self._sleepers: list[asyncio.Future[None]] = []

    async def begin(self) -> None:
        """Listen for answers, and for the end of what keeps the connection going."""
        for name in ("_reading_task", "_flusher_task", "_ping_interval_task"):
            getattr(self.client, name).add_done_callback(self._on_ended)
        self._subscription = await self.client.subscribe(f"{self.inbox}.*", cb=self._on_message)
        self._take_from_here()

    def _take_from_here(self) -> None:
        """Let answers be taken where they are read from the socket."""
        from postroom.brokers.nats_reader import AnswerReader  # imports nats-py

        self.client._ps = AnswerReader(self.client._ps, self._prefix, self.on_answer)

    @property
    def alive(self) -> bool:
        return not self.lost and bool(self.client.is_connected)

    def awaited(self, sending: Sending) -> set[int]:
        """Which messages of a batch still lack their answer."""
        return {index for owner, index, _ in self._waiting.values() if owner is sending}

    # Outwards.

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._max_rows or self._bytes >= self._max_bytes

    def next_token(self) -> tuple[bytes, bytes]:
        """A token for one answer, and the reply subject that brings it."""
        self._sent += 1
        token = b"%d" % self._sent
        return token, self._prefix + token

    def expect(self, token: bytes, sending: Sending, index: int, size: int) -> None:
        """From now on an answer to this message is awaited."""
        self._waiting[token] = (sending, index, size)
        self._bytes += size
        sending.waiting += 1

    async def write(self, data: bytes, *, alone: bool = False) -> None:
        """Queue bytes for the socket; it does not wait for them to leave. With others that write
        now they go in one piece; `alone` there is nothing to wait for."""
        if alone:
            self.client._transport.write(data)
            return
        await self.client._send_command(data)
        await self.client._flush_pending()

    async def echo(self) -> None:
        """Ask for a sign of life: a message to ourselves, or the server's word that we may not."""
        await self.write(b"PUB %becho 0\r\n\r\n" % self._prefix)

    # Inwards.

    async def _on_message(self, message: Any) -> None:
        """What has headers, as the word that nobody takes a topic."""
        token = message.subject[len(self._prefix) :].encode()
        self.on_answer(token, message.data, message.headers)

    def on_answer(
        self, token: bytes, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.heard += 1
        entry = self._waiting.pop(token, None)
        if entry is None:  # an echo, or an answer that came too late
            self.wake()
            return
        sending, index, size = entry
        outcome = answer_of(data, headers, sending.batch[index].topic)
        self._settle(sending, index, size, outcome)
        if sending.waiting == 0 or (self._blocked and self._half_empty()):
            self.wake()

    async def on_error(self, error: Exception) -> None:
        """nats-py tells of trouble here, and so prints nothing."""
        self.error = error
        text = str(error).lower()
        if "permissions violation" not in text:
            return
        self.heard += 1
        if found := _REFUSED.search(text):
            refused = Transient("not_permitted", describe(error), down="topic")
            # nats-py has made the text lower case.
            self._settle_all(lambda message: message.topic.lower() == found[1], refused)
        elif "subscription" in text:
            self.barred = True
        self.wake()

    async def on_closed(self) -> None:
        self.lose()

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # nats-py does not look at it, and asyncio would print it
        self.lose()

    def lose(self) -> None:
        """The connection is gone: nobody knows what became of messages without an answer."""
        if not self.lost:
            self.lost = True
            why = f": {describe(self.error)}" if self.error else ""
            text = f"the connection was lost before the answer came{why}"
            self._settle_all(lambda _: True, Unknown("connection_lost", text, down="broker"))
            self.wake()

    def forget(self, sending: Sending) -> None:
        """Await no more answers for a batch, and give its place to others."""
        if sending.waiting:
            for token, (owner, _, size) in list(self._waiting.items()):
                if owner is sending:
                    del self._waiting[token]
                    self._bytes -= size
            sending.waiting = 0
        self.wake()

    # Waiting.

    async def until(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until something is so; False if it is not by the deadline or can no longer be."""
        while not ready():
            remaining = deadline - self._loop.time()
            if self.lost or remaining <= 0:
                return False
            # Should no call tell of the end, a look does.
            if self.client.is_closed:
                self.lose()
            else:
                await self._woken(min(remaining, _LOOK_SECONDS))
        return True

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

    async def until_room(self, deadline: float) -> bool:
        """Wait until the window is half empty again, so that writing goes on in large pieces."""
        self._blocked = True
        return await self.until(self._half_empty, deadline)

    def wake(self) -> None:
        """Let all who wait look again."""
        sleepers, self._sleepers = self._sleepers, []
        for waiter in sleepers:
            _rouse(waiter)

    # The end.

    def discard(self) -> None:
        """Throw the connection away, with whatever it has not sent."""
        self.lose()
        self.client._pending = []
        self.client._pending_data_size = 0
        self._abort()
        task = self._loop.create_task(self.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    async def close(self) -> None:
        """Close it in good order, or within a second without."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_SHUT_SECONDS):
                await self.client.close()
        self.lose()
        self._abort()
        if self._subscription is not None:  # a close that fails half-way leaves it running
            self._subscription._stop_processing()

    def _abort(self) -> None:
        writer = getattr(getattr(self.client, "_transport", None), "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    # Inside.

    def _half_empty(self) -> bool:
        return 2 * len(self._waiting) <= self._max_rows and 2 * self._bytes <= self._max_bytes

    def _settle(self, sending: Sending, index: int, size: int, outcome: Outcome) -> None:
        self._bytes -= size
        sending.waiting -= 1
        sending.outcomes[index] = outcome

    def _settle_all(self, which: Callable[[Message], bool], outcome: Outcome) -> None:
        for token, (sending, index, size) in list(self._waiting.items()):
            if which(sending.batch[index]):
                del self._waiting[token]
                self._settle(sending, index, size, outcome)


def _rouse(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
