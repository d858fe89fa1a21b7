"""Relays, databases and brokers killed and frozen under load: nothing lost, no ghosts, in order.

A small everyday size; POSTROOM_GUARANTEES=big is the size of `make guarantees`. Blows fall at equal
parts of what the writers have to do, so that they meet load. POSTROOM_SEED repeats the dice of a
run, though not the races. Random kills bury nothing: no message is taken for a killer.
"""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from chaos import Blow, Crew, play
from nursery import Child
from streams import make_stream, read_stream
from worlds import KINDS, World

from servers import NatsServer, PostgresServer, Server

pytestmark = pytest.mark.guarantee


@dataclass(frozen=True)
class Size:
    """How much happens. `settling` zombies freeze between a settle and its commit; writers rest
    between two transactions, so that there is still something to do when the last blow falls."""

    messages: int
    keys: int
    kills: int
    zombies: int
    settling: int = 0
    database_kills: int = 0
    broker_kills: int = 0
    rest_seconds: float = 0.05
    relays: int = 3
    writers: int = 3


EVERYDAY = {
    "postgresql": Size(1500, 50, 6, 1, settling=1, database_kills=1, broker_kills=1),
    "mariadb": Size(900, 30, 4, 1, settling=1, database_kills=1),
    "sqlite": Size(900, 30, 5, 1),
}
BIG = {
    "postgresql": Size(
        100_000, 1000, 100, 15, settling=5, database_kills=20, broker_kills=20, rest_seconds=0.012
    ),
    "mariadb": Size(20_000, 200, 40, 5, settling=5, database_kills=10, rest_seconds=0.025),
    "sqlite": Size(20_000, 200, 40, 10, rest_seconds=0.025),
}
SIZES = BIG if os.environ.get("POSTROOM_GUARANTEES") == "big" else EVERYDAY
# A statement of a settle after which it only has to commit.
LAST_OF_A_SETTLE = {"postgresql": "sql.heads_arm.after", "mariadb": "sql.journal_clear.after"}


def blows(
    size: Size, crew: Crew, seed: str, database: Server | None, broker: Server | None
) -> list[Blow]:
    """Everything that will happen, in its order."""
    dice = random.Random(seed)
    found: list[Blow] = [crew.kill_one] * size.kills
    found += [crew.freeze_one] * size.zombies
    for server, kills in ((database, size.database_kills), (broker, size.broker_kills)):
        if server is not None and kills:
            server.require_private()
            found += [partial(crew.kill_server, server)] * kills
    dice.shuffle(found)
    # Not at the end: such a zombie waits for a failure to settle.
    point = LAST_OF_A_SETTLE.get(crew.world.tables.kind, "")
    for _ in range(size.settling):
        place = dice.randrange(len(found) * 3 // 4)
        found.insert(place, partial(crew.freeze_at, point))
    return found


def start_writers(world: World, size: Size, seed: str) -> list[Child]:
    world.make_keys(size.keys)
    return [
        world.writer(
            count=size.messages // size.writers,
            keys=size.keys,
            seed=f"{seed}-{number}",
            pause_seconds=0.03,
            rest_seconds=size.rest_seconds,
            busy_share=0.05,
        )
        for number in range(size.writers)
    ]


def run(size: Size, crew: Crew, seed: str, plan: list[Blow]) -> None:
    writers = start_writers(crew.world, size, seed)
    play(crew, writers, size.messages // size.writers * size.writers, plan)


@pytest.mark.parametrize("world", ["mariadb", "sqlite"], indirect=True)
def test_kills_of_relays_and_database(
    world: World, seed: str, request: pytest.FixtureRequest
) -> None:
    size, fixture = SIZES[world.tables.kind], KINDS[world.tables.kind]
    database = request.getfixturevalue(fixture) if fixture else None
    crew = Crew(world, size.relays, seed, delay_seconds=0.005)
    run(size, crew, seed, blows(size, crew, seed, database, None))
    print(crew.judge())


def test_kills_of_relays_database_and_broker(
    new_world: Callable[[str], World],
    postgres: PostgresServer,
    nats_server: NatsServer,
    seed: str,
) -> None:
    size, world = SIZES["postgresql"], new_world("postgresql")
    asyncio.run(make_stream(nats_server, "facts", "facts"))
    marks = str(world.folder / "mark")
    crew = Crew(world, size.relays, seed, broker=nats_server.url, marks=marks)
    run(size, crew, seed, blows(size, crew, seed, postgres, nats_server))
    print(crew.judge(asyncio.run(read_stream(nats_server, "facts", "facts"))))
