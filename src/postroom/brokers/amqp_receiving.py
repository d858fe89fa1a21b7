"""Receiving from RabbitMQ: a durable queue for each consumer, with one receiver at a time.

Promise: messages come in the order of the queue, and what was not acknowledged comes again, in its
old place. As long as a receiver lives, RabbitMQ gives nothing of the queue to another one
(`x-single-active-consumer`); the next one gets first what the last one had in hand.

What is given back stays with us and is handed out again from here: a queue of the quorum kind would
put it behind everything else.
"""

from __future__ import annotations

import asyncio
import bisect
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from postroom.brokers.amqp_link import Wire, declare_exchange
from postroom.brokers.amqp_wire import head_of
from postroom.brokers.invoke import describe
from postroom.brokers.pipelined import CONNECT_SECONDS
from postroom.brokers.receiving import Delivery, delivery
from postroom.errors import ConfigurationError, PostroomError, Unreachable
from postroom.signals import redact

__all__ = ["AmqpSubscription"]

_WAIT_SECONDS = 1.0
_NO_LIMIT = -1
Opener: TypeAlias = Callable[[float], Awaitable[Wire]]


class _Session:
    """One channel's life: what RabbitMQ has given us over it, by its own numbers."""

    def __init__(self, wire: Wire, channel: Any, claim: int) -> None:
        self.wire, self.channel, self.claim = wire, channel, claim
        self.lost: BaseException | None = None
        self.came: deque[Any] = deque()  # and was not handed out yet
        self.again: list[tuple[int, Delivery]] = []  # given back, by number
        self.open: dict[int, None] = {}  # the numbers without acknowledgement, in their order
        self.news = asyncio.Event()
        channel._on_deliver_frame = self._on_deliver
        channel.on_consumer_cancel_callbacks.add(self._on_cancel)
        channel.closing.add_done_callback(self._on_closed)
        wire.connection.closing.add_done_callback(self._on_closed)

    async def _on_deliver(self, frame: Any) -> None:
        """Straight from where it is read: aiormq would make a task for each message."""
        header = await self.channel._get_frame()
        message = await self.channel._read_content(frame, header)
        self.open[frame.delivery_tag] = None
        self.came.append(message)
        self.news.set()

    def _on_cancel(self, frame: Any) -> None:
        """The queue is gone, or has moved to another node."""
        self.lose(ConnectionError("RabbitMQ ended the subscription: was the queue deleted?"))

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self.lose(error or ConnectionError("the connection was closed"))

    def lose(self, error: BaseException) -> None:
        if self.lost is None:
            self.lost = error
            self.came.clear()
            self.again.clear()
            self.news.set()
            self.wire.abort()

    def acknowledge(self, numbers: set[int]) -> None:
        """One yes for all up to the first that is still open, and one each for the others."""
        from aiormq.abc import ChannelFrame
        from pamqp.commands import Basic

        frames: list[Any] = []
        lowest = 0
        for number in self.open:
            if number not in numbers:
                break
            lowest = number
        if lowest:
            frames.append(Basic.Ack(delivery_tag=lowest, multiple=True))
        rest = sorted(number for number in numbers if number > lowest and number in self.open)
        frames += [Basic.Ack(delivery_tag=number) for number in rest]
        for number in numbers:
            self.open.pop(number, None)
        if frames:
            made = ChannelFrame.marshall(channel_number=self.channel.number, frames=frames)
            self.wire.writer.write(made.payload)


