"""What every broker must do, run on each of them; what only one does stands in a file of its own.

A `Place` is a broker together with the far end of it: what arrived there, and how to break it.
"""

import asyncio
import base64
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import unquote

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from helpers import eventually_async
from helpers_aws import left_in, make_queue, make_sns_topic
from helpers_messages import make_message, make_messages
from postroom.brokers import (
    Broker,
    BrokerOptions,
    CanLookUp,
    Delivered,
    Outcome,
    Permanent,
    Transient,
    Unknown,
    open_broker,
)
from postroom.brokers.call import CallBroker
from postroom.brokers.memory import MemoryBroker
from postroom.brokers.sns import SnsBroker
from postroom.brokers.sqs import SqsBroker
from postroom.brokers.stdout import StdoutBroker
from postroom.brokers.webhooks import WebhookBroker
from postroom.errors import Unreachable
from postroom.messages import Message, new_id, wire_headers
from proxy import ChaosProxy
from servers import MotoServer, NatsServer, WebhookServer

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
    largest: int  # bytes that are no text and fit
    pace: int  # how much fewer messages do where each costs more

    async def arrived(self) -> list[Arrived]: ...
    def refuse(self, message: Message) -> Message:
        """Make the broker refuse this message for ever; gives the message to send."""

    async def go_down(self) -> None: ...
    async def come_back(self) -> None: ...
    async def end(self) -> None: ...


def _as_arrived(message: Message) -> Arrived:
    headers = wire_headers(message, source=SOURCE)
    return Arrived(message.id, message.topic, message.payload, headers)


class MemoryPlace:
    topic = "orders"
    pings = True
    largest = 900_000
    pace = 1

    def __init__(self) -> None:
        self.broker = MemoryBroker()

    async def arrived(self) -> list[Arrived]:
        return [_as_arrived(message) for message in self.broker.messages]

    def refuse(self, message: Message) -> Message:
        self.broker.fail(message.id, Permanent("bad", "no"), times=None)
        return message

    async def go_down(self) -> None:
        self.broker.down = True

    async def come_back(self) -> None:
        self.broker.down = False

    async def end(self) -> None:
        await self.broker.close()


class CallPlace:
    topic = "orders"
    pings = False  # it has nothing to ping
    largest = 900_000
    pace = 1

    def __init__(self) -> None:
        self.broker = CallBroker(self._receive, OPTIONS)
        self._arrived: list[Arrived] = []
        self._refused: set[str] = set()
        self._down = False

    async def _receive(self, message: Message) -> str | None:
        await asyncio.sleep(0)
        if self._down:
            raise ConnectionError("nobody there")
        if message.id in self._refused:
            return "bad"
        self._arrived.append(_as_arrived(message))
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

    async def end(self) -> None:
        await self.broker.close()


class StdoutPlace:
    """Standard output is a pipe, and a thread reads it."""

    topic = "orders"
    pings = True
    largest = 900_000
    pace = 1

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._reader, writer = os.pipe()
        self._stream = os.fdopen(writer, "w")
        self.broker = StdoutBroker(OPTIONS, self._stream)
        self._read()

    def _read(self) -> None:
        source = self._reader

        def drain() -> None:
            while data := os.read(source, 65536):
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

    async def end(self) -> None:
        await self.broker.close()
        self._stream.close()
        await asyncio.to_thread(self._thread.join)


class NatsPlace:
    pings = True
    largest = 900_000
    pace = 1

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.topic = f"t{new_id()}.orders"
        self._stream = self.topic.replace(".", "_")
        self.broker = open_broker(server.url, OPTIONS)

    async def begin(self) -> None:
        async with await nats.connect(self._server.url) as client:
            await client.jetstream().add_stream(name=self._stream, subjects=[self.topic])

    async def arrived(self) -> list[Arrived]:
        async with await nats.connect(self._server.url) as client:
            jetstream = client.jetstream()
            kept = (await jetstream.stream_info(self._stream)).state.messages
            unacked = ConsumerConfig(ack_policy=AckPolicy.NONE)
            reader = await jetstream.pull_subscribe(self.topic, stream=self._stream, config=unacked)
            found: list[Any] = []
            while len(found) < kept:
                found += await reader.fetch(500, timeout=5)
            return [
                Arrived(m.headers["event_id"], m.subject, m.data, dict(m.headers)) for m in found
            ]

    def refuse(self, message: Message) -> Message:
        return message._replace(payload=b"x" * 1_100_000)

    async def go_down(self) -> None:
        self._server.require_private()
        await asyncio.to_thread(self._server.kill)

    async def come_back(self) -> None:
        await asyncio.to_thread(self._server.start)

    async def end(self) -> None:
        await self.broker.close()
        async with await nats.connect(self._server.url) as client:
            await client.jetstream().delete_stream(self._stream)


