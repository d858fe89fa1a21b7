"""Connections to RabbitMQ, and the one on which many messages are under way.

aiormq, which aio-pika stands on, connects, greets, beats and reads. A link speaks to its private
parts where its public ones do not serve, all in here: `basic_publish` takes a lock, a future and a
place in a queue for every message, which makes it four times slower; it does not tell which message
came back when two have one id; and what goes wrong it writes to the log, where nobody has asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from typing import Any

from postroom.brokers.address import Address
from postroom.brokers.amqp_frames import Frames
from postroom.brokers.amqp_wire import (
    BLOCKED,
    NACKED,
    closed,
    largest,
    no_queue,
    publish,
    too_large,
)
from postroom.brokers.base import DELIVERED, Outcome, Permanent, Transient
from postroom.brokers.invoke import describe
from postroom.brokers.pipelined import Link
from postroom.brokers.window import MAX_OUTSTANDING_BYTES, Sending
from postroom.messages import Message

__all__ = ["AmqpLink", "Limits", "Wire", "declare_exchange"]

_SHUT_SECONDS = 1.0
_FRAME_MAX = 131_072
_ACCESS_REFUSED = 403  # for which aiormq has an exception of its own
_ending: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly


class Wire:
    """A connection of aiormq's, and the socket under it."""

    def __init__(self, connection: Any, writer: asyncio.StreamWriter) -> None:
        self.connection = connection
        self.writer = writer
        self._unblocked: asyncio.Event = connection._Connection__connection_unblocked

    @classmethod
    async def open(cls, address: Address, seconds: float, *, heartbeat: int) -> Wire:
        """Connect, and say who we are. Raises what went wrong."""
        from yarl import URL

        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=address.context
            )
            try:
                url = URL.build(
                    scheme=address.scheme,
                    user=address.user or "guest",
                    password=address.password or ("" if address.user else "guest"),
                    host=address.host,
                    port=address.port,
                    query={"heartbeat": str(heartbeat), "name": "postroom"},
                )
                connection = _quiet()(url, transport_factory=_Given(reader, writer))
                connection.vhost = address.path[1:] or "/"
                await connection.connect()
                await connection.connected.wait()
            except BaseException:
                writer.transport.abort()
                raise
        return cls(connection, writer)

    @property
    def blocked(self) -> bool:
        """Whether the server has said that it reads nothing of ours for now."""
        return not self._unblocked.is_set()

    @property
    def frame_max(self) -> int:
        return self.connection.connection_tune.frame_max or _FRAME_MAX

    @property
    def version(self) -> str:
        return str(self.connection.server_properties.get("version", ""))

    def abort(self) -> None:
        """Throw the connection away, with whatever it has not sent."""
        self.writer.transport.abort()
        task = asyncio.get_running_loop().create_task(self.close())
        _ending.add(task)
        task.add_done_callback(_ending.discard)

    async def close(self) -> None:
        """Close it in good order, or within a second without."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_SHUT_SECONDS):
                await self.connection.close()
        self.writer.transport.abort()


class _Given:
    """What aiormq asks for a transport: ours, so that a refusal is not written to the log."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams = reader, writer

    async def create(self, url: Any, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self._streams


@functools.cache
def _quiet() -> Any:
    """aiormq's connection, without a traceback in the log when the server goes away, with frames
    that no message can make unreadable, and with the server's reason when it refuses us."""
    from aiormq.connection import Connection, exception_by_code
    from pamqp.commands import Connection as Commands

    class Greeting:
        """Raises the reason of a Close frame, for which aiormq would name only its type."""

        def __init__(self, frames: Any) -> None:
            self._frames = frames

        async def get_frame(self) -> Any:
            found = await self._frames.get_frame()
            if isinstance(found[2], Commands.Close) and found[2].reply_code != _ACCESS_REFUSED:
                raise exception_by_code(found[2])
            return found

    class Quiet(Connection):  # type: ignore[misc, unused-ignore]
        def _on_reader_done(self, task: Any) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            ending = self.loop.create_task(self.close(error))
            _ending.add(ending)
            ending.add_done_callback(_ending.discard)

        @staticmethod
        async def _rpc(
            request: Any, writer: Any, frame_receiver: Any, wait_response: bool = True
        ) -> Any:
            heard: Any = Greeting(frame_receiver)
            return await Connection._rpc(request, writer, heard, wait_response)

        # What `connect` starts for all that comes after the greeting.
        async def _Connection__reader(self, frames: Any) -> None:
            await super()._Connection__reader(Frames(frames.reader))  # type: ignore[misc]

    return Quiet


@dataclass
class Limits:
    """What a server was found to take; it outlives the channel that was closed to tell it."""

    max_message: int | None = None


class AmqpLink(Link):
    """A channel with confirms: the server answers by numbers that both sides count."""

    def __init__(
        self, wire: Wire, channel: Any, exchange: str, limits: Limits, *, max_rows: int
    ) -> None:
        super().__init__(max_rows=max_rows, max_bytes=MAX_OUTSTANDING_BYTES)
        self.wire = wire
        self._limits = limits
        self._channel = channel
        self._exchange = exchange
        self._frame_max = wire.frame_max
        self._sent = 0
        self._lowest = 1  # all below have their answer
        self._asking: set[asyncio.Task[Any]] = set()
        channel._on_confirm_frame = self._on_confirm
        channel._on_return_frame = self._on_return
        channel.closing.add_done_callback(self._on_closed)
        wire.connection.closing.add_done_callback(self._on_closed)

    @property
    def stalled(self) -> Transient | None:
        return BLOCKED if self.wire.blocked else None

    @property
    def alive(self) -> bool:
        return not self.lost and not self.wire.writer.transport.is_closing()

    def command(self, message: Message, source: str, epoch: int) -> bytes | Permanent:
        most = self._limits.max_message
        if most is not None and len(message.payload) > most:
            return too_large(len(message.payload), most)
        return publish(
            message,
            channel=self._channel.number,
            exchange=self._exchange,
            source=source,
            epoch=epoch,
            frame_max=self._frame_max,
        )

    def number(self, message: Message) -> int:
        self._sent += 1
        return self._sent

    def write(self, data: bytes) -> None:
        if not self.wire.writer.transport.is_closing():  # asyncio would say so in the log
            self.wire.writer.write(data)

    def echo(self) -> Sending:
        asked = Sending((), 1)
        asked.waiting = 1
        asking = asyncio.create_task(self._channel.basic_qos(prefetch_count=1))
        self._asking.add(asking)

        def answered(task: asyncio.Task[Any]) -> None:
            self._asking.discard(task)
            if not task.cancelled() and task.exception() is None:
                self.heard += 1
                asked.waiting, asked.outcomes[0] = 0, DELIVERED
            self.wake()

        asking.add_done_callback(answered)
        return asked

    # Answers.

    async def _on_confirm(self, frame: Any) -> None:
        """A yes or no to one message, or to all up to it that have no answer yet."""
        self.heard += 1
        outcome: Outcome = DELIVERED if frame.name == "Basic.Ack" else NACKED
        number = frame.delivery_tag
        if frame.multiple:
            for each in range(self._lowest, number + 1):
                self.settle(each, outcome)
            self._lowest = max(self._lowest, number + 1)
        else:
            self.settle(number, outcome)
            while self._lowest <= self._sent and self._lowest not in self.waiting:
                self._lowest += 1

    async def _on_return(self, frame: Any) -> None:
        """A message came back, because no queue is there for it. A yes to it follows, in vain."""
        header = await self._channel._get_frame()
        await self._channel._read_content(frame, header)
        self.heard += 1
        id = header.properties.message_id
        for number, (sending, index, _) in self.waiting.items():
            message = sending.batch[index]
            if message.broker_id == id:
                self.settle(number, no_queue(message.topic, self._exchange))
                return

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        if not self.lost:
            said = str(error) if error else ""
            if type(error).__name__.startswith("Channel") and said:
                self._limits.max_message = largest(said) or self._limits.max_message
                self.settle_all(lambda message: closed(said, message) if message else None)
            self.lose(describe(error) if error else "")
            self.wire.abort()

    # The end.

    def discard(self) -> None:
        self.lose()
        self.wire.abort()

    async def close(self) -> None:
        self.lost = True  # all that was sent is answered
        await self.wire.close()


async def declare_exchange(wire: Wire, name: str) -> None:
    """See to it that there is a topic exchange of this name; one that is there stays as it is."""
    from aiormq.exceptions import ChannelNotFoundEntity

    channel = await wire.connection.channel(publisher_confirms=False)
    try:
        await channel.exchange_declare(name, exchange_type="topic", passive=True)
    except ChannelNotFoundEntity:
        channel = await wire.connection.channel(publisher_confirms=False)
        await channel.exchange_declare(name, exchange_type="topic", durable=True)
    await channel.close()
