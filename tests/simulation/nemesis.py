"""Whatever befalls relays, database and brokers, at moments drawn by dice; and then peace."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from .loop import Process
from .server import Weather
from .size import ROUTES, TOPICS

if TYPE_CHECKING:
    from .world import Living, World


class Nemesis:
    """Brings one trouble after the other, of the kinds its world has drawn."""

    def __init__(self, world: "World", process: Process, random: Random) -> None:
        self.process = process
        self._world = world
        self._random = random

    async def go_on(self) -> None:
        until = self._world.loop.now + self._world.size.seconds
        while self._world.loop.now < until:
            await asyncio.sleep(self._random.expovariate(1 / self._world.size.pause_seconds))
            if self._world.troubles:
                self._befall(self._random.choice(self._world.troubles))
            if not self._world.relays:
                await self._nobody_is_there()
            if not self._world.relays:
                self._world.start_relay()

    async def _nobody_is_there(self) -> None:
        """Over night, or for days; a scheduler may call now and then."""
        dice, world = self._random, self._world
        away = dice.random() * world.size.away_seconds
        back_at, scheduled = world.loop.now + away, dice.random() < 0.5
        while world.loop.now < back_at:
            await asyncio.sleep(dice.random() * away / 5)
            if world.troubles:
                self._befall(dice.choice(world.troubles))
            if scheduled and not world.relays:
                world.start_relay(once=True)

    def _befall(self, trouble: str) -> None:
        dice = self._random
        self._world.trace("trouble", trouble)
        living = dice.choice(self._world.relays) if self._world.relays else None
        broker = dice.choice(sorted(set(ROUTES.values())))
        some_time = dice.choice(self._world.size.outages_seconds) * dice.random()
        mood, weather = self._world.exchange.mood, self._world.server.weather
        if trouble == "join" and len(self._world.relays) <= self._world.size.relays:
            self._world.start_relay()
        elif trouble == "drain":
            self._world.start_relay(once=True)
        elif trouble == "restart":
            self._world.server.restart(some_time / 2)
        elif trouble == "lossy":
            weather.breaks = dice.choice((0.0, 0.01, 0.1))
        elif trouble == "slow database":
            weather.tail = dice.choice((0.0, 0.05, 0.3))
        elif trouble == "slow brokers":
            mood.latency_seconds = dice.choice((0.003, 0.05, 0.3))
        elif trouble == "down":
            self._for_a_while(mood.down, broker, some_time)
        elif trouble == "silent":
            self._for_a_while(mood.silent, broker, some_time)
        elif trouble == "topic down":
            self._for_a_while(mood.topics_down, dice.choice(TOPICS), some_time)
        elif trouble == "refuse":
            mood.refuses = dice.choice((0.0, 0.1, 0.5))
        elif trouble == "unknown":
            mood.unknown = dice.choice((0.0, 0.1, 0.5))
        elif trouble == "raise":
            mood.raises = dice.choice((0.0, 0.1))
        elif living is not None:
            self._befall_relay(trouble, living, some_time)

    def _befall_relay(self, trouble: str, living: "Living", some_time: float) -> None:
        process = living.process
        if trouble == "stop" and not process.frozen:
            self._world.stop(living)
        elif trouble == "snap":
            self._world.server.snap_all(process, "snapped")
        elif trouble == "crash":
            self._at_some_moment(process, lambda: self._world.crash(living))
        elif trouble == "freeze":
            # Most wake about when their lanes are taken over.
            leases = self._random.choice((0.2, 1.0, 1.2, 1.2, 1.5)) * self._world.lease_seconds
            more = self._random.choice((0.015, 0.15, 0.5)) * self._random.random()
            seconds = leases + more * self._world.lease_seconds
            self._at_some_moment(process, lambda: self._freeze(process, seconds))

    def _at_some_moment(self, process: Process, what: Callable[[], None]) -> None:
        """In the middle of whatever the process is doing, or when it has just sent something."""
        dice = self._random
        process.blow = what
        process.fuse, process.waits_for_send = None, dice.random() < 0.5
        if not process.waits_for_send:
            process.fuse = dice.randint(1, dice.choice((1, 30, 300)))

    def _freeze(self, process: Process, seconds: float) -> None:
        if process.dead:
            return
        process.frozen = True
        self._world.fault(process, "freeze")

        def wake() -> None:
            process.frozen = False
            self._world.fault(process, "wakes")

        self._world.loop.call_later(seconds, wake, context=self._world.loop.inside(self.process))

    def _for_a_while(self, where: set[str], what: str, seconds: float) -> None:
        where.add(what)
        context = self._world.loop.inside(self.process)
        self._world.loop.call_later(seconds, where.discard, what, context=context)

    def make_peace(self) -> None:
        self._world.trace("peace")
        self._world.server.weather = Weather()
        mood = self._world.exchange.mood
        mood.latency_seconds, mood.refuses, mood.unknown, mood.raises = 0.003, 0.0, 0.0, 0.0
        for living in self._world.relays:
            living.process.fuse, living.process.waits_for_send = None, False
