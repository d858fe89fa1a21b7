"""Late committers: a position that becomes visible after higher ones were read is not lost, comes
once, and is not passed by its own key."""

import asyncio
import datetime as dt
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from relaying import Post, note, on_postgres, several_writers, told

from helpers import eventually_async
from postroom.brokers.base import Transient
from postroom.messages import lane_of
from postroom.retry import RetryPolicy

pytest_plugins = ("relay_fixtures",)

LANE = lane_of("orders", "k", "")
# Keys of the same lane as "k": only they could move its watermark past the open transaction.
NEIGHBOURS = [f"n{n}" for n in range(400) if lane_of("orders", f"n{n}", "") == LANE]


@contextmanager
def open_publisher(post: Post, key: str, number: int) -> Iterator[Any]:
    """A transaction that has published and not committed."""
    with closing(post.connect()) as tx:
        post.outbox.publish_many(tx, [note(key, number)])
        yield tx


async def let_it_pass(post: Post, first: int, rounds: int = 12) -> None:
    """Deliver messages of the same lane, one after the other, each time with a new read."""
    for n in range(first, first + rounds):
        await post.put(note(NEIGHBOURS[n % len(NEIGHBOURS)], n))
        await eventually_async(
            lambda n=n: n in [number for _, number in told(post.broker.messages)]
        )
        await asyncio.sleep(0.01)  # let some looks at the open transactions pass


def numbers(post: Post) -> list[int]:
    return [number for _, number in told(post.broker.messages)]


def delivered(post: Post, key: str) -> list[int]:
    return [number for name, number in told(post.broker.messages) if name == key]


@several_writers
async def test_a_late_committer_is_delivered_once(post: Post) -> None:
    async with post.relay():
        with open_publisher(post, "k", 1) as late:
            await let_it_pass(post, 100)
            assert delivered(post, "k") == []
            late.commit()
        await eventually_async(lambda: delivered(post, "k") == [1])
        await let_it_pass(post, 200)
    assert delivered(post, "k") == [1]
    assert len(post.broker.messages) == 25
    assert post.empty()
    assert not post.of("lane.late")


@several_writers
async def test_a_late_committer_is_not_passed_by_its_own_key(post: Post) -> None:
    """T1 on k is open, others commit, T1 commits, then T2 publishes on k: T1 first."""
    async with post.relay():
        for n in range(0, 16, 2):
            with open_publisher(post, "k", n) as first:
                await let_it_pass(post, 1000 + 10 * n, rounds=2)
                await asyncio.to_thread(first.commit)
            await post.put(note("k", n + 1))
        await eventually_async(lambda: len(delivered(post, "k")) == 16)
    assert delivered(post, "k") == list(range(16))
    assert not post.of("lane.late")


@several_writers
async def test_one_open_transaction_while_thousands_commit(post: Post) -> None:
    async with post.relay(keep_delivered_seconds=0):
        with open_publisher(post, "k", 1) as late:
            for start in range(0, 3000, 250):
                await post.put(
                    *(note(NEIGHBOURS[n % 5] if n % 2 else f"k{n}", n + 10) for n in range(250)),
                    note(NEIGHBOURS[0], start),
                )
            await eventually_async(lambda: len(post.broker.messages) == 3012, 40)
            assert post.count("held") == 0
            late.commit()
        await eventually_async(lambda: delivered(post, "k") == [1])
    assert len(post.broker.messages) == 3013
    assert post.empty()


@several_writers
async def test_an_open_publisher_keeps_no_write_of_the_relay_waiting(post: Post) -> None:
    past = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    with closing(post.connect()) as tx:
        post.outbox.publish_many(tx, [note("k", 1), note("k", 2, deliver_at=past)])
        post.publish(
            *(note(f"k{n}", n) for n in range(300)),
            *(note("k", 1000 + n, deliver_at=past + dt.timedelta(seconds=n)) for n in range(9)),
        )
        # A dead relay's batch, in which the open transaction has its position.
        post.sql(
            "INSERT INTO {p}lane_batch VALUES (%s, 'dead', 1, 1, 50, 50, %s, %s)",
            LANE,
            False,
            False,
        )
        post.broker.fail(lambda m: m.key == "k7", Transient("busy", "no"), times=None)
        # It would give up a lock after a third of its lease, and this drain with it.
        await post.relay(lease_seconds=4, retry=RetryPolicy((3600.0,))).drain_once()
        assert len(post.broker.messages) == 308
        assert post.numbers("held") == [7]
        tx.commit()


