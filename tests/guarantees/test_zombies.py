"""A relay that freezes past its lease loses its lanes, and on waking changes nothing.

SQLite: a process that is frozen inside a transaction holds the lock of the whole file, and there is
no server that could end it. Whoever writes then waits, publishers too, until it wakes or is killed;
nobody can have taken its lanes meanwhile, so on waking it may finish its settle.
"""

import time
from typing import Any

import pytest
from nursery import Child
from worlds import QUICK, World, drafts, together

from helpers import eventually
from postroom.messages import Draft

pytestmark = pytest.mark.guarantee

LEASE = QUICK["lease_seconds"]
# The lease, the server's patience with an idle transaction, and a round of looking for free lanes.
TAKEN_OVER = LEASE + max(1.0, LEASE / 3) + 4.0
MESSAGES = 40
TRIES = 6
PERMANENT = Draft(payload={"n": 1, "do": "permanent"}, type="fact", topic="facts", key="bad")


def freeze(world: World, failpoint: str, **options: Any) -> Child:
    """A relay that owned everything and has stopped itself at a point of its work."""
    while True:
        zombie = world.relay(failpoint, **options)
        world.disturbed.add(zombie.pid)
        eventually(zombie.is_stopped)
        if world.tables.can_write():
            return zombie
        # SQLite: another thread of it was just inside a transaction, which is another test.
        zombie.kill()
        world.tables.end_leases()
        # Nor is it a death on record: some of those would make the message a suspected killer.
        world.tables.query("DELETE FROM {p}lane_batch")


def take_over(world: World, zombie: Child) -> Child:
    """A second relay, not kept waiting by the first. While the gate is shut it delivers nothing."""
    begun = time.perf_counter()
    heir = world.relay(gate=str(world.gate))
    # Half of the lanes first: the zombie counts as alive for a while.
    eventually(lambda: heir.lanes_acquired >= 8, TAKEN_OVER)
    eventually(lambda: heir.lanes_acquired >= 16, TAKEN_OVER)
    print(f"taken over after {time.perf_counter() - begun:.1f} s")
    assert zombie.is_stopped()
    return heir


def wake(zombie: Child) -> None:
    """Let the zombie go on until it has found its lanes lost and taken its share anew."""
    zombie.resume()
    eventually(lambda: "lane.lost" in zombie.log or "database.lost" in zombie.log)
    eventually(lambda: zombie.lanes_acquired > 16)


def changes_nothing(world: World, failpoint: str, *messages: Draft, refused: bool = True) -> None:
    """Frozen at the point, taken over, woken: the tables are as they were, and all ends well.

    `refused`: its settle must have come to the fence. Now and then something else of it was under
    way when it froze, and on waking it finds that connection dead and drops all: so try again.
    """
    for _ in range(TRIES):
        world.clear()
        world.gate.unlink(missing_ok=True)
        world.publish(*messages)
        zombie = freeze(world, failpoint, gate=str(world.gate))
        world.gate.touch()  # from here on nobody delivers, so nobody has a reason to write
        heir = take_over(world, zombie)
        before = world.tables.content()
        assert before["outbox"]
        assert not before["held"]
        assert not before["dead_letter"]
        wake(zombie)
        assert world.tables.content() == before
        if not refused or zombie.wrote("has another owner"):
            return finish(world, zombie, heir)
    raise AssertionError(f"its settle never came to the fence in {TRIES} tries")


def finish(world: World, *relays: Child) -> None:
    world.gate.unlink(missing_ok=True)
    world.publish(*drafts(10, keys=1, first=MESSAGES + 1))
    world.until_settled()
    for relay in relays:
        relay.terminate()
        assert relay.wait() == 0, relay.log
    report = world.judge()
    assert not report.violations, f"{report}\n{together(relays)}"
    print(f"{report.duplicates.total()} of {MESSAGES} twice")


def test_frozen_between_send_and_settle(world: World) -> None:
    changes_nothing(world, "relay.settle.before=stop@1", *drafts(MESSAGES, keys=1))


def test_frozen_before_a_failure_is_written_down(world: World) -> None:
    """A stale verdict is worse than a stale delivery: it would bury what another may deliver."""
    changes_nothing(world, "relay.settle.before=stop@1", PERMANENT)
    assert list(world.tables.dead().values()) == ["refused"]


def test_frozen_before_the_send(world: World) -> None:
    """The zombie's send, a lease late, is a duplicate of what its heir has long delivered."""
    world.publish(*drafts(MESSAGES, keys=1))
    zombie = freeze(world, "relay.send.before=stop@1")
    heir = take_over(world, zombie)
    world.until_settled()
    before = world.tables.content()
    wake(zombie)
    assert world.tables.content() == before
    finish(world, zombie, heir)


@pytest.mark.parametrize("world", ["postgresql", "mariadb"], indirect=True)
def test_frozen_between_settle_and_commit(world: World) -> None:
    """The server ends the transaction that stands still, so its locks keep nobody waiting."""
    # A failure makes the settle a transaction on PostgreSQL too; this is its last statement.
    changes_nothing(world, "sql.heads_arm.after=stop@1", PERMANENT, refused=False)
    assert list(world.tables.dead().values()) == ["refused"]


@pytest.mark.parametrize("world", ["mariadb"], indirect=True)
def test_frozen_between_a_plain_settle_and_commit(world: World) -> None:
    messages = drafts(MESSAGES, keys=1)
    changes_nothing(world, "sql.journal_clear.after=stop@1", *messages, refused=False)


@pytest.mark.parametrize("ends", ["wakes", "killed"])
@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
def test_a_frozen_writer_holds_the_sqlite_file(world: World, ends: str) -> None:
    """The honest behaviour: the others wait, however long it takes, and then all goes on."""
    other = world.relay()
    world.until_taken(other)
    zombie = world.relay("sql.journal_clear.after=stop@1")
    eventually(lambda: zombie.lanes_acquired >= 8)
    world.disturbed |= {zombie.pid, other.pid}
    world.publish(*drafts(MESSAGES, keys=MESSAGES))
    eventually(zombie.is_stopped)
    assert not world.tables.can_write()
    eventually(lambda: "database.lost" in other.log, 20)
    assert "not to be had in time" in other.log
    assert other.code is None
    (zombie.resume if ends == "wakes" else zombie.kill)()
    world.until_settled()
    assert len(world.delivered()) == MESSAGES
    report = world.judge()
    assert not report.violations, report
