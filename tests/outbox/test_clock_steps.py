"""The database's clock steps: a lease is over one lease after it was written, as its taker sees it.

A clock that went back by an hour is a lease that ends an hour later, so most tests rewrite its end;
on PostgreSQL the clock itself is replaced.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from relaying import Post, note, on_postgres, several_writers

from helpers import eventually_async
from postroom.databases.database import Database, WorkerLink
from postroom.idempotency import Name, store
from postroom.idempotency.rules import Doubtful, Mine, Running
from postroom.inbox.store import Store as InboxStore
from postroom.ops.jobs import jobs

pytest_plugins = ("relay_fixtures",)

SHORT = {"lease_seconds": 3.5}
LATER = {
    "postgresql": "clock_timestamp() + interval '1 hour'",
    "mariadb": "UTC_TIMESTAMP(6) + INTERVAL 1 HOUR",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER) + 3600000000",
}


@asynccontextmanager
async def connected(post: Post) -> AsyncIterator[WorkerLink]:
    link = await Database(post.url).connect()
    try:
        yield link
    finally:
        await link.close()


def owned_by(post: Post, owner: str) -> Callable[[], bool]:
    return lambda: set(post.owners().values()) == {owner}


@pytest.mark.parametrize("length", [200_000, None], ids=["known", "of an earlier version"])
async def test_a_dead_relays_lanes_are_free(post: Post, length: int | None) -> None:
    """One lease after the clock went back."""
    post.sql(f"UPDATE {{p}}lane SET owner = 'dead', epoch = 7, lease_until = {LATER[post.dialect]}")
    post.sql("UPDATE {p}lane SET lease_us = %s", length)
    post.publish(note("k", 1))
    begun = time.monotonic()
    async with post.relay(**SHORT) as relay:
        await eventually_async(owned_by(post, relay.owner))
        if length is None:
            assert time.monotonic() - begun > 2, "a whole lease, as this relay has it"
        await eventually_async(post.empty)


async def test_a_drain_finds_them_free_too(post: Post) -> None:
    post.sql(
        f"UPDATE {{p}}lane SET owner = 'dead', lease_until = {LATER[post.dialect]}, lease_us = 1"
    )
    post.publish(note("k", 1))
    relay = post.relay(**SHORT)

    async def drained() -> bool:
        return (await relay.drain_once()).delivered == 1

    await eventually_async(drained)


@several_writers
async def test_relays_that_live_keep_their_lanes_when_the_clock_goes_back(post: Post) -> None:
    async with post.relay(**SHORT) as one, post.relay(**SHORT) as other:

        def shared() -> bool:
            owners = list(post.owners().values())
            return owners.count(one.owner) == owners.count(other.owner) == 8

        await eventually_async(shared)
        await post.change(f"UPDATE {{p}}lane SET lease_until = {LATER[post.dialect]}")
        soon = "lease_until < " + LATER[post.dialect].replace("1 hour", "1 minute").replace(
            "1 HOUR", "1 MINUTE"
        )
        await eventually_async(
            lambda: post.sql(f"SELECT count(*) FROM {{p}}lane WHERE {soon}") == [(16,)]
        )
        await asyncio.sleep(SHORT["lease_seconds"])
        assert shared()
    assert not post.of("lane.lost")


@on_postgres
async def test_a_clock_that_really_steps(post: Post) -> None:
    """An hour ahead while a relay takes its lanes, and back when it is gone."""
    ((name,),) = post.sql("SELECT current_database()")
    post.sql("CREATE SCHEMA fake")
    post.sql("CREATE TABLE fake.step AS SELECT interval '1 hour' AS ahead")
    for clock in ("clock_timestamp", "statement_timestamp"):
        post.sql(
            f"CREATE FUNCTION fake.{clock}() RETURNS timestamptz LANGUAGE sql STABLE AS"
            f" $$ SELECT pg_catalog.{clock}() + ahead FROM fake.step $$"
        )
    post.sql(f"ALTER DATABASE {name} SET search_path = fake, pg_catalog, public")
    dying = post.relay(**SHORT)
    running = asyncio.create_task(dying.run())
    await eventually_async(owned_by(post, dying.owner))
    assert post.sql(
        "SELECT count(*) FROM {p}lane WHERE lease_until > now() + interval '59 minutes'"
    ) == [(16,)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    post.sql("UPDATE fake.step SET ahead = interval '0'")
    async with post.relay(**SHORT) as heir:
        await eventually_async(owned_by(post, heir.owner))


# ── Idempotency keys ───────────────────────────────────────────────────────────────────────────


async def claim(post: Post, key: str, mode: Any = "external") -> Any:
    name = Name("shared", "pay", key)
    async with connected(post) as link:
        return await link.transact(
            store.claim(name, "f" * 64, mode, keep_seconds=600, lease_seconds=60)
        )


def step_back(post: Post, lease_us: int | None) -> None:
    post.sql(f"UPDATE {{p}}idempotency_key SET locked_until = {LATER[post.dialect]}")
    post.sql("UPDATE {p}idempotency_key SET lease_us = %s", lease_us)


async def test_whoever_waits_for_a_key_waits_for_one_lease(post: Post) -> None:
    assert isinstance(await claim(post, "k"), Mine)
    for length in (51_000_000, None):
        step_back(post, length)
        told = await claim(post, "k")
        assert isinstance(told, Running)
        assert told.retry_after_seconds <= 51
    post.sql("UPDATE {p}idempotency_key SET lease_us = 7200000000")
    post.sql(f"UPDATE {{p}}idempotency_key SET locked_until = {LATER[post.dialect]}")
    told = await claim(post, "k")
    assert isinstance(told, Running)
    assert told.retry_after_seconds > 3000, "the lease of its owner is that long"


async def test_a_key_whose_owner_died_is_in_doubt_after_one_lease(post: Post) -> None:
    """Not before: an owner that lives has its whole lease to renew it."""
    await claim(post, "k")
    step_back(post, 300_000)
    assert isinstance(await claim(post, "k"), Running)

    async def doubted() -> bool:
        return isinstance(await claim(post, "k"), Doubtful)

    await eventually_async(doubted)


@pytest.mark.parametrize("mode", ["external", "resume"])
async def test_a_worker_finds_requests_of_lost_processes(post: Post, mode: str) -> None:
    await claim(post, "k", mode)
    step_back(post, 300_000)
    async with connected(post) as link:

        async def found() -> bool:
            swept = await link.transact(store.sweep(10))
            return bool(swept or await link.transact(store.orphans(["pay"], 10)))

        assert not await found()
        await eventually_async(found)


# ── Consumers and jobs ─────────────────────────────────────────────────────────────────────────


async def test_a_retry_of_a_dead_consumer_is_due(post: Post) -> None:
    inbox = InboxStore("c", "me", stuck_seconds=5, holds_key=True)
    for number, wait in enumerate(("NULL", "300000")):
        post.sql(
            "INSERT INTO {p}inbox_held (consumer, message_id, topic, type, content_type, payload,"
            f" size, next_attempt_at, lease_us) VALUES ('c', 'm{number}', 't', 'x', 'x', %s, 1,"
            f" {LATER[post.dialect]}, {wait})",
            b"1",
        )

    async with connected(post) as link:

        async def due() -> list[str]:
            await link.query("postroom.inbox", "lease_cap", consumer="c")
            return [letter.record for letter in await link.transact(inbox.lease_due(10))]

        assert await due() == []
        assert await eventually_async(due) == ["m1"], "a retry that waits for its time stays"
    assert post.sql("SELECT lease_us FROM {p}inbox_held WHERE message_id = 'm1'") == [(30_000_000,)]


async def test_a_job_of_a_dead_process_may_be_resumed(post: Post) -> None:
    wish = json.dumps({"rate": 1})
    job = "INSERT INTO {p}job (id, kind, state, wish, total, who, owner, lease_until, lease_us)"
    for number, length in enumerate((30_000_000, 7_200_000_000)):
        post.sql(
            f"{job} VALUES ('01a1ec85-4249-7034-9184-5f6570540b2{number}', 'redrive', 'running',"
            f" '{wish}', 1, 'me', 'dead', {LATER[post.dialect]}, {length})"
        )
    assert sorted(each.idle for each in await jobs(post.url)) == [False, True]
