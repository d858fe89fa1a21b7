"""`postroom relay` told to stop: finishes what is under way, loses nothing, sends nothing twice."""

import random
import time
from functools import partial

import pytest
from nursery import Child
from worlds import QUICK, World, drafts

from helpers import eventually

pytestmark = pytest.mark.guarantee

GRACE = 20.0
ROUNDS = 8
LOAD = 200
KEYS = 20


def start(world: World) -> Child:
    """The command itself; its broker is a function that writes to the record."""
    settings = QUICK | {"grace_seconds": GRACE, "concurrency": 8}
    return world.command(settings, call="sink:take", delay_seconds=0.02)


def load(world: World, number: int) -> None:
    world.publish(*drafts(LOAD, keys=KEYS, first=number * LOAD + 1))


def finish(world: World) -> None:
    relay = start(world)
    eventually(partial(relay.wrote, "relay.started"))
    world.until_settled(60)
    relay.terminate()
    assert relay.wait() == 0, relay.log


def test_sigterm_at_any_moment_loses_and_repeats_nothing(world: World, seed: str) -> None:
    dice = random.Random(seed)
    slowest, caught = 0.0, 0
    for number in range(ROUNDS):
        load(world, number)
        before = world.deliveries()
        relay = start(world)
        eventually(partial(relay.wrote, "relay.started"))
        if number:  # at first before anything is sent
            eventually(partial(world.has_delivered, before + 1))
        time.sleep(dice.random() * 0.3)  # the moment of the signal is the test
        begun = time.perf_counter()
        relay.terminate()
        assert relay.wait() == 0, relay.log
        slowest = max(slowest, time.perf_counter() - begun)
        assert not world.tables.owners(), "a lane was not given back"
        caught += not world.settled()
    assert slowest < GRACE
    finish(world)
    report = world.judge()  # nobody was disturbed: a single duplicate is a violation
    assert not report.violations, report
    assert len(world.delivered()) == ROUNDS * LOAD
    assert caught > ROUNDS // 2, "too little load: the relays were done before the signal"
    print(f"{ROUNDS} stops, {caught} in the midst of work, the slowest took {slowest:.2f} s")


def test_a_second_sigterm_ends_at_once_and_loses_nothing(world: World) -> None:
    load(world, 0)
    relay = world.command(QUICK | {"grace_seconds": GRACE}, call="sink:take", delay_seconds=0.25)
    world.disturbed.add(relay.pid)
    eventually(lambda: world.deliveries() > 0)
    relay.terminate()
    time.sleep(0.05)  # or the two would be one
    relay.terminate()
    begun = time.perf_counter()
    relay.wait()
    assert time.perf_counter() - begun < 10
    world.tables.end_leases()
    finish(world)
    report = world.judge()
    assert not report.violations, report
    assert len(world.delivered()) == LOAD
