"""One schedule: relays, publishers, and whatever befalls them; then peace, and a look at it all.

Each schedule draws its own kinds of trouble, so that some are calm, some have one kind only, and
some have all: what one fault hides, its absence shows.
"""

import asyncio
import hashlib
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from postroom import signals
from postroom.errors import PostroomError
from postroom.outbox.relay import Relay

from .application import Application, Fact
from .exchange import Exchange, Mood
from .loop import Loop, Process, Task, current
from .nemesis import Nemesis
from .server import Server
from .size import ROUTES, TROUBLES, Size
from .stage import simulated
from .stops import Stops
from .view import View

URL = "postgresql://sim@sim/sim"
STOP_SECONDS = 15.0
HOUSE_SECONDS = 60.0
SHOWN_LINES = 60  # of the trace of what went wrong
MOST_LINES = 50_000  # in memory; what is older is only in the digest


@dataclass(eq=False)
class Living:
    """A relay in its process."""

    process: Process
    relay: Relay | None = None
    task: Task | None = None
    stopped: bool = False
    told_at: float | None = None  # when it was told to stop
    once: bool = False  # a scheduler called it to drain what is there


@dataclass(frozen=True)
class Fault:
    at: float
    process: Process | None
    why: str


class World:
    """Everything of one schedule; `run` plays it, and `checks.violations` judges it."""

    def __init__(self, seed: int, size: Size, view: type[View] = View) -> None:
        self.seed = seed
        self.size = size
        self.random = Random(seed)
        self.loop = Loop(Random(seed + 1))
        self._lines: list[tuple[Any, ...]] = []
        self._digest = hashlib.sha256()
        self.faults: list[Fault] = []
        self.wrong: list[str] = []
        self.server = Server(self.loop, Random(seed + 2), self.trace, self.fault, view)
        self.exchange = Exchange(self.loop, Random(seed + 3), self.trace)
        self.exchange.mood = Mood(size.latency_seconds, size.refuses)
        self.drained = False
        self.pruned_at: float | None = None
        self.here = Process("world")
        self.writers = Process("writers")
        self.relays: list[Living] = []
        self.ended: list[Living] = []
        self._names = count(1)
        self.stops = Stops(self)
        self.application = Application(self.loop, self.server, size, Random(seed + 4), self.trace)
        self.exchange.poison = self.application.poison
        self.nemesis = Nemesis(self, self.here, Random(seed + 7))
        dice = self.random
        some = dice.choice((0, 1, 2, 3, 5, len(TROUBLES)))
        self.troubles = size.troubles or tuple(dice.sample(TROUBLES, some))
        self.exchange.ordered = dice.random() < 0.3
        self.settings: dict[str, Any] = {
            "lease_seconds": 4.0,
            "send_timeout_seconds": 1.0,
            "batch_rows": dice.choice((1, 2, 3, 10, 100)),
            "in_flight_rows": dice.choice((100, 200)),
            "poll_min_seconds": 0.05,
            "poll_max_seconds": dice.choice((0.2, 1.0, 1.0, 1.0)),
            # Some are in a hurry. Dice of its own: what they throw decides nothing else.
            "grace_seconds": Random(seed + 8).choice((10,) * 7 + (0,)),
            "rescan_seconds": 15,
            "keep_delivered_seconds": dice.choice((0, 86_400)),
            "keep_dedup_seconds": 86_400,
            "on_dead": dice.choice(("hold", "continue")),
            **size.settings,
        }

    @property
    def facts(self) -> list[Fact]:
        return self.application.facts

    @property
    def lease_seconds(self) -> float:
        return float(self.settings["lease_seconds"])

    # ── telling ────────────────────────────────────────────────────────────────────────────────

    def trace(self, *what: Any) -> None:
        self._lines.append((self.loop.now, *what))
        if len(self._lines) >= MOST_LINES:
            self._digest.update(repr(self._lines).encode())
            del self._lines[:-SHOWN_LINES]

    def last_lines(self) -> list[str]:
        """The end of the story, for people."""
        shown = self._lines[-SHOWN_LINES:]
        return [" ".join(map(str, (f"{at:.6f}", *what))) for at, *what in shown]

    @property
    def digest(self) -> str:
        """The whole story in one word: two runs of a seed give the same."""
        whole = self._digest.copy()
        whole.update(repr(self._lines).encode())
        return whole.hexdigest()

    def fault(self, process: Process | None, why: str) -> None:
        """Something went wrong that may cost duplicates."""
        self.faults.append(Fault(self.loop.now, process, why))
        self.trace("fault", process.name if process else "all", why)

    def _hear(self, name: str, fields: dict[str, Any]) -> None:
        if name == "lane.late":
            self.wrong.append(f"a rescan found position {fields['position']}: it had been passed")
        else:
            self.stops.hear(current(), fields)

    # ── the story ──────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Play the schedule to its end."""
        with simulated(self):
            unlisten = signals.listen(self._hear, only=["lane.late", "relay.unsettled"])
            try:
                self.loop.run_until(self.loop.spawn(self.here, self._story))
            finally:
                unlisten()
                self._end_all()

    async def _story(self) -> None:
        dice = self.random
        for _ in range(self.size.relays):
            self.start_relay()
        writers = [
            self.loop.spawn(self.writers, self.application.write, Random(dice.getrandbits(32)))
            for _ in range(self.size.writers)
        ]
        await self.nemesis.go_on()
        self.nemesis.make_peace()
        await asyncio.wait(writers)
        for writer in writers:
            writer.result()
        await self._wait_for_quiet()
        await self._look_after_the_house()
        await self._stop_all()

    async def _wait_for_quiet(self) -> None:
        give_up_at = self.loop.now + self.size.quiet_seconds
        while self.loop.now < give_up_at:
            if self._quiet():
                self.drained = True
                return
            if not any(not living.once for living in self.relays):
                self.start_relay(once=self.size.shift_seconds > 0)
            await asyncio.sleep(self.size.quiet_seconds / 300)

    async def _look_after_the_house(self) -> None:
        """A relay prunes when it starts: whatever is too old must be gone then."""
        if self.size.shift_seconds:
            self.start_relay()
            await asyncio.sleep(HOUSE_SECONDS)
            self.pruned_at = self.loop.now

    def _quiet(self) -> bool:
        """Whether all that is left waits for a person."""
        tables = self.server.tables
        blocked = {row.order for row in tables.held.values() if row.blocked}
        waiting = [row for row in tables.held.values() if row.order not in blocked]
        return not (tables.outbox or tables.delayed or waiting)

    async def _stop_all(self) -> None:
        for living in list(self.relays):
            self.stop(living)
        stopped = [living for living in self.ended if living.stopped]
        tasks = [living.task for living in stopped if living.task is not None]
        running = (await asyncio.wait(tasks, timeout=STOP_SECONDS))[1] if tasks else None
        if running:
            self.wrong.append(f"{len(running)} relays did not stop")

    def _end_all(self) -> None:
        """Whatever still runs ends now, so that no task is left behind."""
        for living in [*self.relays, *self.ended]:
            if living.task is not None and living.task.done() and not living.task.cancelled():
                living.task.result()
        for living in [*self.relays, *self.ended]:
            self._kill(living)
        processes = [living.process for living in self.ended]

        async def bury() -> None:
            for _ in range(20):
                tasks = [task for each in (*processes, self.writers) for task in each.tasks()]
                if not tasks:
                    return
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=30)
            raise RuntimeError("tasks that do not end")

        self.loop.run_until(self.loop.spawn(self.here, bury))

    # ── relays ─────────────────────────────────────────────────────────────────────────────────

    def start_relay(self, *, once: bool = False) -> None:
        """A new process with a relay in it; `once`: as a scheduler calls it."""
        dice = self.random
        process = Process(
            f"{'drain' if once else 'relay'}{next(self._names)}",
            skew_seconds=dice.choice((0.0, -3600.0, 3600.0)),
            booted_seconds=dice.random() * 1e6,
        )
        living = Living(process, once=once)
        self.relays.append(living)
        living.task = self.loop.spawn(process, self._live, living)
        self.trace("start", process.name)
        if self.size.shift_seconds and not once:
            self._end_shift(living, dice.expovariate(1 / self.size.shift_seconds))

    def _end_shift(self, living: Living, seconds: float) -> None:
        """Stop it then, as those do who put a new version in its place."""

        def end() -> None:
            if living.process.frozen:
                self._end_shift(living, self.lease_seconds)
            elif living in self.relays:
                self.stop(living)

        self.loop.call_later(seconds, end, context=self.loop.inside(self.here))

    async def _live(self, living: Living) -> None:
        failures = 0
        while not living.process.dead and not living.stopped:
            living.relay = relay = self._make_relay(living.process.name)
            living.process.owner = relay.owner
            try:
                await (self._drain(relay) if living.once else relay.run())
                living.stopped = True
            except PostroomError as error:
                # As a supervisor does it: a relay that could not start is started again.
                self.trace("not started", living.process.name, type(error).__name__)
                living.stopped = living.stopped or living.once
                failures += 1
                await asyncio.sleep(min(0.5 * 2**failures, 60))
            except Exception as error:
                if not living.process.dead:
                    self.wrong.append(f"{living.process.name} failed: {error!r}")
                return
        self._look_after_stop(living)

    def _make_relay(self, name: str) -> Relay:
        return Relay(
            URL,
            ROUTES,
            brokers={url: self.exchange.broker(url) for url in sorted(set(ROUTES.values()))},
            retry=self.size.retry,
            listen=False,
            name=name,
            **self.settings,
        )

    async def _drain(self, relay: Relay) -> None:
        await relay.drain_once()
        await relay.close()

    def _look_after_stop(self, living: Living) -> None:
        """A relay that ended in good order has left nothing behind but what `stops` allows."""
        if living in self.relays:
            self.relays.remove(living)
            self.ended.append(living)
        if living.process.dead or living.relay is None:
            return
        living.process.dead = True
        self.trace("stopped", living.process.name)
        if left := self.stops.left(living):
            self.wrong.append(f"{living.process.name} stopped and left {left}")

    def stop(self, living: Living) -> None:
        """SIGTERM."""
        self.relays.remove(living)
        self.ended.append(living)
        living.stopped, living.told_at = True, self.loop.now
        self.trace("stop", living.process.name)
        if living.relay is not None:
            living.relay.stop()

    def crash(self, living: Living) -> None:
        """SIGKILL: nothing it does from now on reaches anybody."""
        if living.process.dead:
            return
        self.fault(living.process, "crash")
        if living in self.relays:
            self.relays.remove(living)
            self.ended.append(living)
        self._kill(living)

    def _kill(self, living: Living) -> None:
        process = living.process
        if living in self.relays:
            self.relays.remove(living)
            self.ended.append(living)
        process.dead, process.frozen = True, False
        process.fuse, process.waits_for_send = None, False
        self.server.lose(process)
        for task in process.tasks():
            task.cancel()
