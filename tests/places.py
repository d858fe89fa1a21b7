"""Places to send to that have a server."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import unquote

import aiormq
import nats
from nats.js.api import AckPolicy, ConsumerConfig

from detour import Detour
from helpers_aws import left_in, make_queue, make_sns_topic
from helpers_kafka import read_all
from places_here import (
    OPTIONS,
    SOURCE,
    Arrived,
    CallPlace,
    MemoryPlace,
    Place,
    StdoutPlace,
)
from postroom.brokers import Broker, open_broker
from postroom.brokers.sqs import SqsBroker
from postroom.brokers.webhooks import WebhookBroker
from postroom.messages import Message, Prefix, new_id
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

__all__ = ["SERVED", "SOURCE", "UNSERVED", "CallPlace", "Place", "Served"]


class Served:
    """A place with a server, and a detour to it for the narrow broker."""

    broker: Broker
    pings = True
    prefix: Prefix = "ce-"
    encoded = True
    largest = 900_000
    pace = 1
    strict = True
    window: int | None = 16
    _narrowed: ClassVar[dict[str, str]] = {"max_outstanding": "16"}
    _server: Server
    _detour: Detour | None = None

    def _address(self, url: str) -> str:
        """The URL of a broker, from that of the server or of the detour."""
        return url

    def _new_detour(self) -> Detour:
        return Detour(self._server.url)

    def narrow(self, seconds: float) -> Broker:
        self._detour = self._new_detour()
        self._detour.start()
        options = replace(OPTIONS, send_timeout_seconds=seconds, extra=dict(self._narrowed))
        return open_broker(self._address(self._detour.url), options)

    @property
    def detour(self) -> Detour:
        """The way of the narrow broker."""
        assert self._detour is not None
        return self._detour

    async def hold(self) -> None:
        await asyncio.to_thread(self.detour.freeze, "to_client")

    async def let_go(self) -> None:
        await asyncio.to_thread(self.detour.thaw)

    def gone_out(self, batch: Sequence[Message]) -> int:
        return self.detour.passed(batch)

    async def go_down(self) -> None:
        self._server.require_private()
        await asyncio.to_thread(self._server.kill)

    async def come_back(self) -> None:
        await asyncio.to_thread(self._server.start)

    async def end(self) -> None:
        await self.broker.close()
        if self._detour is not None:
            await asyncio.to_thread(self._detour.close)


class NatsPlace(Served):
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
        await super().end()
        async with await nats.connect(self._server.url) as client:
            await client.jetstream().delete_stream(self._stream)


class KafkaPlace(Served):
    prefix: Prefix = "ce_"
    encoded = False

    def __init__(self, server: KafkaServer) -> None:
        self._server = self._kafka = server
        self.topic = f"t{new_id()}.orders"
        self.broker = open_broker(server.url, OPTIONS)

    async def begin(self) -> None:
        await asyncio.to_thread(self._kafka.create_topic, self.topic)

    def _new_detour(self) -> Detour:
        self._server.require_private()  # another may call itself by another name
        return Detour(self._server.url, instead_of=self._kafka.port)

    async def arrived(self) -> list[Arrived]:
        records = await asyncio.to_thread(read_all, self._kafka, self.topic)
        return [
            Arrived(record.headers["event_id"], self.topic, record.value, record.headers)
            for record in records
        ]

    def refuse(self, message: Message) -> Message:
        return message._replace(payload=b"x" * 1_100_000)


class RedisPlace(Served):
    strict = False

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
        await super().end()
        with self._redis.client() as client:
            client.delete(self.topic)


class AmqpPlace(Served):
    """An exchange, and a queue of the quorum kind that is bound to it."""

    prefix: Prefix = "cloudEvents_"
    encoded = False

    def __init__(self, server: RabbitMQServer) -> None:
        self._server = self._rabbitmq = server
        self.topic = f"t{new_id()}.orders"
        self.broker = open_broker(self._address(server.url), OPTIONS)
        self._found: list[Arrived] = []

    def _address(self, url: str) -> str:
        return f"{url}?exchange=conformance"

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
        await super().end()
        async with aiormq.connect(self._server.url) as connection:
            channel = await connection.channel()
            await channel.queue_delete(self.topic)


class WebhookPlace(Served):
    encoded = False
    pace = 10
    strict = False
    window: int | None = 4
    _narrowed: ClassVar[dict[str, str]] = {"concurrency": "4"}

    def __init__(self, server: WebhookServer) -> None:
        self._server = self._receiver = server
        self.topic = f"t{new_id()}.orders"
        # One request for each message takes longer than one write for all of them.
        patient = replace(OPTIONS, send_timeout_seconds=90.0)
        self.broker = WebhookBroker(self._address(server.url), patient)

    def _address(self, url: str) -> str:
        return f"{url}/conformance/{{topic}}#allow=127.0.0.1&allow_http=yes&unsigned=yes"

    async def begin(self) -> None:
        """It takes whatever comes."""

    async def arrived(self) -> list[Arrived]:
        received = await asyncio.to_thread(lambda: self._receiver.received)
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

    async def end(self) -> None:
        await super().end()
        self._receiver.forget()


class SqsPlace(Served):
    """A queue, or a topic of SNS with a queue that subscribes to it. The server keeps all in
    memory, so what goes down is the way to it; `test_sqs.py` kills the server itself."""

    encoded = False
    pace = 25
    window: int | None = 20  # two requests
    _narrowed: ClassVar[dict[str, str]] = {"concurrency": "2"}

    def __init__(self, server: MotoServer, service: str) -> None:
        self._server = self._moto = server
        self._service = service
        self.largest = {"sqs": 700_000, "sns": 180_000}[service]
        self.topic = f"t{new_id()}.orders"
        self._proxy = ChaosProxy(server.url)
        self._proxy.start()
        patient = replace(OPTIONS, send_timeout_seconds=90.0)
        self.broker = open_broker(self._address(self._proxy.url), patient)
        self._reader = SqsBroker(server.aws("sqs"), OPTIONS)
        self._found: list[Arrived] = []

    def _address(self, url: str) -> str:
        return f"{self._service}://test:secret@us-east-1?endpoint={url}"

    async def begin(self) -> None:
        name = self.topic.replace(".", "-")
        self._queue = await make_queue(self._moto, name)
        if self._service == "sns":
            await make_sns_topic(self._moto, name, queues=[name])

    async def arrived(self) -> list[Arrived]:
        inbox = await self._reader.receive([self.topic], consumer="reader")
        # A poll that takes its time brings nothing yet.
        while (taken := await inbox.take(10)) or await left_in(self._moto, self._queue):
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
        await super().end()
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
