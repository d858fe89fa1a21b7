"""One producer of librdkafka: the window of messages on their way, and their reports coming back.

Promise: each message it was told to send gets exactly one outcome, and a link once discarded sends
nothing more. A strict link is over with the first message that fails: nothing later passes it.

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

from postroom.brokers.base import BEHIND, DELIVERED, Outcome, Permanent, Transient
from postroom.brokers.invoke import describe
from postroom.brokers.kafka_proof import Proof
from postroom.brokers.kafka_wire import (
    ALL_BROKERS_DOWN,
    AUTHENTICATION,
    FATAL,
    GAPLESS,
    PURGED,
    Headers,
    Stamp,
    judge,
)
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

    __slots__ = (
        "batch",
        "given",
        "outcomes",
        "probes",
        "sleeper",
        "sound",
        "stopped",
        "topics",
        "waiting",
    )

    def __init__(self, batch: Sequence[Message]) -> None:
        self.batch = batch
        self.given = 0  # how many were handed over, or answered before
        self.outcomes: list[Outcome | None] = [None] * len(batch)
        self.probes: set[int] = set()  # what was handed over before its turn
        self.sleeper: asyncio.Future[None] | None = None  # of whoever awaits the reports
        self.sound = True  # nothing but deliveries so far
        self.stopped: set[tuple[str, str]] = set()  # keys of which something has failed
        self.topics = {message.topic for message in batch}
        self.waiting = 0

    @property
    def answered(self) -> bool:
        return self.waiting == 0

    def refuse(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.stopped.add(self.batch[index].order)
        self.sound = False

    def was_given(self, index: int) -> bool:
        return index < self.given or index in self.probes


class _Ticket:
    """What a report is brought home by. Used again and again: a new object for each message would
    make work for the garbage collector."""

    __slots__ = ("index", "link", "report", "sending", "size")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sending: Sending | None = None
        self.index = self.size = 0
        self.report = self._report

    def _report(self, error: Any, message: Any) -> None:
        """Take a report. All of a yes happens here, without a call: it comes for every message."""
        sending, link = self.sending, self.link
        if sending is None:
            return
        self.sending = None
        link.free.append(self)
        link.rows -= 1
        link.bytes -= self.size
        sending.waiting -= 1
        if error is None:
            sending.outcomes[self.index] = DELIVERED
            link.heard += 1
            if sending.probes:
                link.proof.took(sending.batch[self.index].topic, message.partition())
            if link.error is not None:
                link.error, link.barred = None, False
        else:
            link.refused(sending, self.index, error)
        # Nobody else is woken: lanes that await other reports would only look and sleep again.
        if sending.waiting == 0 and sending.sleeper is not None:
            _rouse(sending.sleeper)
        if link.crowd and link.half_empty():
            link.make_room()


class Link:
    """A producer, and what is on its way through it: at most about `max_rows` and `max_bytes`."""

    def __init__(
        self,
        make: Callable[[dict[str, Any]], Any],
        settings: dict[str, Any],
        *,
        strict: bool,
        max_rows: int,
        max_bytes: int,
        without_secrets: Callable[[str], str],
    ) -> None:
        self.strict = strict
        self.lost = False
        self.fatal = False  # lost by a fault of the producer itself, and by no message
        self.guilty: set[str] = set()  # topics whose messages were refused
        self.users = 0  # sends that have something on their way
        self.error: str | None = None
        self.barred = False
        self.heard = 0  # messages delivered so far
        self.rows = 0
        self.bytes = 0
        self.free: list[_Ticket] = []
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._without_secrets = without_secrets
        self._loop = asyncio.get_running_loop()
        self.born = self._loop.time()
        self.proof = Proof(self._loop.time)
        self.probing: set[tuple[str, int]] = set()  # partitions with a probe under way
        self._sleepers: set[asyncio.Future[None]] = set()
        self.crowd: set[asyncio.Future[None]] = set()  # those of them that wait for room
        self._polling: asyncio.Task[None] | None = None
        self.producer: Any = make({**settings, "error_cb": self._on_error})

    # Outwards.

    @property
    def full(self) -> bool:
        return self.rows >= self._max_rows or self.bytes >= self._max_bytes

    def give(self, sending: Sending, stamp: Stamp, faults: Mapping[str, Outcome]) -> None:
        """Hand the next messages of a batch to librdkafka, as many as there is room for."""
        batch, outcomes, stopped = sending.batch, sending.outcomes, sending.stopped
        whole = self.proof.is_whole(sending.topics - faults.keys())
        room = min(self._max_rows - self.rows, _CHUNK_ROWS)
        for index in range(sending.given, min(sending.given + room, len(batch))):
            if self.bytes >= self._max_bytes:
                break
            if outcomes[index] is not None:
                sending.given = index + 1
                continue  # it was a probe
            message = batch[index]
            topic = message.topic
            sending.given = index + 1
            headers = stamp.headers(message)
            if topic in faults:
                sending.refuse(index, faults[topic])
            elif stopped and message.order in stopped:
                sending.refuse(index, BEHIND)
            elif isinstance(headers, Permanent):
                sending.refuse(index, headers)
            else:
                place = -1 if whole or message.key is not None else self.proof.somewhere(topic)
                if not self._hand_over(sending, index, headers, place):
                    sending.given = index
                    break
        self._keep_polling()

    def probe(self, sending: Sending, stamp: Stamp, places: Mapping[int, int]) -> None:
        """Hand these messages over before their turn, each to its partition."""
        for index, place in places.items():
            headers = stamp.headers(sending.batch[index])
            if isinstance(headers, Permanent):
                sending.refuse(index, headers)
            elif sending.batch[index].order in sending.stopped:
                sending.refuse(index, BEHIND)
            elif self._hand_over(sending, index, headers, place):
                sending.probes.add(index)
        self._keep_polling()

    def _hand_over(self, sending: Sending, index: int, headers: Headers, place: int) -> bool:
        """Give one message to librdkafka; False if it has no room, or is at its end."""
        message = sending.batch[index]
        ticket = self.free.pop() if self.free else _Ticket(self)
        ticket.sending, ticket.index, ticket.size = sending, index, message.size
        try:
            self.producer.produce(
                message.topic, message.payload, message.key, place, ticket.report, None, 0, headers
            )
        except BufferError:
            # librdkafka has less room than we thought: that is the window from now on.
            self._max_rows = max(self.rows, 1)
            return False
        except Exception as error:
            if _code(error) == FATAL:
                self.lose()
                self.serve()  # which tells why
                return False
            sending.refuse(index, self._refusal(error, message.topic))
        else:
            self.rows += 1
            self.bytes += message.size
            sending.waiting += 1
        return True

    def _keep_polling(self) -> None:
        if self.rows and self._polling is None:
            self._polling = self._loop.create_task(self._poll())

    def _refusal(self, error: Exception, topic: str) -> Outcome:
        if isinstance(error, ValueError | TypeError):
            return Permanent("bad_header", describe(error))
        return self._outcome(error.args[0], topic)  # KafkaException, known only to the library

    # Inwards.

    async def _poll(self) -> None:
        """Fetch reports as long as any is awaited."""
        try:
            while self.rows and self.producer is not None:
                served = self.serve()
                await asyncio.sleep(0 if served else _POLL_SECONDS)
        finally:
            self._polling = None

    def serve(self) -> int:
        """Hear what there is to be heard; gives how much it was."""
        try:
            return 0 if self.producer is None else int(self.producer.poll(0))
        except Exception as error:  # so confluent-kafka tells of a fatal one
            why = self._without_secrets(describe(error))
            self.lose(why, fatal=_code(error) != GAPLESS)
            return 1

    def refused(self, sending: Sending, index: int, error: Any) -> None:
        """Take a report that is no yes."""
        sending.refuse(index, self._outcome(error, sending.batch[index].topic))

    def _outcome(self, error: Any, topic: str) -> Outcome:
        code, said = error.code(), self._without_secrets(error.str())
        outcome = judge(code, said, topic)
        if error.fatal():
            self.lose(said, fatal=code != GAPLESS)
        elif self.strict and code not in PURGED:
            self.lose(said)
            if getattr(outcome, "down", None) != "broker":
                self.guilty.add(topic)
        if isinstance(outcome, Transient) and outcome.code == "no_topic":
            self.proof.forget(topic)
        return outcome

    def _on_error(self, error: Any) -> None:
        """librdkafka tells of trouble with the whole of it here."""
        code = error.code()
        if code == AUTHENTICATION:
            self.barred = True
        if code != ALL_BROKERS_DOWN or self.error is None:
            self.error = self._without_secrets(error.str())
        if error.fatal():
            self.lose(self.error, fatal=code != GAPLESS)
        if code == ALL_BROKERS_DOWN:
            self.proof.forget()  # the next send asks first

    def lose(self, why: str | None = None, *, fatal: bool = False) -> None:
        """This producer can do no more: nobody knows what becomes of messages on their way."""
        self.error = why or self.error
        self.fatal = self.fatal or fatal
        self.lost = True
        self.wake()

    # Waiting.

    async def until_answered(
        self, sending: Sending, deadline: float, *, though_lost: bool = False
    ) -> bool:
        """Wait for all reports of a batch; False if there are not by the deadline, or the link is
        lost."""
        return await self._until(
            lambda: sending.waiting == 0, deadline, sending, though_lost=though_lost
        )

    async def until_room(self, deadline: float) -> bool:
        """Wait until the window is half empty again, so that sending goes on in large pieces."""
        return await self._until(self.half_empty, deadline)

    async def until_proven(
        self, sending: Sending, others: set[tuple[str, int]], deadline: float
    ) -> bool:
        """Wait until this batch's probes are answered, and those of others to these partitions."""
        return await self._until(
            lambda: sending.answered and self.probing.isdisjoint(others), deadline, sending
        )

    async def _until(
        self,
        ready: Callable[[], bool],
        deadline: float,
        sending: Sending | None = None,
        *,
        though_lost: bool = False,
    ) -> bool:
        """Wait until something is so: for the reports of a batch, or for room."""
        while not ready():
            remaining = deadline - self._loop.time()
            if remaining <= 0 or (self.lost and not though_lost):
                return False
            await self._woken(remaining, sending)
        return True

    async def _woken(self, seconds: float, sending: Sending | None) -> None:
        """Wait until the reports of a batch are there, or else until there is room; or for `wake`,
        or so many seconds. Each who waits has a future of its own, so that one who is cancelled
        disturbs no other."""
        waiter = self._loop.create_future()
        self._sleepers.add(waiter)
        if sending is None:
            self.crowd.add(waiter)
        else:
            sending.sleeper = waiter
        timer = self._loop.call_later(seconds, _rouse, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._sleepers.discard(waiter)
            self.crowd.discard(waiter)
            if sending is not None:
                sending.sleeper = None

    def wake(self) -> None:
        """Let all who wait look again."""
        for waiter in self._sleepers:
            _rouse(waiter)

    def half_empty(self) -> bool:
        return 2 * self.rows <= self._max_rows and 2 * self.bytes <= self._max_bytes

    def make_room(self) -> None:
        """Wake those who wait for room."""
        for waiter in self.crowd:
            _rouse(waiter)
        self.crowd.clear()

    # The end.

    def purge(self, *, in_flight: bool = True) -> None:
        """Throw away what has not left and await no more answers: reports of it come at once.
        Without `in_flight`, answers to what has left are still awaited."""
        if self.producer is not None:
            with contextlib.suppress(Exception):
                self.producer.purge(in_queue=True, in_flight=in_flight, blocking=False)

    def give_up(self) -> list[Any]:
        """End the link. Gives the producer, in a box that holds the last reference to it."""
        box = [] if self.producer is None else [self.producer]
        self.producer = None
        self.lost = True
        self.wake()
        return box


def _code(error: Exception) -> int:
    """The code of librdkafka's own exceptions, which only the library knows; 0 for others."""
    said: Any = error.args[0] if error.args else None
    return int(said.code()) if hasattr(said, "code") else 0


def _rouse(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
