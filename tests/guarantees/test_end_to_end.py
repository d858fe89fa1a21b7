"""From a commit to its effect, through every broker: writers, relays, the broker, consumers.

Everything is killed and frozen under load, and a business table tells what came of it: each effect
once, in the order of its key. A small everyday size; POSTROOM_GUARANTEES=big is that of
`make guarantees`.
"""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from books import Bookkeepers
from chaos import SETTINGS, Blow, Crew, dealt_out, play
from streams import make_stream
from worlds import World

from helpers import eventually
from postroom.messages import new_id
from servers import KafkaServer, NatsServer, PostgresServer, RabbitMQServer

pytestmark = pytest.mark.guarantee


@dataclass(frozen=True)
class Size:
    """How much happens; 60 kills at full size, spread over all that can be killed."""

    messages: int
    keys: int
    relay_kills: int
    consumer_kills: int
    broker_kills: int
    database_kills: int
    zombies: int  # of each kind
    rest_seconds: float


EVERYDAY = Size(600, 30, 1, 2, 1, 1, 1, rest_seconds=0.02)
BIG = Size(100_000, 1000, 18, 22, 10, 10, 3, rest_seconds=0.005)
SIZE = BIG if os.environ.get("POSTROOM_GUARANTEES") == "big" else EVERYDAY
WRITERS, RELAYS, CONSUMERS = 3, 2, 3
# A producer of Kafka's that is made anew has more to do than one of the others.
SLOWER = SETTINGS | {"lease_seconds": 4, "send_timeout_seconds": 1.5}


def on_nats(server: NatsServer, topic: str) -> str:
    asyncio.run(make_stream(server, topic, topic))
    return f"{server.url}?ack_wait_seconds=5"


def on_kafka(server: KafkaServer, topic: str) -> str:
    server.create_topic(topic, partitions=6)
    return f"{server.url}?session.timeout.ms=3000&heartbeat.interval.ms=500"


def on_rabbitmq(server: RabbitMQServer, topic: str) -> str:
    return f"{server.url}?exchange={topic}&heartbeat=2"


def on_redis(server: Any, topic: str) -> str:
    return f"{server.url}?lease_seconds=3&trim_seconds=1"


BROKERS: dict[str, tuple[str, Callable[[Any, str], str]]] = {
    "kafka": ("kafka_server", on_kafka),
    "rabbitmq": ("rabbitmq_server", on_rabbitmq),
    "nats": ("nats_server", on_nats),
    "redis": ("redis_server", on_redis),
}


@pytest.mark.parametrize("broker", BROKERS)
def test_each_effect_once_and_in_order(
    broker: str,
    new_world: Callable[[str], World],
    postgres: PostgresServer,
    request: pytest.FixtureRequest,
    seed: str,
) -> None:
    fixture, prepare = BROKERS[broker]
    server = request.getfixturevalue(fixture)
    for each in (server, postgres):
        each.require_private()
    world, topic = new_world("postgresql"), f"facts-{new_id()}"
    url = prepare(server, topic)
    consumers = Bookkeepers(world, CONSUMERS, seed, broker=url, topic=topic)
    eventually(consumers.ready, 90, interval=0.1)
    if broker == "rabbitmq":
        asyncio.run(server.written_down(f"{topic}.books"))
    marks = str(world.folder / "mark")
    relays = Crew(world, RELAYS, seed, SLOWER, broker=url, marks=marks)
    writers = _start_writers(world, topic, seed)
    plan = _plan(relays, consumers, server, postgres, seed)
    play(relays, writers, SIZE.messages // WRITERS * WRITERS, plan, beside=[consumers])
    consumers.finish()
    dealt = dealt_out(relays.blows + consumers.blows)
    print(f"{broker}: {consumers.judge_effects()}.\n  {dealt}.")


def _start_writers(world: World, topic: str, seed: str) -> list[Any]:
    world.make_keys(SIZE.keys)
    world.leave.write_text("0")
    return [
        world.writer(
            count=SIZE.messages // WRITERS,
            keys=SIZE.keys,
            seed=f"{seed}-{number}",
            rest_seconds=SIZE.rest_seconds,
            busy_share=0.02,
            topic=topic,
            leave=str(world.leave),
        )
        for number in range(WRITERS)
    ]


def _plan(
    relays: Crew, consumers: Bookkeepers, broker: Any, database: PostgresServer, seed: str
) -> list[Blow]:
    plan: list[Blow] = [
        *[relays.kill_one] * SIZE.relay_kills,
        *[consumers.kill_one] * SIZE.consumer_kills,
        *[partial(relays.kill_server, broker)] * SIZE.broker_kills,
        *[partial(relays.kill_server, database)] * SIZE.database_kills,
        *[relays.freeze_one, consumers.freeze_one] * SIZE.zombies,
    ]
    random.Random(seed).shuffle(plan)
    return plan
