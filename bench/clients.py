"""What the clients of brokers can do by themselves, for the relay to be measured against.

They send the same bytes with the same headers as a relay would, and each message has its answer.
All of it is made before the clock starts: nothing is timed but the client's own work. Each way is
the best pipeline we know, made of what the library offers to everybody.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import stage

from postroom.brokers.base import DELIVERED, open_broker
from postroom.brokers.kafka_wire import Stamp
from postroom.messages import Message, lane_of, new_id, wire_headers

SOURCE, EPOCH = "postroom", 1
CREATED_US = 1_790_000_000_000_000
AT_ONCE = 500  # publishes under way on a channel of RabbitMQ
PIPELINE = 500  # commands of one pipeline of Redis
PIPELINES = 2  # one is being made while the other is being answered
# A producer that is used at once may wait half a second for its number, as librdkafka has it.
HEAD_START_SECONDS = 0.02
SENDS, SEND_ROWS = 4, 1000  # of an adapter without a relay


def _messages(count: int) -> list[Message]:
    return [_message(number) for number in range(count)]


def _message(number: int) -> Message:
    id, key, payload = new_id(), f"k{number % stage.KEYS}", stage.payload_of(number)
    return Message(
        lane_of(stage.SUBJECT, key, id), number, id, stage.SUBJECT, key, "bench.v1", None, None,
        "application/json", None, payload, len(payload), 0, CREATED_US + number, 0, 0, 0, None,
    )  # fmt: skip


def _settle_down() -> None:
    """What was made so far is of no concern to the garbage collector."""
    gc.collect()
    gc.freeze()


async def kafka(options: argparse.Namespace) -> dict[str, Any]:
    """confluent-kafka: idempotent, acks from all, a delivery report for each message."""
    from confluent_kafka import Producer

    stamp = Stamp(SOURCE, EPOCH)
    records = [
        (message.payload, message.key, stamp.headers(message))
        for message in _messages(options.messages)
    ]
    settings = {
        "bootstrap.servers": options.broker.removeprefix("kafka://"),
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
    }
    delivered = 0

    def report(error: Any, _: Any) -> None:
        nonlocal delivered
        assert error is None, error
        delivered += 1

    _settle_down()
    found: dict[str, Any] = {}
    with stage.measured(found):
        producer = Producer(settings)
        producer.poll(HEAD_START_SECONDS)
        for number, (payload, key, headers) in enumerate(records):
            while True:
                try:
                    producer.produce(
                        stage.SUBJECT, payload, key, on_delivery=report, headers=headers
                    )
                    break
                except BufferError:
                    producer.poll(0.01)
            if not number % 100:
                producer.poll(0)
        producer.flush()
    return found | {"messages": delivered}


async def rabbitmq(options: argparse.Namespace) -> dict[str, Any]:
    """aiormq, which aio-pika stands on: persistent, mandatory, confirmed, many under way."""
    import aiormq
    from pamqp.commands import Basic

    url, _, exchange = options.broker.partition("?exchange=")
    ready = [
        (
            message.payload,
            Basic.Properties(
                content_type=message.content_type,
                headers=_headers(message, "cloudEvents_"),
                delivery_mode=2,
                message_id=message.id,
            ),
        )
        for message in _messages(options.messages)
    ]
    _settle_down()
    found: dict[str, Any] = {}
    confirmed = 0
    with stage.measured(found):
        connection = await aiormq.connect(url)
        channel = await connection.channel(publisher_confirms=True)

        async def publish(part: Iterator[tuple[bytes, Any]]) -> None:
            nonlocal confirmed
            for body, properties in part:
                answer = await channel.basic_publish(
                    body,
                    exchange=exchange,
                    routing_key=stage.SUBJECT,
                    properties=properties,
                    mandatory=True,
                    wait=False,
                )
                assert isinstance(answer, Basic.Ack), answer
                confirmed += 1

        messages = iter(ready)
        await asyncio.gather(*(publish(messages) for _ in range(AT_ONCE)))
    await connection.close()
    return found | {"messages": confirmed}


async def redis(options: argparse.Namespace) -> dict[str, Any]:
    """redis-py: pipelines of XADD, the next of which is made while one is being answered."""
    from redis import Redis

    ready = [
        [word for pair in _headers(message, "ce-").items() for word in pair]
        + ["payload", message.payload]
        for message in _messages(options.messages)
    ]
    parts = iter([ready[at : at + PIPELINE] for at in range(0, len(ready), PIPELINE)])
    _settle_down()
    found: dict[str, Any] = {}

    def work(client: Redis) -> int:
        added = 0
        for part in parts:
            pipeline = client.pipeline(transaction=False)
            for fields in part:
                pipeline.execute_command("XADD", stage.SUBJECT, "*", *fields)
            added += sum(isinstance(id, bytes) for id in pipeline.execute())
        return added

    with stage.measured(found), ThreadPoolExecutor(PIPELINES) as threads:
        clients = [Redis.from_url(options.broker) for _ in range(PIPELINES)]
        found["messages"] = sum(threads.map(work, clients))
    return found


async def adapter(options: argparse.Namespace) -> dict[str, Any]:
    """Postroom's own adapter for a broker, without a relay and a database."""
    messages = _messages(options.messages)
    parts = iter([messages[at : at + SEND_ROWS] for at in range(0, len(messages), SEND_ROWS)])
    _settle_down()
    found: dict[str, Any] = {}

    async def send(parts: Iterator[Sequence[Message]]) -> int:
        return sum([(await broker.send(part, epoch=EPOCH)).count(DELIVERED) for part in parts])

    with stage.measured(found):
        broker = open_broker(options.broker)
        found["messages"] = sum(await asyncio.gather(*(send(parts) for _ in range(SENDS))))
    await broker.close()
    return found


def _headers(message: Message, prefix: Any) -> dict[str, Any]:
    return dict(wire_headers(message, source=SOURCE, epoch=EPOCH, prefix=prefix))


if __name__ == "__main__":
    stage.main(kafka=kafka, rabbitmq=rabbitmq, redis=redis, adapter=adapter)