class WebhookPlace:
    pings = True
    largest = 900_000
    pace = 10

    def __init__(self, server: WebhookServer) -> None:
        self._server = server
        self.topic = f"t{new_id()}.orders"
        url = f"{server.url}/conformance/{{topic}}#allow=127.0.0.1&allow_http=yes&unsigned=yes"
        # One request for each message takes longer than one write for all of them.
        self.broker = WebhookBroker(url, replace(OPTIONS, send_timeout_seconds=90.0))

    async def arrived(self) -> list[Arrived]:
        received = await asyncio.to_thread(lambda: self._server.received)
        return [
            Arrived(
                each.headers["webhook-id"],
                each.path.rpartition("/")[2],
                each.body,
                # Names are in any case in HTTP, and one of the tests writes a capital.
                {"X-Line" if n == "x-line" else n: unquote(v) for n, v in each.headers.items()},
            )
            for each in received
            if each.path.endswith(self.topic)
        ]

    def refuse(self, message: Message) -> Message:
        return message._replace(type="refuse-me")

    async def go_down(self) -> None:
        await asyncio.to_thread(self._server.kill)

    async def come_back(self) -> None:
        await asyncio.to_thread(self._server.start)

    async def end(self) -> None:
        await self.broker.close()
        self._server.forget()


class SqsPlace:
    """A queue, or a topic of SNS with a queue that subscribes to it. The server keeps all in
    memory, so what goes down is the way to it; `test_sqs.py` kills the server itself."""

    pings = True
    pace = 25

    def __init__(self, server: MotoServer, service: str) -> None:
        self._server, self._service = server, service
        self.largest = {"sqs": 700_000, "sns": 180_000}[service]
        self.topic = f"t{new_id()}.orders"
        self._proxy = ChaosProxy(server.url)
        self._proxy.start()
        url = f"{service}://test:secret@us-east-1?endpoint={self._proxy.url}"
        made = {"sqs": SqsBroker, "sns": SnsBroker}[service]
        self.broker = made(url, replace(OPTIONS, send_timeout_seconds=90.0))
        self._reader = SqsBroker(server.aws("sqs"), OPTIONS)
        self._found: list[Arrived] = []

    async def begin(self) -> None:
        name = self.topic.replace(".", "-")
        self._queue = await make_queue(self._server, name)
        if self._service == "sns":
            await make_sns_topic(self._server, name, queues=[name])

    async def arrived(self) -> list[Arrived]:
        inbox = await self._reader.receive([self.topic], consumer="reader")
        # A poll that takes its time brings nothing yet.
        while (taken := await inbox.take(10)) or await left_in(self._server, self._queue):
            self._found += [Arrived(d.id, d.topic, d.payload, d.headers) for d in taken]
            await inbox.ack(taken)
        await inbox.close()
        return [
            # Names of headers are taken in lower case, and one of the tests writes a capital.
            replace(a, headers={"X-Line" if n == "x-line" else n: v for n, v in a.headers.items()})
            for a in self._found
        ]

    def refuse(self, message: Message) -> Message:
        return message._replace(payload=b"x" * 1_100_000)

    async def go_down(self) -> None:
        await asyncio.to_thread(self._proxy.refuse)
        await asyncio.to_thread(self._proxy.cut)

    async def come_back(self) -> None:
        await asyncio.to_thread(self._proxy.accept)

    async def end(self) -> None:
        await self.broker.close()
        await self._reader.close()
        await asyncio.to_thread(self._proxy.close)


