"""A message that kills its sender ends as a dead letter, and takes no other with it."""

import itertools
from functools import partial

import pytest
from programs import POISONED
from worlds import World

from helpers import eventually
from postroom.messages import Draft, lane_of
from postroom.outbox.rules import CHUNKS, DEATHS_ALONE

pytestmark = pytest.mark.guarantee


def deaths_of_the_first(messages: int) -> int:
    """With all of a lane under way, in parts ever smaller, by itself, and then alone."""
    deaths = 1
    while messages > 1:
        messages = max(1, messages // CHUNKS)
        deaths += 1
    return deaths + DEATHS_ALONE


def keys_of_one_lane(count: int) -> list[str]:
    """Keys that share a lane: the worst case, where all others are suspects too."""
    names = (f"key-{number}" for number in itertools.count())
    return list(itertools.islice((n for n in names if lane_of("facts", n, "") == 3), count))


BIG_BATCHES = {"batch_rows": 1000, "in_flight_rows": 4000}


def messages_of_one_lane(keys: list[str], count: int) -> list[Draft]:
    return [
        Draft(payload={"n": n}, type="fact", topic="facts", key=keys[n % len(keys)])
        for n in range(count)
    ]


@pytest.mark.parametrize(("others", "needed"), [(1, 5), (5, 5), (300, 7)])
def test_a_killer_is_found_and_buried(world: World, others: int, needed: int) -> None:
    poison, *keys = keys_of_one_lane(1 + min(others, 20))
    good = messages_of_one_lane(keys, others)
    bad = Draft(payload={"n": 0, "do": "poison"}, type="fact", topic="facts", key=poison)
    ids = world.publish(*good[: others // 2], bad, *good[others // 2 :])
    killer = ids.pop(others // 2)

    deaths = 0
    while True:
        relay = world.relay(settings=BIG_BATCHES)
        world.disturbed.add(relay.pid)
        eventually(partial(world.settled_or_ended, relay), 20)
        if relay.code is None:
            break
        assert relay.code == POISONED, relay.log
        deaths += 1
        assert deaths <= needed, relay.log
        world.tables.end_leases()
    relay.terminate()
    assert relay.wait() == 0

    print(f"{world.tables.kind}: {deaths} deaths with {others} others")
    assert deaths == needed
    assert world.tables.dead() == {killer: "suspected_killer"}
    assert world.delivered() == set(ids)
    report = world.judge(in_flight=4000)
    assert not report.violations, report
    print(f"{report.duplicates.total()} delivered twice")


def test_an_unlucky_message_is_not_taken_for_a_killer(world: World) -> None:
    """Kills in a row that hit the same message each time, but rarely while it was alone."""
    ids = world.publish(*messages_of_one_lane(keys_of_one_lane(20), 300))
    for _ in range(deaths_of_the_first(300) - 1):
        relay = world.relay("relay.send.before=kill@1", settings=BIG_BATCHES)
        assert relay.wait() == -9, relay.log
        world.tables.end_leases()
    relay = world.relay(settings=BIG_BATCHES)
    world.until_settled()
    relay.terminate()
    assert relay.wait() == 0
    assert world.tables.dead() == {}
    assert world.delivered() == set(ids)
    report = world.judge()  # each died before its send: a single duplicate is a violation
    assert not report.violations, report
