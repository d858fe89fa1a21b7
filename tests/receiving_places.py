"""Places to receive from: a broker with topics of its own, what it is like, and how to break it.

A broker joins `tests/brokers/test_receiving.py` with a class here and a line in `PLACES`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import aiormq
import nats
from confluent_kafka import Producer
from pamqp.commands import Basic

from helpers_aws import client, make_queue, make_sns_topic
from helpers_receiving import OPTIONS, send
from postroom.brokers import CanReceive, Subscription, open_broker
from postroom.brokers.memory import MemoryBroker
from postroom.messages import Message, new_id
from proxy import ChaosProxy
from servers import KafkaServer, MotoServer, NatsServer, RabbitMQServer, RedisServer, Server

CONSUMERS = ("billing", "shipping")


class Place:
    """Two topics, of which the first is made, and what this broker cannot do."""

    server: ClassVar[str | None] = None  # the fixture of its server
    exclusive = True  # a source has one receiver at a time; else the broker keeps keys apart
    processes = True  # it can be received from in a process of its own
    pausable = True
    lease_seconds: float | None = None  # who says nothing for so long loses what it has
    acks_each = True  # what was acknowledged comes no more, also behind what was not
    counts = True  # to another receiver, too, it tells that a message came before
    strangers = True  # messages may come from others, who know nothing of ours
    names_strangers = True  # and it has a lasting name for each of those
    wakes = True  # what is given back ends a wait for it
    largest = 900_000  # bytes that are no text and fit
    pace = 1  # how much fewer messages do where each costs more
    options = OPTIONS
    url: str  # also for another process, whose death is to be found out soon

    def __init__(self) -> None:
        self.topics = [f"t{new_id()}.orders", f"t{new_id()}.payments"]
        self._opened: list[Any] = []

    @property
    def topic(self) -> str:
        return self.topics[0]

    def open(self) -> Any:
        broker = open_broker(self.url, self.options)
        assert isinstance(broker, CanReceive)
        self._opened.append(broker)
        return broker

    async def begin(self) -> None:
        self.broker = self.open()
        await self.make(self.topic)

    async def make(self, topic: str) -> None:
        """Make all that must be there before the first message of a topic."""

    async def send(self, messages: Sequence[Message]) -> None:
        await send(self.broker, messages)

    async def send_bare(self, payload: bytes, content_type: str = "") -> None:
        """As a stranger would, without any header but that of its content type."""
        raise NotImplementedError

    def named(self, consumer: str) -> str:
        """What the consumer is called at this broker."""
        return consumer

    async def receive(self, consumer: str, topics: Sequence[str] | None = None) -> Subscription:
        subscription: Subscription = await self.broker.receive(
            topics or [self.topic], consumer=self.named(consumer)
        )
        return subscription

    async def written_down(self) -> None:
        """Wait until all that was made so far would outlive a kill: at once, as a rule."""

    async def kill(self) -> None: ...
    async def restart(self) -> None: ...
    def paused(self) -> contextlib.AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def end(self) -> None:
        for broker in self._opened:
            await broker.close()


class ServedPlace(Place):
    """A place with a server that may be killed and halted."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self.url = server.url

    async def kill(self) -> None:
        self._server.require_private()
        await asyncio.to_thread(self._server.kill)

    async def restart(self) -> None:
        await asyncio.to_thread(self._server.start)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self._server.require_private()
        with self._server.paused():
            yield


class NatsPlace(ServedPlace):
    server = "nats_server"
    lease_seconds = 3.0
    options = replace(OPTIONS, extra={"ack_wait_seconds": "3"})

    def __init__(self, server: NatsServer) -> None:
        super().__init__(server)
        self._streams: list[str] = []

    async def make(self, topic: str) -> None:
        self._streams.append(topic.replace(".", "_"))
        async with await nats.connect(self.url) as connection:
            await connection.jetstream().add_stream(name=self._streams[-1], subjects=[topic])

    async def send_bare(self, payload: bytes, content_type: str = "") -> None:
        async with await nats.connect(self.url) as connection:
            headers = {"Content-Type": content_type} if content_type else None
            await connection.jetstream().publish(self.topic, payload, headers=headers)

    async def end(self) -> None:
        await super().end()
        async with await nats.connect(self.url) as connection:
            for stream in self._streams:
                await connection.jetstream().delete_stream(stream)


class KafkaPlace(ServedPlace):
    """A topic has one partition, so that a receiver that comes takes nothing from another."""

    server = "kafka_server"
    acks_each = False
    counts = False
    options = replace(OPTIONS, extra={"session.timeout.ms": "3000", "heartbeat.interval.ms": "300"})

    def __init__(self, server: KafkaServer) -> None:
        super().__init__(server)
        self._kafka = server
        self._own = new_id()

    async def make(self, topic: str) -> None:
        await asyncio.to_thread(self._kafka.create_topic, topic, partitions=1)

    async def send_bare(self, payload: bytes, content_type: str = "") -> None:
        stranger = Producer(self._kafka.client_settings())
        headers = [("content-type", content_type.encode())] if content_type else None
        stranger.produce(self.topic, payload, headers=headers)
        assert await asyncio.to_thread(stranger.flush, 30) == 0

    def named(self, consumer: str) -> str:
        """A group is of the whole server, not of a topic: members of other tests may be in it."""
        return f"{consumer}-{self._own}"