@several_writers
async def test_an_open_transaction_that_rolls_back_costs_nothing(post: Post) -> None:
    async with post.relay():
        with open_publisher(post, "k", 1) as never:
            await let_it_pass(post, 100, rounds=4)
            never.rollback()
        await let_it_pass(post, 200, rounds=4)
    assert delivered(post, "k") == []


@on_postgres
async def test_a_prepared_transaction_is_a_late_committer_too(post: Post) -> None:
    async with post.relay():
        with closing(post.connect()) as tx:
            tx.tpc_begin("late")
            post.outbox.publish_many(tx, [note("k", 1)])
            await let_it_pass(post, 100, rounds=6)
            tx.tpc_prepare()
            await let_it_pass(post, 200)
            tx.tpc_commit()
        await eventually_async(lambda: delivered(post, "k") == [1])
    assert not post.of("lane.late")


BARRIER = """
CREATE FUNCTION postroom.barrier() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.key = 'k' THEN PERFORM pg_advisory_xact_lock(7); END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER barrier BEFORE INSERT ON postroom.outbox
    FOR EACH ROW EXECUTE FUNCTION postroom.barrier();
"""


@on_postgres
async def test_a_position_taken_before_a_transaction_number_is_not_skipped(post: Post) -> None:
    """A trigger stands between the two: a newer transaction then holds the lower position, so
    that no order of transaction numbers tells where a read may start."""
    post.sql(BARRIER)
    async with post.relay():
        with closing(post.connect(autocommit=True)) as guard:
            guard.execute("SELECT pg_advisory_lock(7)")
            await let_it_pass(post, 90, rounds=1)  # a sequence's first value brings a number too
            late = asyncio.create_task(post.put(note("k", 1)))
            await eventually_async(lambda: at_the_barrier(post) == [(None,)])
            await let_it_pass(post, 100)
            assert at_the_barrier(post) == [(None,)], "it has no transaction number still"
            guard.execute("SELECT pg_advisory_unlock(7)")
        await late
        await eventually_async(lambda: delivered(post, "k") == [1])
    assert numbers(post) == [90, *range(100, 112), 1]
    assert not post.of("lane.late")


def at_the_barrier(post: Post) -> list[tuple[Any, ...]]:
    """The transaction number of whoever has taken its position and waits."""
    return post.sql(
        "SELECT backend_xid FROM pg_stat_activity"
        " WHERE wait_event = 'advisory' AND datname = current_database()"
    )


@on_postgres
async def test_the_watermark_does_move(post: Post) -> None:
    # Or every read would scan all dead rows of the lane again.
    async with post.relay() as relay:
        await let_it_pass(post, 100)

        def moved() -> bool:
            assert relay._office is not None
            return relay._office.horizon.after(LANE) > 0

        await eventually_async(moved)


@on_postgres
async def test_the_rare_full_scan_finds_and_tells_what_should_not_exist(post: Post) -> None:
    async with post.relay(rescan_seconds=0.3) as relay:
        await let_it_pass(post, 100)
        await eventually_async(lambda: (office := relay._office) and office.horizon.after(LANE))
        post.sql(
            "INSERT INTO postroom.outbox OVERRIDING SYSTEM VALUE SELECT lane, position, id, topic,"
            " key, type, aggregate_type, aggregate_id, content_type, headers, payload, size,"
            " redrives, created_at FROM postroom.archive ORDER BY position LIMIT 1"
        )
        await eventually_async(lambda: len(post.broker.messages) == 13)
    assert post.of("lane.late")