class AmqpSubscription:
    """Receives from the consumer's queue, and connects anew when the connection is lost."""

    exclusive = True
    extend_seconds: float | None = None  # whatever is in hand is ours as long as the channel lives

    def __init__(
        self,
        opener: Opener,
        *,
        exchange: str,
        topics: Sequence[str],
        queue: str,
        queue_type: str,
        dead_letter_exchange: str | None,
        prefetch: int,
        timeout_seconds: float,
    ) -> None:
        self._open_wire = opener
        self._exchange, self._topics, self._queue = exchange, topics, queue
        self._queue_type, self._dead = queue_type, dead_letter_exchange
        self._prefetch = prefetch
        self._timeout_seconds = timeout_seconds
        self._session: _Session | None = None
        self._claim = 0
        self._connecting = asyncio.Lock()
        self._closed = False

    async def begin(self) -> None:
        """Make the queue and bind it, so that from now on nothing to its topics is lost."""
        await self._current()

    async def take(self, most: int) -> list[Delivery]:
        """The next messages; waits for the first about a second."""
        session = await self._current()
        if most > 0 and not session.again and not session.came:
            session.news.clear()
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await session.news.wait()
            except TimeoutError:
                return []
        if session.lost is not None:
            raise self._unreachable(session.lost)
        found = [given for _, given in session.again[:most]]
        del session.again[: len(found)]
        while session.came and len(found) < most:
            found.append(self._delivery(session, session.came.popleft()))
        return found

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Tell RabbitMQ. What came over a connection that is lost comes again all the same."""
        session = self._session
        numbers = {each.receipt for each in deliveries if session and each.claim == session.claim}
        if session is None or not numbers:
            return
        if session.lost is not None:
            raise self._unreachable(session.lost)
        session.acknowledge(numbers)

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Keep them, and hand them out again before what came later."""
        session = self._session
        if session is None or session.lost is not None:
            return
        here = {number for number, _ in session.again}
        for each in deliveries:
            number = each.receipt
            if each.claim == session.claim and number in session.open and number not in here:
                here.add(number)
                again = (number, each._replace(seen=each.seen + 1))
                bisect.insort(session.again, again, key=lambda entry: entry[0])
        session.news.set()

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing: a message is ours until its channel ends."""

    async def close(self) -> None:
        """Leave; RabbitMQ puts what is in hand back into its place."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None and session.lost is None:
            session.lost = ConnectionError("the subscription was closed")
            session.news.set()
            await session.wire.close()

    # The connection.

    def _check(self) -> None:
        if self._closed:
            raise Unreachable("the subscription was closed")

    async def _current(self) -> _Session:
        async with self._connecting:
            self._check()
            if self._session is not None and self._session.lost is None:
                return self._session
            self._session = None
            wire: Wire | None = None
            try:
                wire = await self._open_wire(min(CONNECT_SECONDS, self._timeout_seconds))
                async with asyncio.timeout(self._timeout_seconds):
                    session = await self._subscribe(wire)
                self._check()  # else nobody would ever take from what was opened
            except BaseException as error:
                if wire is not None:
                    wire.abort()
                if not isinstance(error, Exception) or isinstance(error, PostroomError):
                    raise
                raise self._unreachable(error) from error
            self._session = session
            return session

    async def _subscribe(self, wire: Wire) -> _Session:
        from aiormq.exceptions import ChannelPreconditionFailed

        await declare_exchange(wire, self._exchange)
        channel: Any = await wire.connection.channel(publisher_confirms=False)
        try:
            await channel.queue_declare(
                self._queue, durable=True, arguments=self._arguments(wire.version)
            )
        except ChannelPreconditionFailed as error:
            raise ConfigurationError(
                f"the queue {self._queue} is there, but not as it should be: {redact(str(error))}; "
                "set queue_type or dead_letter_exchange to what it has, or delete it once it is "
                "empty"
            ) from None
        for topic in self._topics:
            await channel.queue_bind(self._queue, self._exchange, topic)
        await channel.basic_qos(prefetch_count=self._prefetch)
        self._claim += 1
        session = _Session(wire, channel, self._claim)
        await channel.basic_consume(self._queue, _nowhere)
        return session

    def _arguments(self, version: str) -> dict[str, Any]:
        made: dict[str, Any] = {"x-queue-type": self._queue_type, "x-single-active-consumer": True}
        if self._dead:
            made["x-dead-letter-exchange"] = self._dead
        major = version.partition(".")[0]
        if self._queue_type == "quorum" and major.isdecimal() and int(major) >= 4:
            # It would drop a message that came twenty times; how often is ours to say.
            made["x-delivery-limit"] = _NO_LIMIT
        return made

    def _delivery(self, session: _Session, message: Any) -> Delivery:
        headers = head_of(message.header.properties)
        frame, table = message.delivery, message.header.properties.headers or {}
        named = message.header.properties.message_id
        return delivery(
            headers,
            message.body,
            topic=frame.routing_key,
            source=self._queue,
            claim=session.claim,
            receipt=frame.delivery_tag,
            # RabbitMQ has no name for a message: one that nobody named is a new one each time.
            unnamed=str(named or f"{self._queue}:{uuid.uuid4()}"),
            seen=_seen(table.get("x-delivery-count"), frame.redelivered),
        )

    def _unreachable(self, error: BaseException) -> Unreachable:
        return Unreachable(f"RabbitMQ was lost: {describe(error)}")


def _seen(count: Any, redelivered: bool) -> int:
    """How often it came before: RabbitMQ's count, unless a publisher has put something of its own
    in that place."""
    known = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    return count if known else int(redelivered)


async def _nowhere(_: Any) -> None:
    """What aiormq would call for a message; ours are taken before."""