class RedisPlace(ServedPlace):
    server = "redis_server"
    lease_seconds = 2.0

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server)
        self._redis = server
        self.url = f"{server.url}?lease_seconds=2&prefix=in:"

    async def send_bare(self, payload: bytes, content_type: str = "") -> None:
        with self._redis.client() as connection:
            fields = {"content-type": content_type} if content_type else {}
            connection.xadd(f"in:{self.topic}", {**fields, "payload": payload})

    async def end(self) -> None:
        await super().end()
        with self._redis.client() as connection:
            connection.delete(*(f"in:{topic}" for topic in self.topics))


class AmqpPlace(ServedPlace):
    """An exchange, and on it a queue for each consumer, without which nothing can be sent."""

    server = "rabbitmq_server"
    kind = "quorum"
    names_strangers = False

    def __init__(self, server: RabbitMQServer) -> None:
        super().__init__(server)
        self._rabbitmq = server
        self._exchange = f"e{new_id()}"
        self._queues = [f"{self._exchange}.{consumer}" for consumer in CONSUMERS]
        self.url = f"{server.url}?exchange={self._exchange}&queue_type={self.kind}&heartbeat=2"

    async def make(self, topic: str) -> None:
        for consumer in CONSUMERS:
            await (await self.receive(consumer, [topic])).close()

    async def send_bare(self, payload: bytes, content_type: str = "") -> None:
        async with aiormq.connect(self._server.url) as connection:
            channel = await connection.channel()
            await channel.basic_publish(
                payload,
                exchange=self._exchange,
                routing_key=self.topic,
                properties=Basic.Properties(content_type=content_type or None),
            )

    async def written_down(self) -> None:
        if self.kind == "quorum":
            await self._rabbitmq.written_down(*self._queues)

    async def end(self) -> None:
        await super().end()
        async with aiormq.connect(self._server.url) as connection:
            channel = await connection.channel()
            for queue in self._queues:
                await channel.queue_delete(queue)
            await channel.exchange_delete(self._exchange)


class AmqpClassicPlace(AmqpPlace):
    kind = "classic"


class SqsPlace(Place):
    """A FIFO topic of SNS, and a FIFO queue for each consumer that subscribes to it.

    The server keeps all in memory, so what is killed and halted is the way to it. Of a group of
    which several messages come back by themselves it hands out the last one first, which AWS does
    not: no test here leaves more than one of a key to its time.
    """

    server = "moto_server"
    exclusive = False
    lease_seconds = 2.0
    wakes = False  # AWS does
    largest = 180_000
    pace = 5
    options = replace(OPTIONS, send_timeout_seconds=30.0)

    def __init__(self, server: MotoServer) -> None:
        super().__init__()
        self._server = server
        self._proxy = ChaosProxy(server.url)
        self._queues: list[str] = []
        self.url = self._url("sqs", "{consumer}-{topic}.fifo") + "&visibility_seconds=2"

    def _url(self, service: str, name: str) -> str:
        return f"{service}://test:secret@us-east-1/{name}?endpoint={self._proxy.url}"

    async def begin(self) -> None:
        self._proxy.start()
        self._sender = open_broker(self._url("sns", "{topic}.fifo"), self.options)
        self._opened.append(self._sender)
        await super().begin()

    async def make(self, topic: str) -> None:
        name = f"{topic.replace('.', '-')}.fifo"
        queues = [f"{consumer}-{name}" for consumer in CONSUMERS]
        self._queues += [await make_queue(self._server, queue) for queue in queues]
        await make_sns_topic(self._server, name, queues=queues)

    async def send(self, messages: Sequence[Message]) -> None:
        await send(self._sender, messages)

    async def send_bare(self, payload: bytes, content_type: str = "") -> None:
        names: dict[str, Any] = {"MessageGroupId": "g", "MessageDeduplicationId": new_id()}
        if content_type:
            value = {"DataType": "String", "StringValue": content_type}
            names["MessageAttributes"] = {"content-type": value}
        async with client(self._server, "sqs") as sqs:
            for queue in self._queues:
                await sqs.send_message(QueueUrl=queue, MessageBody=payload.decode(), **names)

    async def kill(self) -> None:
        await asyncio.to_thread(self._proxy.refuse)
        await asyncio.to_thread(self._proxy.cut)

    async def restart(self) -> None:
        await asyncio.to_thread(self._proxy.accept)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self._proxy.freeze, "to_client")
        try:
            yield
        finally:
            await asyncio.to_thread(self._proxy.thaw)

    async def end(self) -> None:
        await super().end()
        await asyncio.to_thread(self._proxy.close)


class MemoryPlace(Place):
    """A process of its own has a broker of its own, and nothing in it can hang."""

    processes = False
    pausable = False
    strangers = False

    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://t{new_id()}"

    async def kill(self) -> None:
        """A server that dies forgets who received from it."""
        memory: MemoryBroker = self.broker
        memory.down = True
        for consumer in CONSUMERS:
            memory.rebalance(consumer)

    async def restart(self) -> None:
        self.broker.down = False

    async def end(self) -> None:
        self.broker.clear()


PLACES: dict[str, Any] = {
    "nats": NatsPlace,
    "kafka": KafkaPlace,
    "redis": RedisPlace,
    "amqp": AmqpPlace,
    "amqp_classic": AmqpClassicPlace,
    "sqs": SqsPlace,
    "memory": MemoryPlace,
}


def places_with(*members: str) -> list[str]:
    """The names of the places that have all of these."""
    return [name for name, kind in PLACES.items() if all(getattr(kind, m) for m in members)]
