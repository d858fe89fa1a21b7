"""How fast one relay drains a backlog to Kafka, RabbitMQ and Redis Streams, beside what the client
library of each does by itself with the same bytes and headers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from bench.figures import Figures, at_least, median
from bench.room import BY_HAND, CLIENTS, OURS, Room, System, cpu_seconds, stage
from servers import KafkaServer, RabbitMQServer, RedisServer, Server, Unavailable

ROUNDS = 3
WARM_UPS = 3  # Java's compiler needs so long until a message costs Kafka what it will cost
QUICK = 500
EXCHANGE = "bench"
PARTITIONS = 8
BAR = 0.7
BY_HAND_NAME = "asyncpg and confluent-kafka by hand, no relay"
DATABASE_NAME = "asyncpg reads and deletes the same, no broker"
# As somebody would run it, and not as small as the tests want it.
JVM = ["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"]


class Target(NamedTuple):
    """A running broker: its address for a relay, and how to make it empty again."""

    server: Server
    url: str
    empty: Callable[[], None]


class Place(NamedTuple):
    name: str
    verb: str  # of the program of clients
    client: str
    messages: int  # so many that starting is a small part of it
    open: Callable[[], AbstractContextManager[Target]]
    by_hand: bool = False  # whether a program reads, sends and deletes without a relay


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
        ways[BY_HAND_NAME] = lambda: _drain(room, BY_HAND, place.verb, target, count)
        ways[DATABASE_NAME] = lambda: _drain(room, OURS, "limit", target, count)
    found: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    room.tick(f"{place.name} warms up")
    for _ in range(room.size(WARM_UPS, 1)):
        _alone(room, place.verb, target, count)
    for _ in range(room.size(ROUNDS, 1)):
        for name, way in ways.items():
            room.tick(name)
            done = way()
            assert done["messages"] == count, (name, done["messages"], count)
            found[name].append(count / done["seconds"])
            costs[name].append(done["all_cpu_seconds"] / count)
    rates = {name: median(each) for name, each in found.items()}
    figures.numbers["rates"] |= rates
    bars = {ours: at_least(BAR)}
    for name, rate in rates.items():
        ratio = None if name == place.client else rate / rates[place.client]
        to = place.client if ratio else ""
        figures.add(name, f"{rate:,.0f}/s", ratio, to=to, bar=bars.get(name))
    if place.by_hand:
        ratio = rates[ours] / rates[BY_HAND_NAME]
        figures.add(ours, f"{rates[ours]:,.0f}/s", ratio, to=BY_HAND_NAME)
        needed = {name: median(each) for name, each in costs.items()}
        most = (os.cpu_count() or 1) / (needed[place.client] + needed[DATABASE_NAME])
        figures.add(_most(), f"{most:,.0f}/s", most / rates[place.client], to=place.client)
        figures.numbers["cpu_us"] = {name: 1e6 * seconds for name, seconds in needed.items()}


def _most() -> str:
    """What all cores could do, if none ever waited, with the CPU that the client and its server
    take by themselves, and asyncpg and PostgreSQL by themselves: nothing is left for a relay."""
    return f"{os.cpu_count()} cores that never wait, for client and database alone"


def _alone(room: Room, verb: str, target: Target, count: int) -> Any:
    target.empty()
    with _all_cpu(room, target) as found:
        found |= room.run(CLIENTS, verb, broker=target.url, messages=count)
    return found


@contextmanager
def _all_cpu(room: Room, target: Target) -> Iterator[dict[str, Any]]:
    """Add the CPU of the servers to that of the program which was run."""
    found: dict[str, Any] = {}
    begun = cpu_seconds(target.server) + cpu_seconds(room.postgres)
    yield found
    servers = cpu_seconds(target.server) + cpu_seconds(room.postgres) - begun
    found["all_cpu_seconds"] = found["cpu_seconds"] + servers


def _drain(room: Room, system: System, verb: str, target: Target, count: int) -> Any:
    target.empty()
    with room.database() as url:
        room.run(OURS, "prepare", database=url, messages=count)
        with _all_cpu(room, target) as found:
            found |= room.run(system, verb, database=url, broker=target.url, messages=count)
    return found


@contextmanager
def _kafka() -> Iterator[Target]:
    with KafkaServer(jvm=JVM) as server:
        server.create_topic(stage.SUBJECT, partitions=PARTITIONS)
        yield Target(
            server, server.url, lambda: None
        )  # a log does not become slower by being longer


@contextmanager
def _rabbitmq() -> Iterator[Target]:
    with RabbitMQServer() as server:
        asyncio.run(_empty_queue(server.url))
        url = f"{server.url}?exchange={EXCHANGE}"
        yield Target(server, url, lambda: asyncio.run(_empty_queue(server.url)))


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
        yield Target(server, server.url, lambda: client.flushall() and None)


PLACES = (
    Place("Kafka", "kafka", "confluent-kafka", 200_000, _kafka, by_hand=True),
    Place("RabbitMQ", "rabbitmq", "aiormq (aio-pika)", 50_000, _rabbitmq),
    Place("Redis Streams", "redis", "redis-py", 100_000, _redis),
)
