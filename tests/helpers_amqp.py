"""An exchange of RabbitMQ for one test, a queue at it, and a broker that sends there."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiormq

from postroom.brokers import BrokerOptions
from postroom.brokers.amqp import AmqpBroker
from postroom.messages import new_id
from servers import RabbitMQServer

PATIENT = BrokerOptions(send_timeout_seconds=20.0)


class Shelf:
    """An exchange and a topic of our own, and a broker that sends to it."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.server = server
        self.exchange = f"e{new_id()}"
        self.topic = f"t{new_id()}"
        self.url = f"{server.url}?exchange={self.exchange}"
        self.broker = AmqpBroker(self.url, PATIENT)

    async def queue(self, topic: str | None = None, *, bind: bool = True, **arguments: Any) -> str:
        """Make a queue for a topic, of its name."""
        topic = topic or self.topic
        await self.broker.ping()  # makes the exchange
        async with aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            named = {name.replace("_", "-"): value for name, value in arguments.items()}
            await channel.queue_declare(topic, durable=True, arguments=named)
            if bind:
                await channel.queue_bind(topic, self.exchange, topic)
        return topic

    async def kept(self, topic: str | None = None) -> int:
        async with aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            found = await channel.queue_declare(topic or self.topic, passive=True)
            return found.message_count or 0

    async def clear(self) -> None:
        async with aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            for consumer in ("billing",):
                await channel.queue_delete(f"{self.exchange}.{consumer}")
            await channel.queue_delete(self.topic)
            await channel.exchange_delete(self.exchange)


@contextlib.asynccontextmanager
async def opened(server: RabbitMQServer) -> AsyncIterator[Shelf]:
    made = Shelf(server)
    yield made
    await made.broker.close()
    await made.clear()
