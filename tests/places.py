"""Places to send to: a broker together with the far end of it, what arrived there, and how to
break it."""

import asyncio
import base64
import functools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import unquote

import aiormq
import nats
from nats.js.api import AckPolicy, ConsumerConfig

from helpers import eventually_async
from helpers_aws import left_in, make_queue, make_sns_topic
from helpers_kafka import read_all
from postroom.brokers import Broker, BrokerOptions, Permanent, open_broker
from postroom.brokers.call import CallBroker
from postroom.brokers.memory import MemoryBroker
from postroom.brokers.sns import SnsBroker
from postroom.brokers.sqs import SqsBroker
from postroom.brokers.stdout import StdoutBroker
from postroom.brokers.webhooks import WebhookBroker
from postroom.messages import Message, Prefix, new_id, wire_headers
from proxy import ChaosProxy
from servers import (
    KafkaServer,
    MotoServer,
    NatsServer,
    RabbitMQServer,
    RedisServer,
    Server,
    WebhookServer,
)

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
    prefix: Prefix = "ce-"
    encoded = True
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
    prefix: Prefix = "ce-"
    encoded = True
    largest = 900_000
    pace = 1

    def __init__(self) -> None:
        # Thousands of calls take a busy machine longer than one write for all of them.
        self.broker = CallBroker(self._receive, replace(OPTIONS, send_timeout_seconds=60.0))
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
    prefix: Prefix = "ce-"
    encoded = True
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


class _Killable:
    """A place with a server of its own."""

    pings = True
    prefix: Prefix = "ce-"
    encoded = True
    largest = 900_000
    pace = 1
    _server: Server

    async def go_down(self) -> None:
        self._server.require_private()
        await asyncio.to_thread(self._server.kill)

    async def come_back(self) -> None:
        await asyncio.to_thread(self._server.start)


class NatsPlace(_Killable):
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

    async def end(self) -> None:
        await self.broker.close()
        async with await nats.connect(self._server.url) as client:
            await client.jetstream().delete_stream(self._stream)


class KafkaPlace(_Killable):
    prefix: Prefix = "ce_"
    encoded = False

    def __init__(self, server: KafkaServer) -> None:
        self._server = server
        self.topic = f"t{new_id()}.orders"
        self.broker = open_broker(server.url, OPTIONS)

    async def begin(self) -> None:
        await asyncio.to_thread(self._server.create_topic, self.topic)

    async def arrived(self) -> list[Arrived]:
        records = await asyncio.to_thread(read_all, self._server, self.topic)
        return [
            Arrived(record.headers["event_id"], self.topic, record.value, record.headers)
            for record in records
        ]

    def refuse(self, message: Message) -> Message:
        return message._replace(payload=b"x" * 1_100_000)

    async def end(self) -> None:
        await self.broker.close()


class RedisPlace(_Killable):
    def __init__(self, server: RedisServer) -> None:
        self._server = self._redis = server
        self.topic = f"t{new_id()}.orders"
        self.broker = open_broker(server.url, OPTIONS)

    async def begin(self) -> None:
        """Streams come into being by themselves."""

    async def arrived(self) -> list[Arrived]:
        def read() -> Any:
            with self._redis.client() as client:
                return client.xrange(self.topic)

        found = []
        for _, fields in await asyncio.to_thread(read):
            payload = fields.pop(b"payload")
            headers = {name.decode(): value.decode() for name, value in fields.items()}
            found.append(Arrived(headers["event_id"], self.topic, payload, headers))
        return found

    def refuse(self, message: Message) -> Message:
        return message._replace(headers_json="[broken")

    async def end(self) -> None:
        await self.broker.close()
        with self._redis.client() as client:
            client.delete(self.topic)


class AmqpPlace(_Killable):
    """An exchange, and a queue of the quorum kind that is bound to it."""

    prefix: Prefix = "cloudEvents_"
    encoded = False

    def __init__(self, server: RabbitMQServer) -> None:
        self._server = self._rabbitmq = server
        self.topic = f"t{new_id()}.orders"
        self.broker = open_broker(f"{server.url}?exchange=conformance", OPTIONS)
        self._found: list[Arrived] = []

    async def begin(self) -> None:
        await self.broker.ping()  # it makes the exchange
        async with aiormq.connect(self._server.url) as connection:
            channel = await connection.channel()
            kind = {"x-queue-type": "quorum"}
            await channel.queue_declare(self.topic, durable=True, arguments=kind)
            await channel.queue_bind(self.topic, "conformance", self.topic)
        await self._rabbitmq.written_down(self.topic)

    async def arrived(self) -> list[Arrived]:
        async with aiormq.connect(self._server.url) as connection:
            channel = await connection.channel()

            async def take(message: Any) -> None:
                head = message.header.properties
                self._found.append(
                    Arrived(
                        head.headers["event_id"],
                        message.delivery.routing_key,
                        message.body,
                        head.headers | {"content-type": head.content_type},
                    )
                )

            await channel.basic_consume(self.topic, take, no_ack=True)
            # How many there are the server tells only roughly: a pause is the end of them.
            seen = -1
            while seen != len(self._found):
                seen = len(self._found)
                await asyncio.sleep(1)
        return self._found

    def refuse(self, message: Message) -> Message:
        return message._replace(headers_json="[broken")

    async def end(self) -> None:
        await self.broker.close()
        async with aiormq.connect(self._server.url) as connection:
            channel = await connection.channel()
            await channel.queue_delete(self.topic)


class WebhookPlace:
    pings = True
    prefix: Prefix = "ce-"
    encoded = False
    largest = 900_000
    pace = 10

    def __init__(self, server: WebhookServer) -> None:
        self._server = server
        self.topic = f"t{new_id()}.orders"
        url = f"{server.url}/conformance/{{topic}}#allow=127.0.0.1&allow_http=yes&unsigned=yes"
        # One request for each message takes longer than one write for all of them.
        self.broker = WebhookBroker(url, replace(OPTIONS, send_timeout_seconds=90.0))

    async def begin(self) -> None:
        """It takes whatever comes."""

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
    prefix: Prefix = "ce-"
    encoded = False
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


SERVED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nats": (NatsPlace, "nats_server"),
    "kafka": (KafkaPlace, "kafka_server"),
    "redis": (RedisPlace, "redis_server"),
    "amqp": (AmqpPlace, "rabbitmq_server"),
    "webhooks": (WebhookPlace, "webhook_server"),
    "sqs": (functools.partial(SqsPlace, service="sqs"), "moto_server"),
    "sns": (functools.partial(SqsPlace, service="sns"), "moto_server"),
}
UNSERVED: dict[str, Callable[[], Any]] = {
    "memory": MemoryPlace,
    "stdout": StdoutPlace,
    "call": CallPlace,
}
