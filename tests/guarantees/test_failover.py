"""A primary that is killed and its standby promoted: with synchronous replication nothing that was
committed is lost. Without, the database itself loses what the standby did not have yet; then
exactly that is lost, whoever published it can find out, and the relay takes nothing for granted.

POSTROOM_GUARANTEES=big has more rounds.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from history import Delivery, History
from nursery import Child, Nursery
from tables import Tables, connect
from worlds import World, drafts

from helpers import eventually
from postroom.outbox.publish import Outbox
from proxy import ChaosProxy
from servers import PostgresServer, StandbyServer, Unavailable, leave_out

pytestmark = pytest.mark.guarantee

ROUNDS = 25 if os.environ.get("POSTROOM_GUARANTEES") == "big" else 1
KEYS = 10


@dataclass
class Pair:
    """A primary, its standby, and the line between them."""

    primary: PostgresServer
    standby: StandbyServer
    line: ChaosProxy
    world: World

    def log_end(self) -> int:
        """The end of the primary's log."""
        rows = self.world.tables.query(
            "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
        )
        return int(rows[0][0])

    def until_followed(self) -> None:
        end = self.log_end()
        eventually(lambda: self.standby.received() >= end)

    def stop_following(self) -> None:
        self.line.refuse()
        self.line.cut()

    def wait_for_standby(self) -> None:
        """From here on a commit is answered when the standby has it too."""
        tables = self.world.tables
        tables.query("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        tables.query("SELECT pg_reload_conf()")
        state = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        eventually(lambda: bool(tables.query(state)))

    def fail_over(self) -> None:
        self.world.tables.close()
        self.primary.kill()
        self.standby.promote()


@pytest.fixture
def new_pair(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[[], Pair]]:
    with ExitStack() as stack:

        def make() -> Pair:
            try:
                primary = stack.enter_context(PostgresServer(fsync=False))
            except Unavailable as error:
                leave_out(str(error))
            line = stack.enter_context(ChaosProxy(primary.url))
            standby = stack.enter_context(StandbyServer(primary, line.port))
            both = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
            url = f"postgresql://postgres@{both}/postgres?target_session_attrs=read-write"
            folder = tmp_path / f"pair-{primary.port}"
            folder.mkdir()
            tables = Tables(url)
            tables.install()
            world = World(nursery, tables, folder)
            stack.callback(world.close)
            return Pair(primary, standby, line, world)

        yield make


def deliveries(world: World) -> list[Delivery]:
    """All deliveries in their order."""
    history = History()
    history.read_deliveries(world.record)
    return history.deliveries


def stop(relay: Child) -> None:
    eventually(partial(relay.wrote, "database.back"), 20)
    assert relay.code is None, relay.log
    relay.terminate()
    assert relay.wait() == 0, relay.log


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_synchronous_standby_has_all_that_was_committed(
    new_pair: Callable[[], Pair], seed: str, number: int
) -> None:
    pair, dice = new_pair(), random.Random(f"{seed}-{number}")
    world = pair.world
    pair.wait_for_standby()
    world.make_keys(KEYS)
    relay = world.relay()
    world.disturbed.add(relay.pid)
    writers = [
        world.writer(count=600, keys=KEYS, seed=f"{seed}-{number}-{n}", rest_seconds=0.01)
        for n in range(2)
    ]
    eventually(partial(world.has_delivered, 20), 30)
    time.sleep(dice.random())  # the moment of the kill is the test
    assert all(writer.code is None for writer in writers), "they are in the midst of it"
    pair.fail_over()
    for writer in writers:
        assert writer.wait(60) == 0, writer.log
    world.until_settled(30)
    stop(relay)
    report = world.judge()
    assert not report.violations, f"{report}\n{relay.log}"
    print(f"{len(world.tables.business())} messages, {report.duplicates.total()} twice")


@pytest.mark.parametrize("number", range(ROUNDS))
def test_an_asynchronous_standby_lacks_what_it_had_not_received_and_no_more(
    new_pair: Callable[[], Pair], number: int
) -> None:
    pair = new_pair()
    world = pair.world
    relay = world.relay(gate=str(world.gate))
    ends: dict[str, int] = {}

    def publish(count: int, first: int) -> set[str]:
        ids = world.publish(*drafts(count, keys=KEYS, first=first))
        ends.update(dict.fromkeys(ids, pair.log_end()))
        return set(ids)

    delivered_before = publish(20, 1)
    world.until_settled()
    world.gate.touch()
    delivered_late = publish(20, 21)
    pair.until_followed()
    pair.stop_following()
    gone = publish(20, 41)
    world.gate.unlink()
    world.until_settled()  # on the primary: of the second part the standby knows nothing
    world.gate.touch()
    never_sent = publish(20, 61)
    received = pair.standby.received()
    pair.fail_over()
    world.gate.unlink()

    # Lost is what came after the last byte received, and whoever published it can ask.
    lost = {id for id, end in ends.items() if end > received}
    assert lost == gone | never_sent
    with connect(world.tables.url) as connection:
        outbox = Outbox()
        assert {id for id in ends if not outbox.was_committed(connection, id)} == lost

    # Positions and epochs come again, and the relay takes no offence.
    world.forget_connection()
    eventually(lambda: "database.back" in relay.log, 20)
    after = publish(20, 81)
    world.until_settled(30)
    stop(relay)
    times = Counter(delivery.id for delivery in deliveries(world))
    assert times.keys() == delivered_before | delivered_late | gone | after
    # What was settled only on the old primary came again under the same id; nothing else did.
    assert {id for id, count in times.items() if count > 1} == delivered_late
    assert max(times.values()) == 2
    numbers: dict[str | None, list[int]] = {}
    for delivery in deliveries(world):
        if delivery.id in after:
            numbers.setdefault(delivery.key, []).append(delivery.n)
    assert all(found == sorted(found) for found in numbers.values())
    assert world.tables.dead() == {}
