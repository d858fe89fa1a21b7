"""Relays that are killed again and again for reasons of their own, at a destination where a send
takes about as long as a relay works: no message is buried, and the backlog goes soon after the last
kill. A message that kills its sender is found there all the same.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from unittest.mock import patch
from uuid import UUID

import pytest

from postroom.brokers.base import Outcome
from postroom.messages import LANES, Message, lane_of
from postroom.outbox.rules import QUICK_SECONDS
from simulation import stage, tables
from simulation.exchange import SimulatedBroker
from simulation.loop import current
from simulation.size import Size
from simulation.tables import Row
from simulation.world import World

LEASE_SECONDS = 5.0
SIZE = Size(
    troubles=("crash",),
    settings={
        "lease_seconds": LEASE_SECONDS,
        "send_timeout_seconds": 2.3,
        "batch_rows": 100,
        "in_flight_rows": 1000,
        "poll_max_seconds": 1.0,
        "on_dead": "hold",
        "keep_delivered_seconds": 0,
    },
)
SEEDS = range(3)


@dataclass(frozen=True)
class Plan:
    """How long a send takes, how many relays there are, and after which time one is killed."""

    send_seconds: float
    relays: int
    kills: int
    gap: Callable[[Random], float]
    killer_after_seconds: float | None = None  # a message kills its sender after so long


ONE_RELAY = Plan(1.5, 1, 40, lambda dice: dice.uniform(4, 7))
TWO_RELAYS = Plan(2.0, 2, 32, lambda dice: dice.expovariate(1 / 5))


class Killed(World):
    """Messages come at a steady rate while relays are killed; a new one starts at once.

    `calm`: nothing is killed, for there is no relay before all messages are there.
    """

    def __init__(self, seed: int, plan: Plan, *, calm: bool = False) -> None:
        super().__init__(seed, SIZE)
        self.plan = plan
        self.calm = calm
        self.killer = ""
        self.deaths = 0
        self.backlog_seconds = 0.0
        exchange = self.exchange
        exchange.ordered = False
        exchange._delay = lambda: plan.send_seconds / 2  # type: ignore[method-assign]
        exchange.broker = lambda url: Deadly(self, url)  # type: ignore[method-assign]

    async def _story(self) -> None:
        gaps, dice = Random(self.seed), Random(self.seed + 1)
        for _ in range(0 if self.calm else self.plan.relays):
            self.start_relay()
        writer = self.loop.spawn(self.writers, self._publish)
        for _ in range(self.plan.kills):
            await asyncio.sleep(self.plan.gap(gaps))
            if not self.calm:
                self.kill(dice.randrange(len(self.relays)))
        writer.cancel()
        for _ in range(self.plan.relays if self.calm else 0):
            self.start_relay()
        begun = self.loop.now
        while not self._quiet() and self.loop.now < begun + 3600:
            await asyncio.sleep(0.5)
        self.backlog_seconds = self.loop.now - begun

    def kill(self, number: int) -> None:
        self.deaths += 1
        self.crash(self.relays[number])
        self.start_relay()

    async def _publish(self) -> None:
        dice = Random(self.seed)
        while True:
            await asyncio.sleep(0.3)
            publisher = self.server.open_publisher()
            id, key = str(UUID(int=dice.getrandbits(128))), f"k{dice.randrange(60)}"
            message = Message(
                lane_of("orders", key, id), self.server.tables.next_position(), id, "orders", key,
                "note", None, None, "application/json", None, b"1", 1, 0,
                int(self.loop.now * 1e6), 0, 0, 0, None,
            )  # fmt: skip
            publisher.rows.append(Row(message))
            self.server.commit(publisher)
            if self.plan.killer_after_seconds is not None and message.position == 30:
                self.killer = id

    @property
    def buried(self) -> list[str]:
        return [letter.id for letter in self.server.tables.dead.values()]


class Deadly(SimulatedBroker):
    """A destination that ends whoever sends the killer."""

    def __init__(self, world: Killed, url: str) -> None:
        super().__init__(world.exchange, url)
        self._world = world

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        world, process = self._world, current()
        if world.killer in [message.id for message in batch]:

            def end() -> None:
                for number, living in enumerate(world.relays):
                    if living.process is process:
                        world.kill(number)

            after, here = world.plan.killer_after_seconds or 0.0, world.loop.inside(world.here)
            world.loop.call_later(after, end, context=here)
        return await super().send(batch, epoch=epoch)


@pytest.fixture(autouse=True)
def sixteen_lanes() -> Iterator[None]:
    """As in earnest: how many suspects a death leaves depends on it."""
    with patch.object(tables, "LANES", LANES), patch.object(stage, "LANES", LANES):
        yield


def play(seed: int, plan: Plan, *, calm: bool = False) -> Killed:
    world = Killed(seed, plan, calm=calm)
    world.run()
    assert world.wrong == []
    return world


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", [ONE_RELAY, TWO_RELAYS], ids=["one relay", "two relays"])
def test_random_kills_bury_nothing_though_sends_are_slow(plan: Plan, seed: int) -> None:
    world = play(seed, plan)
    assert world.deaths == plan.kills
    assert world.buried == []
    # And suspects do not hold up the rest: it takes about as long as if nobody had died. The lease
    # of the last that was killed has to end first.
    calm = play(seed, plan, calm=True).backlog_seconds
    print(f"backlog gone after {world.backlog_seconds} s, without deaths {calm} s")
    assert world.backlog_seconds <= LEASE_SECONDS + 3 * calm


@pytest.mark.parametrize(
    ("after_seconds", "most"), [(QUICK_SECONDS / 2, 8), (QUICK_SECONDS * 5, 26)]
)
def test_a_killer_is_found_though_sends_are_slow(after_seconds: float, most: int) -> None:
    plan = Plan(1.5, 1, 5, lambda dice: dice.uniform(4, 7), after_seconds)
    world = play(1, plan)
    assert world.buried == [world.killer]
    assert world.deaths - plan.kills <= most
    assert {row.order for row in world.server.tables.held.values()} <= {
        row.order for row in world.server.tables.held.values() if row.message.id == world.killer
    }
