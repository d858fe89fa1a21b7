"""A COMMIT whose answer is lost, and work that is cancelled: the change and its message share one
fate, whoever asks is told the truth, and nobody inherits an open transaction."""

import asyncio
import itertools
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import closing
from typing import Any

import psycopg
import pymysql
import pytest
from relaying import Post, note, several_writers
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from helpers import eventually_async
from postroom.messages import new_id
from proxy import ChaosProxy

pytest_plugins = ("relay_fixtures",)

ROUNDS = 12
LOST = (psycopg.OperationalError, pymysql.err.Error)


@pytest.fixture(autouse=True)
def _thing(post: Post) -> None:
    post.sql("CREATE TABLE thing (n INT)")


def write(post: Post, tx: Any, number: int, id: str) -> None:
    post._execute(tx, "INSERT INTO thing VALUES (%s)", (number,))
    post.outbox.publish_many(tx, [note("k", number, id=id)])


@several_writers
async def test_a_lost_answer_to_a_commit_is_resolved_by_asking(post: Post) -> None:
    """An application that asks `was_committed` and repeats only what was not."""
    truths = []
    with ChaosProxy(post.url) as proxy:
        far = Post(proxy.url, post.broker)
        for number in range(ROUNDS):
            id = new_id()
            tx = far.connect()
            write(far, tx, number, id)
            loses_answer = number % 3 == 1
            if loses_answer:
                proxy.lose_reply(to=b"COMMIT")
            elif number % 3 == 2:
                proxy.cut()  # before the COMMIT was said
            if number % 3 == 0:
                tx.commit()
                tx.close()
                continue
            with pytest.raises(LOST):
                tx.commit()
            with closing(post.connect(autocommit=True)) as fresh:
                truths.append(post.outbox.was_committed(fresh, id))
            assert truths[-1] == loses_answer
            if not truths[-1]:
                with closing(post.connect()) as again:
                    write(post, again, number, id)
                    again.commit()
    await post.relay().drain_once()
    assert [int(message.payload) for message in post.broker.messages] == list(range(ROUNDS))
    assert post.sql("SELECT n FROM thing ORDER BY n") == [(n,) for n in range(ROUNDS)]
    assert len(truths) == 2 * ROUNDS // 3


# ── Cancelled at every step ────────────────────────────────────────────────────────────────────

DRIVERS = {"postgresql": "asyncpg", "mariadb": "asyncmy", "sqlite": "aiosqlite"}


@pytest.fixture
async def engine(post: Post) -> AsyncIterator[AsyncEngine]:
    """With one connection: what the first user leaves behind, the next one finds."""
    url = make_url(post.url)
    url = url.set(drivername=f"{url.drivername}+{DRIVERS[post.dialect]}")
    engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=5)
    yield engine
    await engine.dispose()


@types.coroutine
def cancelled_at(
    step: int, work: Coroutine[Any, Any, None], reached: list[int]
) -> Generator[Any, Any, None]:
    """Cancel the running task when `work` waits for the `step`-th time; note if it came there."""
    proceed = work.send
    value: Any = None
    for number in itertools.count(1):
        try:
            waits_for = proceed(value)
        except StopIteration:
            return
        if number == step:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            reached.append(step)
        try:
            value, proceed = (yield waits_for), work.send
        except BaseException as error:
            value, proceed = error, work.throw


async def place_order(engine: AsyncEngine, post: Post, number: int, *, at_once: bool) -> None:
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(text("INSERT INTO thing VALUES (:n)"), {"n": number})
        what = {"type": "note", "topic": "orders", "key": "k"}
        if at_once:
            await post.outbox.publish_async(session, number, **what)
        else:
            post.outbox.publish(session, number, **what)


@pytest.mark.parametrize("at_once", [True, False], ids=["written at once", "queued"])
async def test_cancelled_at_every_await_it_leaves_both_or_neither(
    post: Post, engine: AsyncEngine, at_once: bool
) -> None:
    reached: list[int] = []
    for step in itertools.count(1):
        # The next user has a connection that works; and each round begins with one, or those
        # that must connect first would come less far than the others.
        async with engine.connect() as next_user:
            assert (await next_user.execute(text("SELECT 1"))).scalar() == 1
        work = cancelled_at(step, place_order(engine, post, step, at_once=at_once), reached)
        task = asyncio.ensure_future(_awaited(work))
        await asyncio.wait([task])
        assert engine.pool.checkedout() == 0
        # MariaDB renews what it shows only for those who ask less than ten times a second.
        await eventually_async(lambda: open_transactions(post) == 0, interval=0.2)
        things = {n for (n,) in post.sql("SELECT n FROM thing")}
        assert set(post.numbers("outbox")) == things
        # A driver may swallow it, as when it closes a connection; then the work was done.
        assert task.cancelled() or step in things
        if step not in reached:
            break
    assert len(reached) >= 4, "at least a wait for each statement and the COMMIT"


async def _awaited(work: Any) -> None:
    await work


def open_transactions(post: Post) -> int:
    if post.dialect == "postgresql":
        rows = post.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
        )
    elif post.dialect == "mariadb":
        rows = post.sql("SELECT count(*) FROM information_schema.innodb_trx")
    else:
        post.sql("BEGIN IMMEDIATE")  # whoever holds the file's lock keeps this waiting
        post.sql("ROLLBACK")
        return 0
    return int(rows[0][0])
