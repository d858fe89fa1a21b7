"""Relays, databases and brokers killed at random under load: nothing lost, no ghosts, in order.

A small everyday size; POSTROOM_GUARANTEES=big is for nights. POSTROOM_SEED repeats the dice of a
run, though not the races. Random kills bury nothing: no message is taken for a killer.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import nats
import pytest
from history import Delivery, History, Report, check
from nats.js.api import StreamConfig
from nursery import Child
from worlds import World, together

from helpers import eventually
from servers import NatsServer, PostgresServer

pytestmark = pytest.mark.guarantee

LEASE = 3.0
SETTINGS = {
    "lease_seconds": LEASE,
    "send_timeout_seconds": 0.9,
    "batch_rows": 100,
    "in_flight_rows": 400,
}


@dataclass(frozen=True)
class Size:
    """How much happens: transactions of each of two writers, keys, relays, and kills of them."""

    transactions: int
    keys: int
    relays: int
    kills: int
    outages: int


EVERYDAY = {
    "postgresql": Size(1000, 50, 3, 6, 1),
    "mariadb": Size(300, 30, 2, 5, 0),
    "sqlite": Size(300, 30, 2, 5, 0),
}
BIG = {
    "postgresql": Size(30_000, 500, 4, 100, 20),
    "mariadb": Size(5000, 100, 3, 50, 0),
    "sqlite": Size(5000, 100, 3, 50, 0),
}
SIZES = BIG if os.environ.get("POSTROOM_GUARANTEES") == "big" else EVERYDAY


class Crew:
    """Relays under a supervisor: whoever dies is replaced at once."""

    def __init__(self, world: World, relays: int, dice: random.Random, **options: Any) -> None:
        self._world = world
        self._dice = dice
        self._options = options
        self.everyone: list[Child] = []
        self.crew = [self._new() for _ in range(relays)]

    def _new(self) -> Child:
        child = self._world.relay(settings=SETTINGS, **self._options)
        self.everyone.append(child)
        return child

    def kill_one(self) -> None:
        place = self._dice.randrange(len(self.crew))
        self._world.disturbed.add(self.crew[place].pid)
        self.crew[place].kill()
        self.crew[place] = self._new()

    def freeze_one(self) -> None:
        """Past its lease, and then let it go on."""
        zombie = self._dice.choice(self.crew)
        self._world.disturbed.add(zombie.pid)
        zombie.stop()
        time.sleep(LEASE * 1.5)
        zombie.resume()

    def replace_ended(self) -> None:
        """A supervisor starts anew whoever gave up, as when the database was away at its start."""
        for place, child in enumerate(self.crew):
            if child.code is not None:
                self.crew[place] = self._new()

    def moves_on(self, before: int) -> bool:
        self.replace_ended()
        return self._world.deliveries() > before or self._world.settled()

    def dismiss(self) -> None:
        for child in self.crew:
            child.terminate()
        for child in self.crew:
            # One that was started a moment ago may end before it listens to the signal.
            assert child.wait() in (0, -signal.SIGTERM), child.log


def start_writers(world: World, size: Size, seed: str) -> list[Child]:
    world.make_keys(size.keys)
    return [
        world.writer(
            count=size.transactions,
            keys=size.keys,
            seed=f"{seed}-{number}",
            pause_seconds=0.03,
            rest_seconds=0.005,
        )
        for number in range(2)
    ]


def finish(world: World, writers: list[Child], crew: Crew) -> None:
    """Heal: writers come to their end, and what is left is drained."""
    for writer in writers:
        assert writer.wait(120) == 0, writer.log

    def drained() -> bool:
        crew.replace_ended()
        return world.settled()

    eventually(drained, 60, interval=0.2, retry=(Exception,))
    crew.dismiss()
    assert world.tables.dead() == {}, "random kills bury nothing"


def tell(report: Report, world: World, crew: Crew) -> None:
    assert not report.violations, f"{str(report)[:5000]}\n{together(crew.everyone)[-5000:]}"
    found = [report.duplicates[pid] for pid in world.disturbed]
    print(
        f"{world.tables.kind}: {len(world.tables.business())} messages, {len(found)} disturbed "
        f"relays, twice for each: median {median(found or [0]):g}, most {max(found, default=0)}"
    )


@pytest.mark.parametrize("world", ["mariadb", "sqlite"], indirect=True)
def test_kills_of_relays(world: World, seed: str) -> None:
    size, dice = SIZES[world.tables.kind], random.Random(seed)
    writers = start_writers(world, size, seed)
    crew = Crew(world, size.relays, dice, delay_seconds=0.005)
    eventually(lambda: crew.moves_on(0), 20)
    for _ in range(size.kills):
        before = world.deliveries()
        # All at once now and then, so that only the ends of leases help.
        for _ in range(dice.choice((1, 1, size.relays))):
            crew.kill_one()
        # Progress: whoever comes after the dead delivers what they left, or what is new.
        eventually(partial(crew.moves_on, before), LEASE * 3 + 10)
        time.sleep(dice.random() * 0.5)  # the moment of the next kill is the test
    crew.freeze_one()
    finish(world, writers, crew)
    tell(world.judge(in_flight=int(SETTINGS["in_flight_rows"])), world, crew)


async def make_stream(server: NatsServer) -> None:
    async with await nats.connect(server.url) as client:
        await client.jetstream().add_stream(StreamConfig(name="facts", subjects=["facts"]))


async def read_stream(server: NatsServer) -> list[Delivery]:
    """Everything the stream holds, in its order."""
    found = []
    async with await nats.connect(server.url) as client:
        jetstream = client.jetstream()
        count = (await jetstream.stream_info("facts")).state.messages
        subscription = await jetstream.subscribe("facts", ordered_consumer=True)
        for _ in range(count):
            message = await subscription.next_msg(timeout=10)
            headers = message.headers or {}
            id = headers["Nats-Msg-Id"]
            n = json.loads(message.data)["n"]
            found.append(Delivery(id, None, n, 0, 0))
    return found


def test_kills_of_relays_database_and_broker(
    new_world: Callable[[str], World],
    postgres: PostgresServer,
    nats_server: NatsServer,
    seed: str,
) -> None:
    postgres.require_private()
    nats_server.require_private()
    size, dice = SIZES["postgresql"], random.Random(seed)
    world = new_world("postgresql")
    asyncio.run(make_stream(nats_server))
    writers = start_writers(world, size, seed)
    crew = Crew(world, size.relays, dice, nats=nats_server.url)

    def kill_and_start(server: PostgresServer | NatsServer) -> None:
        server.kill()
        time.sleep(dice.random())
        server.start()
        crew.replace_ended()

    plan: list[Callable[[], None]] = [crew.kill_one] * size.kills
    for server in (postgres, nats_server):
        plan += [partial(kill_and_start, server)] * size.outages
    dice.shuffle(plan)
    plan.insert(len(plan) // 2, crew.freeze_one)
    for step in plan:
        time.sleep(0.2 + dice.random() * 0.8)  # the moments of the blows are the test
        step()
    finish(world, writers, crew)

    history = History(disturbed={0}, in_flight=0)  # the stream itself drops duplicates
    history.read_writer(world.writer_log)
    history.deliveries = asyncio.run(read_stream(nats_server))
    history.read_tables(world.tables)
    tell(check(history), world, crew)
    assert len(history.deliveries) == len(world.tables.business())
