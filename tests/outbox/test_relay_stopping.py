"""A relay that stops begins no send and gives its lanes back, whatever its housekeeping waits for.
One whose grace is over keeps the lanes it names until their lease ends, and no others."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing

from relaying import Post, note, several_writers

from helpers import eventually_async
from postroom.brokers.base import DELIVERED, Capabilities, Outcome
from postroom.databases.database import WorkerLink
from postroom.messages import LANES, Message, lane_of
from postroom.outbox.relay import Relay

pytest_plugins = ("relay_fixtures",)

LEASE = 12.0
LANE = lane_of("orders", "k", "")


class Silent:
    """A broker that takes what it is sent and never says so."""

    def __init__(self) -> None:
        self.capabilities = Capabilities()
        self.sent = asyncio.Event()

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.sent.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


def owned(post: Post) -> set[int]:
    return {lane for lane, owner in post.owners().items() if owner is not None}


async def test_when_its_grace_is_over_it_keeps_the_lane_of_the_send_and_says_so(post: Post) -> None:
    silent = Silent()
    relay = post.relay(
        "memory://silent",
        brokers={"memory://silent": silent},
        lease_seconds=60,
        send_timeout_seconds=30,
        grace_seconds=1,
    )
    working = asyncio.create_task(relay.run())
    await eventually_async(lambda: len(owned(post)) == LANES)
    await post.put(note("k", 1))
    await silent.sent.wait()
    relay.stop()
    await working
    (said,) = post.of("relay.unsettled")
    assert LANE in said["lanes"]
    assert LANE in owned(post) <= set(said["lanes"])
    assert post.count("worker") == 0
    # The send may still arrive, so nobody sends for this lane before the lease is over.
    drained = await post.relay(rebind=True).drain_once()
    assert (drained.delivered, drained.elsewhere) == (0, len(owned(post)))
    post.sql("UPDATE {p}lane SET owner = NULL")
    assert (await post.relay().drain_once()).delivered == 1


class Slow:
    """A broker that takes its time, and one message of each key at a time."""

    def __init__(self) -> None:
        self.capabilities = Capabilities()
        self.begun = self.under_way = 0

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.begun += len(batch)
        self.under_way += len(batch)
        try:
            await asyncio.sleep(0.1)
        finally:
            self.under_way -= len(batch)
        return [DELIVERED] * len(batch)

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


@asynccontextmanager
async def locked(post: Post, table: str) -> AsyncIterator[None]:
    """Nobody else gets at the table, as during ALTER TABLE. SQLite has one lock for all writers,
    so nothing waits for it alone there, and no driver breaks that wait off. The relay may have a
    transaction open on it, and must be able to end that meanwhile."""
    statement = {
        "postgresql": f"LOCK TABLE postroom.{table} IN ACCESS EXCLUSIVE MODE",
        "mariadb": f"LOCK TABLES postroom_{table} WRITE",
    }[post.dialect]
    with closing(post.connect()) as holder:
        cursor = holder.cursor()
        await asyncio.to_thread(cursor.execute, statement)
        yield
        holder.rollback()
        cursor.close()


def waits(link: WorkerLink) -> bool:
    """Whether the database has kept a statement waiting, for longer than any of ours takes."""
    return link.asked_at is not None and time.monotonic() - link.asked_at > 0.5


def loaded(post: Post, broker: Slow, grace_seconds: float) -> Relay:
    """A relay that has more to send than it can before it stops."""
    post.publish(*(note(f"k{n % 40}", n) for n in range(8000)))
    return post.relay(
        "memory://slow",
        brokers={"memory://slow": broker},
        lease_seconds=LEASE,
        grace_seconds=grace_seconds,
    )


@several_writers
async def test_it_hands_over_at_once_though_its_housekeeping_waits_for_a_lock(post: Post) -> None:
    broker = Slow()
    relay = loaded(post, broker, LEASE / 3)
    async with locked(post, "inbox"):  # which a prune deletes from
        working = asyncio.create_task(relay.run())
        await eventually_async(lambda: (o := relay._office) and waits(o.house) and broker.begun)
        relay.stop()
        begun, unsent = broker.begun, post.count("outbox")
        await eventually_async(lambda: not owned(post))
        assert broker.begun == begun, "a send began after the stop"
        await working
        assert broker.begun == begun
        assert not owned(post)
    assert not post.of("prune.failed"), "the statement was waited for until its own time was over"
    assert not post.of("relay.unsettled") + post.of("lane.lost") + post.of("database.lost")
    assert unsent > post.count("outbox") == 8000 - begun
    assert post.count("worker") == post.count("lane_batch") == 0


@several_writers
async def test_it_ends_though_the_database_keeps_every_statement_waiting(post: Post) -> None:
    broker = Slow()
    relay = loaded(post, broker, 1)
    working = asyncio.create_task(relay.run())
    await eventually_async(lambda: len(owned(post)) == LANES and broker.begun)
    lanes = owned(post)
    async with locked(post, "lane"):
        assert relay._office is not None
        control = relay._office._control
        await eventually_async(lambda: waits(control) and not broker.under_way)
        relay.stop()
        begun = broker.begun
        await working
        assert broker.begun == begun, "a send began after the stop"
    assert not post.of("database.lost"), "it waited until a statement's own time was over"
    (said,) = post.of("relay.unsettled")
    assert set(said["lanes"]) <= lanes
