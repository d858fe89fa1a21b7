"""Enqueued counts what was committed, never what was rolled back or failed to commit."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from relaying import Post, note
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from postroom import Outbox, signals
from postroom.databases.urls import resolve
from postroom.outbox import wake

pytest_plugins = ("relay_fixtures",)

outbox = Outbox()
FAILING_COMMITS = {
    "postgresql": (
        "CREATE TABLE deferred_fk (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)",
        "INSERT INTO deferred_fk VALUES (1), (1)",
    ),
    "sqlite": (
        "CREATE TABLE deferred_fk (n int PRIMARY KEY, "
        "m int REFERENCES deferred_fk (n) DEFERRABLE INITIALLY DEFERRED)",
        "INSERT INTO deferred_fk VALUES (1, 2)",
    ),
}


class Counted:
    """What was counted, in calls."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if name == "message.committed":
            self.counts.append(fields["count"])

    @property
    def total(self) -> int:
        return sum(self.counts)


@pytest.fixture
def counted() -> Iterator[Counted]:
    counted = Counted()
    stop = signals.listen(counted)
    yield counted
    stop()


@pytest.fixture
def engine(post: Post) -> Iterator[Engine]:
    driver = {"postgresql": "+psycopg", "mariadb": "+pymysql", "sqlite": ""}[post.dialect]
    scheme, _, rest = post.url.partition("://")
    engine = create_engine(f"{scheme.partition('+')[0]}{driver}://{rest}")
    if post.dialect == "sqlite":
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA foreign_keys = ON"))
    yield engine
    engine.dispose()


def put(tx: Connection | Session, number: int = 1, **wishes: Any) -> None:
    outbox.publish_many(tx, [note("k", n, **wishes) for n in range(number)])


def test_core_commits_count_and_rollbacks_do_not(engine: Engine, counted: Counted) -> None:
    with engine.begin() as connection:
        put(connection, 3)
        assert counted.counts == []
    assert counted.counts == [3]
    with engine.connect() as connection:
        put(connection)
        connection.rollback()
        connection.commit()
        put(connection, 2)
        connection.commit()
        connection.execute(text("SELECT 1"))  # the next step makes the commit certain
        assert counted.counts == [3, 2]
        put(connection)
    assert counted.counts == [3, 2]  # closing rolled the last one back


def test_core_savepoints_that_are_rolled_back_do_not_count(
    engine: Engine, counted: Counted
) -> None:
    with engine.begin() as connection:
        put(connection)
        with connection.begin_nested():
            put(connection, 10)
            inner = connection.begin_nested()
            put(connection, 100)
            inner.rollback()
        outer = connection.begin_nested()
        with connection.begin_nested():
            put(connection, 1000)
        outer.rollback()
    assert counted.counts == [11]


def test_sessions_count_once_at_their_commit(engine: Engine, counted: Counted) -> None:
    with Session(engine) as session:
        put(session)
        with session.begin_nested():
            put(session, 10)
        nested = session.begin_nested()
        put(session, 100)
        nested.rollback()
        session.commit()
        assert counted.counts == [11]
        put(session, 5)
        session.rollback()
        session.commit()
        with contextlib.suppress(ZeroDivisionError), session.begin():
            put(session, 7)
            _ = 1 // 0
    assert counted.counts == [11]


def test_a_session_inside_an_outer_transaction_counts_when_that_commits(
    engine: Engine, counted: Counted
) -> None:
    for end, expected in (("rollback", []), ("commit", [4])):
        with engine.connect() as connection:
            transaction = connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                put(session, 4)
                session.commit()
            assert counted.counts == []
            getattr(transaction, end)()
        assert counted.counts == expected


def test_duplicates_do_not_count(engine: Engine, counted: Counted) -> None:
    for _ in range(2):
        with engine.begin() as connection:
            outbox.publish(connection, 1, type="note", dedup_key="once")
    assert counted.counts == [1]


async def test_queued_messages_count_with_their_commit(post: Post, counted: Counted) -> None:
    target = resolve(post.url)
    engine = create_async_engine(target.url, connect_args=target.connect_args)
    async with AsyncSession(engine) as session:
        for n in range(3):
            outbox.publish(session, n, type="note")
        nested = await session.begin_nested()
        outbox.publish(session, 4, type="note")
        await nested.rollback()
        await session.commit()
        assert counted.counts == [3]
        outbox.publish(session, 4, type="note")
        await session.rollback()
    async with engine.begin() as connection:
        await outbox.publish_async(connection, 5, type="note")
    await engine.dispose()
    assert counted.counts == [3, 1]


@pytest.mark.parametrize("kind", [Connection, Session])
@pytest.mark.parametrize("database_url", ["postgresql", "sqlite"], indirect=True)
def test_a_commit_that_fails_does_not_count(
    post: Post, engine: Engine, counted: Counted, kind: type
) -> None:
    table, break_it = FAILING_COMMITS[post.dialect]
    post.sql(table)
    with engine.connect() as connection:
        tx: Any = connection if kind is Connection else Session(connection)
        put(tx)
        tx.execute(text(break_it))
        with pytest.raises(DBAPIError):
            tx.commit()
        tx.rollback()
        tx.close()
    assert counted.counts == []
    with engine.begin() as connection:
        put(connection, 2)
    assert counted.counts == [2]
    assert post.count("outbox") == 2


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_a_commit_on_a_connection_that_was_killed_does_not_count(
    post: Post, engine: Engine, counted: Counted
) -> None:
    own = {"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT connection_id()"}
    kill = {"postgresql": "SELECT pg_terminate_backend(%s)", "mariadb": "KILL %s"}
    with engine.connect() as connection:
        put(connection)
        number = connection.execute(text(own[post.dialect])).scalar_one()
        post.sql(kill[post.dialect], number)
        with pytest.raises(DBAPIError):
            connection.commit()
    assert counted.counts == []
    assert post.count("outbox") == 0


def test_two_phase_commits_count(post: Post, engine: Engine, counted: Counted) -> None:
    if post.dialect == "sqlite":
        return  # it has none
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        put(connection, 2)
        transaction.prepare()
        transaction.rollback()
        transaction = connection.begin_twophase()
        put(connection, 3)
        transaction.prepare()
        transaction.commit()
    assert counted.counts == [3]


def test_committed_counts_and_wakes_after_a_commit_of_ones_own(
    post: Post, counted: Counted
) -> None:
    hints: list[int] = []
    unlisten = wake.listen(lambda: hints.append(1))
    connection = post.connect()
    first = outbox.publish(connection, 1, type="note", dedup_key="once")
    again = outbox.publish(connection, 1, type="note", dedup_key="once")
    connection.commit()
    assert (counted.counts, hints) == ([], [])
    outbox.committed(first, again)
    unlisten()
    connection.close()
    assert (counted.counts, hints) == ([1], [1])


def test_threads_count_everything(engine: Engine, counted: Counted, post: Post) -> None:
    def work() -> None:
        for n in range(20):
            with engine.connect() as connection:
                put(connection)
                connection.commit() if n % 2 else connection.rollback()

    async def all_at_once() -> None:
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))

    asyncio.run(all_at_once())
    assert counted.total == 40 == post.count("outbox")
