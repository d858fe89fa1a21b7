"""The clock of a relay's machine decides nothing: leases are measured by the database alone."""

import pytest
from worlds import World, together

from helpers import eventually

pytestmark = pytest.mark.guarantee

HOUR = 3600.0
KEYS = 20


def test_relays_an_hour_apart_share_the_lanes_in_peace(world: World, seed: str) -> None:
    world.make_keys(KEYS)
    relays = [
        world.relay(clock_skew_seconds=skew, delay_seconds=0.01) for skew in (-HOUR, 0.0, HOUR)
    ]
    # Each has its share: nobody takes what is another's, nobody waits for what is free.
    eventually(lambda: all("lanes.acquired" in relay.log for relay in relays), 20)
    eventually(lambda: len(world.tables.owners()) == 3)
    writer = world.writer(count=150, keys=KEYS, seed=seed)
    assert writer.wait(60) == 0
    world.until_settled(30)
    for relay in relays:
        relay.terminate()
        assert relay.wait() == 0, relay.log
        assert "lane.lost" not in relay.log
    report = world.judge()  # nobody was disturbed: a single duplicate is a violation
    assert not report.violations, f"{report}\n{together(relays)}"


@pytest.mark.parametrize("skew", [-HOUR, HOUR])
def test_a_dead_relays_lanes_are_free_after_its_lease_whatever_its_clock(
    world: World, skew: float
) -> None:
    dead = world.relay(clock_skew_seconds=skew)
    world.until_taken(dead)
    dead.kill()
    heir = world.relay()
    world.until_taken(heir)
