"""How fast one relay drains a backlog to Kafka, RabbitMQ and Redis Streams, beside what the client
library of each does by itself with the same bytes and headers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from bench.figures import Figures, at_least, median
from bench.room import BY_HAND, CLIENTS, OURS, Room, System, stage
from servers import KafkaServer, RabbitMQServer, RedisServer, Unavailable

ROUNDS = 3
QUICK = 500
EXCHANGE = "bench"
PARTITIONS = 8
BAR = 0.7
# As somebody would run it, and not as small as the tests want it.
JVM = ["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"]


class Target(NamedTuple):
    """A running broker: its address for a relay, and how to make it empty again."""

    url: str
    empty: Callable[[], None]


class Place(NamedTuple):
    name: str
    verb: str  # of the program of clients
    client: str
    messages: int  # so many that starting is a small part of it
    open: Callable[[], AbstractContextManager[Target]]
    by_hand: str = (
        ""  # what reads, sends and deletes without a relay, where there is such a program
    )


def brokers(room: Room) -> Figures:
    """Client, adapter and relay take turns on one server; then the next kind of server."""
    figures = Figures("Drain to Kafka, RabbitMQ and Redis Streams, beside their clients alone")
    figures.numbers["rates"] = {}
    for place in PLACES:
        try:
            room.tick(f"starting {place.name}")
            with place.open() as target:
                _measure(room, figures, place, target)
        except Unavailable as why:
            room.console.print(str(why))
            figures.add(f"postroom to {place.name}", "not measured")
    return figures


def _measure(room: Room, figures: Figures, place: Place, target: Target) -> None:
    count = room.size(place.messages, QUICK)
    ours, alone = f"postroom to {place.name}", f"adapter for {place.name}, no relay"
    ways: dict[str, Callable[[], Any]] = {
        place.client: lambda: _alone(room, place.verb, target, count),
        alone: lambda: _alone(room, "adapter", target, count),
        ours: lambda: _drain(room, OURS, "drain", target, count),
    }
    if place.by_hand:
        ways[place.by_hand] = lambda: _drain(room, BY_HAND, place.verb, target, count)
    found: dict[str, list[float]] = {name: [] for name in ways}
    room.tick(f"{place.name} warms up")
    _alone(room, place.verb, target, count)
    for _ in range(room.size(ROUNDS, 1)):
        for name, way in ways.items():
            room.tick(name)
            done = way()
            assert done["messages"] == count, (name, done["messages"], count)
            found[name].append(count / done["seconds"])
    rates = {name: median(each) for name, each in found.items()}
    figures.numbers["rates"] |= rates
    bars = {ours: at_least(BAR)}
    for name, rate in rates.items():
        ratio = None if name == place.client else rate / rates[place.client]
        to = place.client if ratio else ""
        figures.add(name, f"{rate:,.0f}/s", ratio, to=to, bar=bars.get(name))
    if place.by_hand:
        ratio = rates[ours] / rates[place.by_hand]
        figures.add(ours, f"{rates[ours]:,.0f}/s", ratio, to=place.by_hand)


def _alone(room: Room, verb: str, target: Target, count: int) -> Any:
    target.empty()
    return room.run(CLIENTS, verb, broker=target.url, messages=count)


def _drain(room: Room, system: System, verb: str, target: Target, count: int) -> Any:
    target.empty()
    with room.database() as url:
        room.run(OURS, "prepare", database=url, messages=count)
        return room.run(system, verb, database=url, broker=target.url, messages=count)


@contextmanager
def _kafka() -> Iterator[Target]:
    with KafkaServer(jvm=JVM) as server:
        server.create_topic(stage.SUBJECT, partitions=PARTITIONS)
        yield Target(server.url, lambda: None)  # a log does not become slower by being longer


@contextmanager
def _rabbitmq() -> Iterator[Target]:
    with RabbitMQServer() as server:
        asyncio.run(_empty_queue(server.url))
        yield Target(
            f"{server.url}?exchange={EXCHANGE}", lambda: asyncio.run(_empty_queue(server.url))
        )


async def _empty_queue(url: str) -> None:
    """A quorum queue, as a consumer of ours would make it, with nothing in it."""
    import aiormq

    connection = await aiormq.connect(url)
    channel = await connection.channel()
    await channel.exchange_declare(EXCHANGE, exchange_type="topic", durable=True)
    arguments = {"x-queue-type": "quorum"}
    await channel.queue_declare(EXCHANGE, durable=True, arguments=arguments)
    await channel.queue_bind(EXCHANGE, EXCHANGE, routing_key=stage.SUBJECT)
    await channel.queue_purge(EXCHANGE)
    await connection.close()


@contextmanager
def _redis() -> Iterator[Target]:
    """Every command is on disk before it is answered (`appendfsync always`)."""
    with RedisServer() as server, server.client() as client:
        yield Target(server.url, lambda: client.flushall() and None)


_BY_HAND = "asyncpg and confluent-kafka by hand, no relay"
PLACES = (
    Place("Kafka", "kafka", "confluent-kafka", 200_000, _kafka, _BY_HAND),
    Place("RabbitMQ", "rabbitmq", "aiormq (aio-pika)", 50_000, _rabbitmq),
    Place("Redis Streams", "redis", "redis-py", 100_000, _redis),
)
