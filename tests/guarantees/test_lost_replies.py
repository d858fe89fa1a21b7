"""The reply that is lost: a server did what it was asked, and the relay is not told.

A proxy that knows the protocol stands between relay and server. The requests are learnt from a run
in which nothing goes wrong; then the reply to each is lost, or the connection is cut just before
it, and a relay, the same one or the next, still has to bring everything to its end. A run has
several faults. The everyday run has a sample of the requests, chosen by POSTROOM_SEED, and
POSTROOM_SWEEP=full has several passes of each. SQLite has no network: there the reply lost is
the error after the effect in test_crash_sweep.py.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import pytest
from nursery import Child
from scenario import SMALL, publish_scenario, work
from streams import make_stream, read_stream
from sweeping import full_size, sweep, tell, together
from worlds import KINDS, World, drafts

from lossy import Fault, LossyProxy
from postroom.messages import new_id
from servers import NatsServer

pytestmark = pytest.mark.guarantee

PUBLISH = "publish"
RELAYS = 6
EVERYDAY_REQUESTS = 32
EVERYDAY_PUBLISHES = 8


@dataclass(frozen=True)
class Case:
    """Faults of one run."""

    lost: bool
    places: tuple[tuple[str, int], ...]

    def faults(self) -> list[Fault]:
        return [Fault(what, at, self.lost) for what, at in self.places]

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults()))


def choose(passed: Counter[str], dice: random.Random) -> list[Case]:
    """Both faults at each request: at some passes of all, or at one pass of some."""
    if full_size():
        places = [
            (what, at)
            for what, passes in sorted(passed.items())
            for at in sorted({1, 2, 3, passes // 2, passes})
            if 1 <= at <= passes
        ]
    else:
        some = dice.sample(sorted(passed), min(EVERYDAY_REQUESTS, len(passed)))
        places = [(what, dice.randint(1, passed[what])) for what in some]
    return [Case(lost, tuple(group)) for lost in (True, False) for group in together(places)]


def live_on(world: World, start: Callable[[], Child]) -> int:
    """Relays one after the other, until one comes to the end of the work; returns how many."""
    for number in range(1, RELAYS + 1):
        relay = start()
        world.disturbed.add(relay.pid)
        work(world, relay)
        if world.settled():
            return number
        assert relay.code != 0, "a relay that stopped in good order left work behind"
        world.tables.end_leases()
    raise AssertionError(f"{RELAYS} relays did not come to the end")


class Between:
    """Worlds with a proxy each between their relays and a server."""

    def __init__(self, new_world: Callable[[str], World]) -> None:
        self._new_world = new_world
        self._proxies: dict[World, LossyProxy] = {}
        self.faults = self.happened = 0

    def make(self, kind: str) -> World:
        world = self._new_world(kind)
        self._proxies[world] = LossyProxy(self.server_of(world))
        self._proxies[world].start()
        return world

    def learn(self, kind: str) -> Counter[str]:
        """What a relay asks for when nothing goes wrong."""
        world = self.make(kind)
        assert self.run(world, Case(True, ())) == "reply lost: 0 of 0, survived, 0 twice"
        return self._proxies[world].passed

    def run(self, world: World, case: Case) -> str:
        proxy, faults = self._proxies[world], case.faults()
        proxy.begin(faults, note=world.note_fault)
        relays, twice = self.play(world, proxy)
        self.faults += len(faults)
        self.happened += sum(fault.happened for fault in faults)
        fault = "reply lost" if case.lost else "cut before"
        lived = "survived" if relays == 1 else f"{relays} relays"
        happened = sum(fault.happened for fault in faults)
        return f"{fault}: {happened} of {len(faults)}, {lived}, {twice} twice"

    def server_of(self, world: World) -> str:
        raise NotImplementedError

    def play(self, world: World, proxy: LossyProxy) -> tuple[int, int]:
        """Publish, relay, judge; returns how many relays it took, and how many came twice."""
        raise NotImplementedError

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()


# ── Databases ──────────────────────────────────────────────────────────────────────────────────


class BeforeDatabase(Between):
    def server_of(self, world: World) -> str:
        return world.tables.url

    def play(self, world: World, proxy: LossyProxy) -> tuple[int, int]:
        good, dead = publish_scenario(world)
        relays = live_on(world, partial(world.relay, url=proxy.url, settings=SMALL))
        proxy.end()
        report = world.judge(in_flight=SMALL["in_flight_rows"], every_fault_noted=True)
        assert not report.violations, report
        assert world.delivered() == good
        assert world.tables.dead() == dead
        return relays, report.duplicates.total()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sqlite"])
def test_a_reply_of_the_database_may_be_lost(
    kind: str, new_world: Callable[[str], World], seed: str
) -> None:
    begun = time.perf_counter()
    with closing(BeforeDatabase(new_world)) as between:
        requests = between.learn(kind)
        chosen = choose(requests, random.Random(seed))
        ends = sweep(lambda: between.make(kind), chosen, between.run)
    tell(kind, begun, len(chosen), f"{len(requests)} requests, {between.faults} faults", ends)
    # Later passes depend on who is faster, and some come only if nothing else went wrong before.
    assert between.happened > between.faults * 0.7


# ── NATS ───────────────────────────────────────────────────────────────────────────────────────


class BeforeNats(Between):
    """Each run has a subject of its own in one stream."""

    def __init__(self, new_world: Callable[[str], World], server: NatsServer) -> None:
        super().__init__(new_world)
        self._server = server
        asyncio.run(make_stream(server, "sweep", "sweep.*"))

    def server_of(self, world: World) -> str:
        return self._server.url

    def play(self, world: World, proxy: LossyProxy) -> tuple[int, int]:
        topic = f"sweep.{new_id()}"
        ids = world.publish(*[replace(draft, topic=topic) for draft in drafts(24, keys=4)])
        relays = live_on(world, partial(world.relay, broker=proxy.url, settings=SMALL))
        proxy.end()
        stored = asyncio.run(read_stream(self._server, "sweep", topic))
        report = world.judge(deliveries=stored, every_fault_noted=True)
        assert not report.violations, report
        assert {delivery.id for delivery in stored} == set(ids)
        return relays, report.duplicates.total()


@pytest.mark.parametrize("kind", KINDS)
def test_an_acknowledgement_of_nats_may_be_lost(
    kind: str, new_world: Callable[[str], World], nats_server: NatsServer, seed: str
) -> None:
    begun, dice = time.perf_counter(), random.Random(seed)
    with closing(BeforeNats(new_world, nats_server)) as between:
        passes = between.learn(kind)[PUBLISH]
        size = passes if full_size() else min(passes, EVERYDAY_PUBLISHES)
        places = [(PUBLISH, at) for at in sorted(dice.sample(range(1, passes + 1), size))]
        chosen = [Case(lost, tuple(group)) for lost in (True, False) for group in together(places)]
        ends = sweep(lambda: between.make(kind), chosen, between.run)
    tell(kind, begun, len(chosen), f"{passes} publishes, {between.faults} faults", ends)
    # What was lost before is sent again, so the count of a later one may not be reached.
    assert between.happened > between.faults * 0.7
