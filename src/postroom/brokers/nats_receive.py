"""Receiving from NATS JetStream: durable pull consumers, one for each stream that has a topic.

Promise: what is not acknowledged comes again, and a stream's messages come in its order. A lost
connection begins a new claim: all that was in hand comes again over the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import groupby

from postroom.brokers.base import Transient
from postroom.brokers.nats_ask import AskingLink, Refusal
from postroom.brokers.nats_durable import ASK_SECONDS, Durable
from postroom.brokers.nats_source import PATIENCE_SECONDS, Source
from postroom.brokers.nats_tray import Receipt
from postroom.brokers.nats_wire import Arrived, no_stream
from postroom.brokers.receiving import Delivery
from postroom.errors import ConfigurationError, Unreachable

__all__ = ["NatsSubscription", "stream_of"]

TAKE_SECONDS = 1.0
CLOSE_SECONDS = 3.0
_LOOK_SECONDS = 0.1
_PARTS = 4  # of the time a pin lasts: it is renewed after each

Connect = Callable[[], Awaitable[AskingLink | Transient]]


class NatsSubscription:
    """Receives for one consumer, over a connection of its own."""

    def __init__(
        self, connect: Connect, place: str, topics: Sequence[str], durable: Durable
    ) -> None:
        self._connect, self._place = connect, place
        self._topics, self._durable = tuple(dict.fromkeys(topics)), durable
        self.exclusive = True
        self.extend_seconds: float | None = durable.pin_seconds / _PARTS
        self._sources: dict[str, Source] = {}
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._link: AskingLink | None = None
        self._connecting = asyncio.Lock()
        self._turn = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"{self._place} for {self._durable.name}"

    async def open(self) -> None:
        """Find the streams and make the durables, or say what is missing."""
        try:
            await self._connected(first=True)
        except _NoStream as missing:
            raise ConfigurationError(str(missing)) from None

    async def take(self, most: int) -> list[Delivery]:
        """The next messages; none if there is none within a second."""
        link = await self._connected()
        deadline = link.now + TAKE_SECONDS
        while True:
            await self._mend(link)
            taken = self._hand_out(most)
            if not taken:
                await self._step(link, most)
                taken = self._hand_out(most)
            if taken or link.now >= deadline:
                return taken
            await self._await_news(link, deadline)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """All in one go. It is not waited for: an ack that is lost costs a duplicate."""
        if deliveries:
            link = await self._connected()
            said = [source.acknowledged(part) for source, part in self._by_source(deliveries)]
            await self._write(link, b"".join(said))

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Whatever is later in the stream is handed out after them."""
        if deliveries:
            link = await self._connected()
            said = [source.given_back(part) for source, part in self._by_source(deliveries)]
            await self._write(link, b"".join(said))

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """More time for what is in hand, and for the pins of the streams."""
        link = await self._connected()
        now = link.now
        parts = dict(self._by_source(deliveries))
        said = [source.extended(parts.get(source, ()), now) for source in self._sources.values()]
        await self._write(link, b"".join(said))
        for source in self._sources.values():
            await source.keep(link)

    async def close(self) -> None:
        """Give back all, let go of the streams, and close the connection. Never raises."""
        self._closed = True
        link, self._link = self._link, None
        if link is None or self._home != (os.getpid(), asyncio.get_running_loop()):
            return
        with contextlib.suppress(Exception):
            if link.alive:
                async with asyncio.timeout(CLOSE_SECONDS):
                    until = link.now + CLOSE_SECONDS
                    await asyncio.gather(*(s.leave(link, until) for s in self._sources.values()))
        with contextlib.suppress(Exception):
            await link.close()

    # One turn of receiving.

    def _hand_out(self, most: int) -> list[Delivery]:
        """What is ready, of each stream its part; another stream begins each time."""
        sources = list(self._sources.values())
        self._turn += 1
        taken: list[Delivery] = []
        for index in range(len(sources)):
            source = sources[(self._turn + index) % len(sources)]
            if source.ready and len(taken) < most:
                taken += source.hand_out(most - len(taken))
        return taken

    async def _step(self, link: AskingLink, most: int) -> None:
        part = max(most // max(len(self._sources), 1), 1)
        try:
            for source in self._sources.values():
                await source.step(link, part)
        except Refusal as refusal:
            raise Unreachable(f"NATS at {self._place}: {refusal}") from None
        except Unreachable:
            await self._check(link)
            raise

    async def _await_news(self, link: AskingLink, deadline: float) -> None:
        """Wait until something comes, or for a while; raises if the server is lost or silent."""
        await link.rest(min(max(deadline - link.now, 0.001), _LOOK_SECONDS))
        if link.lost or link.client.is_closed:
            link.lose()
            raise Unreachable(f"the connection to NATS at {self._place} was lost")
        if link.muted:
            raise Unreachable(
                f"NATS at {self._place}: {link.muted}; docs/brokers.md has the rights"
            )
        if link.now > link.heard_at + TAKE_SECONDS + PATIENCE_SECONDS:
            await self._check(link)

    async def _check(self, link: AskingLink) -> None:
        if not await link.answers(PATIENCE_SECONDS):
            link.discard()
            raise Unreachable(f"NATS at {self._place} accepts connections but does not answer")

    async def _write(self, link: AskingLink, data: bytes) -> None:
        if data:
            try:
                await link.write(data)
            except Exception as error:
                link.discard()
                text = f"the connection to NATS at {self._place} was lost"
                raise Unreachable(text) from error

    def _by_source(self, deliveries: Iterable[Delivery]) -> Iterable[tuple[Source, list[Delivery]]]:
        ordered = sorted(deliveries, key=lambda each: each.source)
        for name, part in groupby(ordered, key=lambda each: each.source):
            if name in self._sources:
                yield self._sources[name], list(part)

    # The connection.

    async def _connected(self, *, first: bool = False) -> AskingLink:
        """The connection, with the durables behind it; made anew if it was lost."""
        self._check_open()
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # After a fork, or on another loop, the old connection is somebody else's: let go of it.
            self._home, self._link, self._connecting = home, None, asyncio.Lock()
        async with self._connecting:
            if self._link is not None:
                if self._link.alive:
                    return self._link
                self._link.discard()
                self._link = None
            made = await self._connect()
            if isinstance(made, Transient):
                raise Unreachable(made.text)
            made.on_message = partial(self._on_message, made)
            try:
                await self._open_sources(made, update=first)
                self._check_open()  # else the connection would stay for ever
            except BaseException as error:
                made.discard()
                if isinstance(error, Refusal):
                    raise Unreachable(f"NATS at {self._place}: {error}") from None
                raise
            self._link = made
            return made

    def _check_open(self) -> None:
        if self._closed:
            raise Unreachable(f"the subscription {self!r} was closed")

    async def _open_sources(self, link: AskingLink, *, update: bool) -> None:
        """Only the first time are durables changed: another version of this consumer, with other
        topics, may run beside us by then."""
        if not self._sources:
            streams: dict[str, list[str]] = {}
            for topic in self._topics:
                stream = await stream_of(link, topic)
                if stream is None:
                    raise _NoStream(no_stream(topic).text)
                streams.setdefault(stream, []).append(topic)
            for stream, topics in streams.items():
                self._sources[stream] = Source(stream, self._durable.of(topics))
        for source in self._sources.values():
            await self._open_source(source, link, update=update)
        self.exclusive = all(source.pins for source in self._sources.values())

    async def _open_source(self, source: Source, link: AskingLink, *, update: bool) -> None:
        try:
            await source.open(link, update=update)
        except Refusal as refusal:
            raise (ConfigurationError if update else Unreachable)(
                f"NATS does not let {self._durable.name} receive from stream {source.stream}: "
                f"{refusal}; look at the stream's retention and limits for consumers"
            ) from None

    async def _mend(self, link: AskingLink) -> None:
        """A durable that somebody has deleted is made again."""
        for source in self._sources.values():
            if source.gone:
                await self._open_source(source, link, update=False)

    def _on_message(self, link: AskingLink, answer: Arrived) -> None:
        receipt = Receipt.of(answer.reply)
        if receipt is not None and link is self._link:  # else of a connection that was given up
            source = self._sources.get(receipt.stream)
            if source is not None:
                source.on_message(answer, receipt, link.heard_at)


class _NoStream(Unreachable):
    """No stream captures a topic."""


async def stream_of(link: AskingLink, topic: str) -> str | None:
    """The stream that captures a topic, if there is one."""
    answer = await link.ask("STREAM.NAMES", {"subject": topic}, link.now + ASK_SECONDS)
    streams = answer.get("streams") or []
    return str(streams[0]) if streams else None
