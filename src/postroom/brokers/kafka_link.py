"""One producer of librdkafka: the window of messages on their way, and their reports coming back.

Promise: each message it was told to send gets exactly one outcome, and a link once discarded sends
nothing more.

librdkafka sends from threads of its own and keeps reports until `poll` is called. It is called from
the event loop, while anything is on its way: what is reported is settled where it is used, without
a hand-over between threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from postroom.brokers.base import DELIVERED, Outcome, Permanent, Transient
from postroom.brokers.invoke import describe
from postroom.brokers.kafka_wire import ALL_BROKERS_DOWN, AUTHENTICATION, Stamp, judge
from postroom.messages import Message

__all__ = ["Link", "Quiet", "Sending"]

_POLL_SECONDS = 0.001
_CHUNK_ROWS = 250
_log = logging.getLogger("postroom.kafka")


class Quiet:
    """Takes librdkafka's own lines, which would go to standard error. What they mean is told by
    outcomes; they themselves are for those who look closer."""

    def __init__(self, without_secrets: Callable[[str], str]) -> None:
        self._without_secrets = without_secrets

    def log(self, _level: int, text: str, *words: object) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", self._without_secrets(text % words if words else text))


class Sending:
    """One batch on its way: the outcomes known so far, and how many reports are awaited."""

    __slots__ = ("batch", "given", "outcomes", "sound", "waiting")

    def __init__(self, batch: Sequence[Message]) -> None:
        self.batch = batch
        self.given = 0  # how many were handed over, or answered before
        self.outcomes: list[Outcome | None] = [None] * len(batch)
        self.sound = True  # nothing but deliveries so far
        self.waiting = 0

    @property
    def answered(self) -> bool:
        return self.waiting == 0

    def refuse(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.sound = False


class _Ticket:
    """What a report is brought home by. Used again and again: a new object for each message would
    make work for the garbage collector."""

    __slots__ = ("index", "link", "report", "sending", "size")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sending: Sending | None = None
        self.index = self.size = 0
        self.report = self._report

    def _report(self, error: Any, _: Any) -> None:
        sending, self.sending = self.sending, None
        if sending is not None:
            if error is None:
                sending.outcomes[self.index] = DELIVERED
            self.link.settle(self, sending, error)


class Link:
    """A producer, and what is on its way through it: at most about `max_rows` and `max_bytes`."""

    def __init__(
        self,
        make: Callable[[dict[str, Any]], Any],
        settings: dict[str, Any],
        *,
        max_rows: int,
        max_bytes: int,
        without_secrets: Callable[[str], str],
    ) -> None:
        self.lost = False
        self.known: set[str] = set()  # topics that exist
        self.error: str | None = None
        self.barred = False
        self.heard = 0  # messages delivered so far
        self._rows = 0
        self._bytes = 0
        self._free: list[_Ticket] = []
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._without_secrets = without_secrets
        self._loop = asyncio.get_running_loop()
        self._sleepers: list[asyncio.Future[None]] = []
        self._polling: asyncio.Task[None] | None = None
        self.producer: Any = make({**settings, "error_cb": self._on_error})

    # Outwards.

    @property
    def full(self) -> bool:
        return self._rows >= self._max_rows or self._bytes >= self._max_bytes

    def give(self, sending: Sending, stamp: Stamp, faults: Mapping[str, Outcome]) -> None:
        """Hand the next messages of a batch to librdkafka, as many as there is room for."""
        batch, produce, free = sending.batch, self.producer.produce, self._free
        room = min(self._max_rows - self._rows, _CHUNK_ROWS)
        for index in range(sending.given, min(sending.given + room, len(batch))):
            if self._bytes >= self._max_bytes:
                break
            message = batch[index]
            topic = message.topic
            sending.given = index + 1
            headers = stamp.headers(message)
            if topic in faults:
                sending.refuse(index, faults[topic])
            elif isinstance(headers, Permanent):
                sending.refuse(index, headers)
            else:
                ticket = free.pop() if free else _Ticket(self)
                ticket.sending, ticket.index, ticket.size = sending, index, message.size
                try:
                    produce(
                        topic, message.payload, message.key, -1, ticket.report, None, 0, headers
                    )
                except BufferError:
                    # librdkafka has less room than we thought: that is the window from now on.
                    self._max_rows = max(self._rows, 1)
                    sending.given = index
                    break
                except Exception as error:
                    sending.refuse(index, self._refusal(error, topic))
                else:
                    self._rows += 1
                    self._bytes += message.size
                    sending.waiting += 1
        if self._rows and self._polling is None:
            self._polling = self._loop.create_task(self._poll())

    def _refusal(self, error: Exception, topic: str) -> Outcome:
        if isinstance(error, ValueError | TypeError):
            return Permanent("bad_header", describe(error))
        return self._outcome(error.args[0], topic)  # KafkaException, known only to the library

    # Inwards.

    async def _poll(self) -> None:
        """Fetch reports as long as any is awaited."""
        try:
            while self._rows and self.producer is not None:
                served = self.serve()
                await asyncio.sleep(0 if served else _POLL_SECONDS)
        finally:
            self._polling = None

    def serve(self) -> int:
        """Hear what there is to be heard; gives how much it was."""
        try:
            return 0 if self.producer is None else int(self.producer.poll(0))
        except Exception as error:  # so confluent-kafka tells of a fatal one
            self.lose(self._without_secrets(describe(error)))
            return 1

    def settle(self, ticket: _Ticket, sending: Sending, error: Any) -> None:
        """Take a report."""
        self._free.append(ticket)
        self._rows -= 1
        self._bytes -= ticket.size
        sending.waiting -= 1
        if error is None:
            self.heard += 1
            if self.error is not None:
                self.error, self.barred = None, False
        else:
            sending.refuse(ticket.index, self._outcome(error, sending.batch[ticket.index].topic))
        if self._sleepers and (sending.waiting == 0 or self._half_empty()):
            self.wake()

    def _outcome(self, error: Any, topic: str) -> Outcome:
        if error.fatal():
            self.lose(error.str())
        outcome = judge(error.code(), self._without_secrets(error.str()), topic)
        if isinstance(outcome, Transient) and outcome.code == "no_topic":
            self.known.discard(topic)
        return outcome

    def _on_error(self, error: Any) -> None:
        """librdkafka tells of trouble with the whole of it here."""
        code = error.code()
        if code == AUTHENTICATION:
            self.barred = True
        if code != ALL_BROKERS_DOWN or self.error is None:
            self.error = self._without_secrets(error.str())
        if error.fatal():
            self.lose(self.error)
        if code == ALL_BROKERS_DOWN:
            self.known.clear()  # the next send asks first

    def lose(self, why: str | None) -> None:
        """This producer can do no more: nobody knows what becomes of messages on their way."""
        self.error = why
        self.lost = True
        self.wake()

    # Waiting.

    async def until(
        self, ready: Callable[[], bool], deadline: float, *, though_lost: bool = False
    ) -> bool:
        """Wait until something is so; False if it is not by the deadline, or the link is lost."""
        while not ready():
            remaining = deadline - self._loop.time()
            if remaining <= 0 or (self.lost and not though_lost):
                return False
            await self._woken(remaining)
        return True

    async def until_room(self, deadline: float) -> bool:
        """Wait until the window is half empty again, so that sending goes on in large pieces."""
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
        return 2 * self._rows <= self._max_rows and 2 * self._bytes <= self._max_bytes

    # The end.

    def purge(self) -> None:
        """Throw away what has not left and await no more answers: reports of it come at once."""
        if self.producer is not None:
            with contextlib.suppress(Exception):
                self.producer.purge(in_queue=True, in_flight=True, blocking=False)

    def give_up(self) -> list[Any]:
        """End the link. Gives the producer, in a box that holds the last reference to it."""
        box = [] if self.producer is None else [self.producer]
        self.producer = None
        self.lost = True
        self.wake()
        return box


def _rouse(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