@pytest.fixture(params=["memory", "stdout", "call", "nats", "webhooks", "sqs", "sns"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    if request.param in ("sqs", "sns"):
        made: Any = SqsPlace(request.getfixturevalue("moto_server"), request.param)
        await made.begin()
    elif request.param == "webhooks":
        made = WebhookPlace(request.getfixturevalue("webhook_server"))
    elif request.param == "nats":
        made = NatsPlace(request.getfixturevalue("nats_server"))
        await made.begin()
    else:
        made = {"memory": MemoryPlace, "stdout": StdoutPlace, "call": CallPlace}[request.param]()
    yield made
    await made.end()


def all_delivered(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome == Delivered() for outcome in outcomes)


async def test_each_message_arrives_as_it_was(place: Place) -> None:
    batch = make_messages(20, topic=place.topic)
    assert await place.broker.send(batch) == [Delivered()] * 20
    arrived = await place.arrived()
    assert sorted((a.id, a.topic, a.payload) for a in arrived) == sorted(
        (m.id, m.topic, m.payload) for m in batch
    )


async def test_an_empty_batch_is_nothing(place: Place) -> None:
    assert await place.broker.send([]) == []
    assert await place.arrived() == []


async def test_outcomes_stand_in_the_order_of_the_messages(place: Place) -> None:
    batch = make_messages(30, topic=place.topic, keys=30)
    batch[3], batch[17] = place.refuse(batch[3]), place.refuse(batch[17])
    outcomes = await place.broker.send(batch)
    refused = [index for index, outcome in enumerate(outcomes) if outcome != Delivered()]
    assert refused == [3, 17]
    assert all(isinstance(outcomes[index], Permanent) for index in refused)
    expected = {m.id for index, m in enumerate(batch) if index not in refused}
    assert {a.id for a in await place.arrived()} == expected


async def test_empty_binary_and_large_payloads(place: Place) -> None:
    payloads = [b"", b"\x00\xff\r\n\r\nPUB other 0\r\n\r\n", b"\n\n", os.urandom(place.largest)]
    batch = [
        make_message(payload, topic=place.topic, content_type="application/octet-stream")
        for payload in payloads
    ]
    assert all_delivered(await place.broker.send(batch))
    arrived = {a.id: a.payload for a in await place.arrived()}
    assert [arrived[m.id] for m in batch] == payloads


async def test_headers_survive(place: Place) -> None:
    own = {"greeting": "grüße, 世界 🌍", "empty": "", "colons": "a: b: c", "X-Line": "a\u2028b"}
    message = make_message(
        topic=place.topic,
        key="ключ-1",
        aggregate_type="commande",
        aggregate_id="№ 7",
        headers=own,
    )
    assert all_delivered(await place.broker.send([message]))
    (arrived,) = await place.arrived()
    expected = own | {
        "ce-id": message.id,
        "ce-type": "order.placed.v1",
        "ce-source": SOURCE,
        "ce-specversion": "1.0",
        "ce-partitionkey": "ключ-1",
        "content-type": "application/json",
        "event_id": message.id,
        "event_type": "order.placed.v1",
        "aggregate_type": "commande",
        "aggregate_id": "№ 7",
    }
    assert {name: arrived.headers.get(name) for name in expected} == expected


async def test_five_thousand_at_once(place: Place) -> None:
    batch = make_messages(5_000 // place.pace, topic=place.topic, keys=50)
    assert all_delivered(await place.broker.send(batch))
    assert {a.id for a in await place.arrived()} == {m.id for m in batch}


async def test_sends_side_by_side_do_not_mix(place: Place) -> None:
    count = 200 // min(place.pace, 10)
    batches = [make_messages(count, topic=place.topic, keys=200) for _ in range(5)]
    for number, batch in enumerate(batches):
        batch[number] = place.refuse(batch[number])
    answers = await asyncio.gather(*(place.broker.send(batch) for batch in batches))
    for number, outcomes in enumerate(answers):
        assert [i for i, o in enumerate(outcomes) if o != Delivered()] == [number]
    assert len(await place.arrived()) == 5 * (count - 1)


async def test_ping(place: Place) -> None:
    await place.broker.ping()
    if place.pings:
        await place.go_down()
        with pytest.raises(Unreachable):
            await place.broker.ping()
        await place.come_back()
        await place.broker.ping()


async def test_nothing_is_delivered_while_it_is_down(place: Place) -> None:
    first, second = make_messages(10, topic=place.topic), make_messages(10, topic=place.topic)
    assert all_delivered(await place.broker.send(first))
    await place.go_down()
    for outcome in await place.broker.send(second):
        assert isinstance(outcome, Transient | Unknown)
        assert outcome.down == "broker" or isinstance(place, CallPlace)
    await place.come_back()
    assert all_delivered(await place.broker.send(second))
    assert {a.id for a in await place.arrived()} == {m.id for m in first + second}


async def test_what_was_delivered_through_an_outage_is_there(place: Place) -> None:
    todo = make_messages(6_000 // place.pace, topic=place.topic, keys=6_000)
    everything = {m.id for m in todo}
    delivered: set[str] = set()

    async def deliver() -> None:
        left = list(todo)
        while left:
            size = max(100 // place.pace, 2)
            batch, left = left[:size], left[size:]
            for message, outcome in zip(batch, await place.broker.send(batch), strict=True):
                if outcome == Delivered():
                    delivered.add(message.id)
                else:
                    left.append(message)
            await asyncio.sleep(0.001)

    delivering = asyncio.create_task(deliver())
    await eventually_async(lambda: len(delivered) > 500 // place.pace, 60, interval=0.001)
    await place.go_down()
    assert not delivering.done()
    before = set(delivered)
    await place.come_back()
    await asyncio.wait_for(delivering, 120)
    arrived = {a.id for a in await place.arrived()}
    assert before <= arrived
    assert delivered == everything == arrived


async def test_close_lets_a_send_come_to_its_end(place: Place) -> None:
    batch = make_messages(2_000 // place.pace, topic=place.topic)
    sending = asyncio.create_task(place.broker.send(batch))
    await asyncio.sleep(0.005)
    await place.broker.close()
    assert all_delivered(await sending)
    assert {a.id for a in await place.arrived()} == {m.id for m in batch}


async def test_close_twice(place: Place) -> None:
    await place.broker.close()
    await place.broker.close()


async def test_it_is_a_broker(place: Place) -> None:
    assert isinstance(place.broker, Broker)
    assert not isinstance(place.broker, CanLookUp)
