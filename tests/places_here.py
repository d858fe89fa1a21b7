"""Places to send to: a broker together with the far end of it, what arrived there, and how to
break it. Here are those without a server; the others are in `places.py`."""

import asyncio
import base64
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from helpers import eventually_async
from postroom.brokers import Broker, BrokerOptions, Permanent
from postroom.brokers.call import CallBroker
from postroom.brokers.memory import MemoryBroker
from postroom.brokers.stdout import StdoutBroker
from postroom.messages import Message, Prefix, new_id, wire_headers

SOURCE = "the-shop"
OPTIONS = BrokerOptions(source=SOURCE, send_timeout_seconds=5.0)


@dataclass
class Arrived:
    id: str
    topic: str
    payload: bytes
    headers: dict[str, str]


class Place(Protocol):
    broker: Broker
    topic: str
    pings: bool
    prefix: Prefix  # of CloudEvents
    encoded: bool  # their attributes are seen as the binding writes them, not as text
    largest: int  # bytes that are no text and fit
    pace: int  # how much fewer messages do where each costs more
    strict: bool  # a topic must be made before it takes anything
    window: int | None  # how many messages are under way at most through `narrow`; None: any number

    async def arrived(self) -> list[Arrived]: ...
    def refuse(self, message: Message) -> Message:
        """Make the broker refuse this message for ever; gives the message to send."""

    async def go_down(self) -> None: ...
    async def come_back(self) -> None: ...
    def narrow(self, seconds: float) -> Broker:
        """Another broker for the same place, with this send timeout and a small window."""

    async def hold(self) -> None:
        """From now on that broker gets no answers; what it sends arrives."""

    async def let_go(self) -> None: ...
    def gone_out(self, batch: Sequence[Message]) -> int:
        """How many of these messages that broker has sent, answered or not."""

    async def end(self) -> None: ...


def _as_arrived(message: Message) -> Arrived:
    headers = wire_headers(message, source=SOURCE)
    return Arrived(message.id, message.topic, message.payload, headers)


class MemoryPlace:
    topic = "orders"
    pings = True
    prefix: Prefix = "ce-"
    encoded = True
    largest = 900_000
    pace = 1
    strict = False
    window: int | None = None

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self._flowing = asyncio.Event()
        self._handed: set[str] = set()

    async def arrived(self) -> list[Arrived]:
        return [_as_arrived(message) for message in self.broker.messages]

    def refuse(self, message: Message) -> Message:
        self.broker.fail(message.id, Permanent("bad", "no"), times=None)
        return message

    async def go_down(self) -> None:
        self.broker.down = True

    async def come_back(self) -> None:
        self.broker.down = False

    def narrow(self, seconds: float) -> Broker:
        self.broker.send_timeout_seconds = seconds
        return self.broker

    async def hold(self) -> None:
        self._flowing.clear()
        self._leave = self.broker.subscribe(self._wait)

    async def _wait(self, message: Message) -> None:
        self._handed.add(message.id)
        await self._flowing.wait()

    async def let_go(self) -> None:
        self._flowing.set()
        self._leave()

    def gone_out(self, batch: Sequence[Message]) -> int:
        return sum(message.id in self._handed for message in batch)

    async def end(self) -> None:
        await self.broker.close()


class CallPlace:
    topic = "orders"
    pings = False  # it has nothing to ping
    prefix: Prefix = "ce-"
    encoded = True
    largest = 900_000
    pace = 1
    strict = False
    window: int | None = 4

    def __init__(self) -> None:
        # Thousands of calls take a busy machine longer than one write for all of them.
        self.broker = CallBroker(self._receive, replace(OPTIONS, send_timeout_seconds=60.0))
        self._arrived: list[Arrived] = []
        self._refused: set[str] = set()
        self._down = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def _receive(self, message: Message) -> str | None:
        await asyncio.sleep(0)
        if self._down:
            raise ConnectionError("nobody there")
        if message.id in self._refused:
            return "bad"
        self._arrived.append(_as_arrived(message))
        await self._flowing.wait()
        return None

    async def arrived(self) -> list[Arrived]:
        return self._arrived

    def refuse(self, message: Message) -> Message:
        self._refused.add(message.id)
        return message

    async def go_down(self) -> None:
        self._down = True

    async def come_back(self) -> None:
        self._down = False

    def narrow(self, seconds: float) -> Broker:
        options = replace(OPTIONS, send_timeout_seconds=seconds, concurrency=4)
        return CallBroker(self._receive, options)

    async def hold(self) -> None:
        self._flowing.clear()

    async def let_go(self) -> None:
        self._flowing.set()

    def gone_out(self, batch: Sequence[Message]) -> int:
        called = {one.id for one in self._arrived}
        return sum(message.id in called for message in batch)

    async def end(self) -> None:
        await self.broker.close()


class StdoutPlace:
    """Standard output is a pipe, and a thread reads it."""

    topic = "orders"
    pings = True
    prefix: Prefix = "ce-"
    encoded = True
    largest = 900_000
    pace = 1
    strict = False
    window: int | None = None

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._flowing = threading.Event()
        self._flowing.set()
        self._reader, writer = os.pipe()
        self._stream = os.fdopen(writer, "w")
        self.broker = StdoutBroker(OPTIONS, self._stream)
        self._read()

    def _read(self) -> None:
        source = self._reader

        def drain() -> None:
            while data := os.read(source, 65536):
                self._flowing.wait()
                self._bytes.extend(data)
            os.close(source)

        self._thread = threading.Thread(target=drain)
        self._thread.start()

    async def arrived(self) -> list[Arrived]:
        # A mark of our own behind everything: once it is read, all before it is.
        mark = f"mark {new_id()}\n".encode()
        os.write(self._stream.fileno(), mark)
        await eventually_async(lambda: self._bytes.endswith(mark))
        found = []
        for line in bytes(self._bytes).splitlines():
            if line.startswith(b"mark "):
                continue
            document = json.loads(line)
            if "payload" in document:
                payload = json.dumps(document["payload"]).encode()
            else:
                payload = base64.b64decode(document["payload_base64"])
            found.append(Arrived(document["id"], document["topic"], payload, document["headers"]))
        return found

    def refuse(self, message: Message) -> Message:
        return message._replace(headers_json="[broken")

    async def go_down(self) -> None:
        # A pipe in whose place nobody reads; the reader of the old one sees its end.
        reader, writer = os.pipe()
        os.dup2(writer, self._stream.fileno())
        os.close(writer)
        os.close(reader)
        await asyncio.to_thread(self._thread.join)

    async def come_back(self) -> None:
        self._reader, writer = os.pipe()
        os.dup2(writer, self._stream.fileno())
        os.close(writer)
        self._read()

    def narrow(self, seconds: float) -> Broker:
        return StdoutBroker(replace(OPTIONS, send_timeout_seconds=seconds), self._stream)

    async def hold(self) -> None:
        """What the pipe has room for is taken all the same."""
        self._flowing.clear()

    async def let_go(self) -> None:
        self._flowing.set()

    def gone_out(self, batch: Sequence[Message]) -> int:
        return sum(message.id.encode() in self._bytes for message in batch)

    async def end(self) -> None:
        self._flowing.set()
        await self.broker.close()
        self._stream.close()
        await asyncio.to_thread(self._thread.join)
