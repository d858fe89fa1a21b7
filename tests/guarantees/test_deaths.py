"""A relay that dies between two steps: what it had claimed is freed by the lease alone, and what it
had under way is sent again under the same id, exactly that and no more."""

from collections import Counter

import pytest
from history import History
from worlds import World, drafts

pytestmark = pytest.mark.guarantee

MESSAGES = 60


def deliveries(world: World) -> Counter[str]:
    history = History()
    history.read_deliveries(world.record)
    return Counter(delivery.id for delivery in history.deliveries)


def finish(world: World, **settings: str) -> None:
    heir = world.relay(settings=settings)
    world.until_settled(30)
    heir.terminate()
    assert heir.wait() == 0, heir.log


@pytest.mark.parametrize(
    ("point", "keys"), [("relay.send.after=kill@4", 1), ("relay.settle.before=kill@3", 12)]
)
def test_killed_between_receipt_and_settle(world: World, point: str, keys: int) -> None:
    ids = set(world.publish(*drafts(MESSAGES, keys=keys)))
    relay = world.relay(point, delay_seconds=0.001)
    world.disturbed.add(relay.pid)
    assert relay.wait() == -9, relay.log
    in_flight = world.delivered() & world.tables.ids("outbox")
    assert in_flight
    journal = world.tables.query("SELECT lane, lo, hi FROM {p}lane_batch")
    for id, lane, position in world.tables.query("SELECT id, lane, position FROM {p}outbox"):
        named = any(lane == where and lo <= position <= hi for where, lo, hi in journal)
        assert named or str(id) not in in_flight, "it was sent without being said so before"
    world.tables.end_leases()
    finish(world)
    times = deliveries(world)
    assert times.keys() == ids
    assert {id for id, count in times.items() if count > 1} == in_flight
    assert max(times.values()) == 2
    report = world.judge()
    assert not report.violations, report


@pytest.mark.parametrize(
    ("world", "name"),
    [("postgresql", "relay-1"), ("postgresql", "relay-2"), ("mariadb", "relay-1"),
     ("sqlite", "relay-1")],
    indirect=["world"],
)  # fmt: skip
def test_killed_between_claim_and_send(world: World, name: str) -> None:
    ids = set(world.publish(*drafts(MESSAGES)))
    relay = world.relay("sql.journal_write.after=kill@1", settings={"name": "relay-1"})
    assert relay.wait() == -9, relay.log
    assert len(world.tables.owners()) == 1, "it died as an owner"
    assert not world.deliveries()
    # Nobody tidies up after it: the lease ends, and that is all.
    finish(world, name=name)
    assert deliveries(world) == Counter(ids)
    report = world.judge()
    assert not report.violations, report
