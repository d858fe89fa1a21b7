"""Publishing and relaying through PgBouncer in transaction mode: the promises are the same."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from relaying import Post, by_key, first_by_key, make_post, note, told
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from helpers import eventually_async
from pooled import UNTOUCHED, connect, servers, stirred
from postroom import Draft, Outbox
from postroom.brokers.base import Transient
from postroom.errors import ConfigurationError
from postroom.messages import lane_of
from postroom.outbox.notify import Notifier
from postroom.outbox.relay import Relay
from servers import PgBouncerServer, PostgresServer

each_driver = pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])


class PooledPost(Post):
    """Everything goes through the pooler, also what the test itself publishes and looks at."""

    direct: str

    def connect(self, *, autocommit: bool = False) -> Any:
        return connect(self.url, autocommit=autocommit)

    def by(self, driver: str, **how: Any) -> Relay:
        url, self.url = self.url, self.url.replace("postgresql:", f"postgresql+{driver}:")
        try:
            return self.relay(**how)
        finally:
            self.url = url


@pytest.fixture
def post(postgres: PostgresServer, pgbouncer: PgBouncerServer) -> Iterator[PooledPost]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    direct = postgres.create_database(name)
    for made in make_post(pgbouncer.through(direct)):
        pooled = PooledPost(made.url, made.broker, heard=made.heard)
        pooled.direct = direct
        yield pooled
        pooled.forget_look()
    postgres.drop_database(name)


# ── Publishing ─────────────────────────────────────────────────────────────────────────────────

# What an application must say to its driver, as docs/pgbouncer.md has it.
UNPREPARED = {"statement_cache_size": 0, "prepared_statement_cache_size": 0}

Write = Callable[[Any], Any]
outbox = Outbox()


@asynccontextmanager
async def by_asyncpg(url: str) -> AsyncIterator[Callable[[list[Draft], bool], Any]]:
    connection = await asyncpg.connect(url, statement_cache_size=0)

    async def publish(drafts: list[Draft], commit: bool) -> None:
        transaction = connection.transaction()
        await transaction.start()
        await outbox.publish_many_async(connection, drafts, serialize_key=True)
        await (transaction.commit() if commit else transaction.rollback())

    yield publish
    await connection.close()


@asynccontextmanager
async def by_asyncpg_pool(url: str) -> AsyncIterator[Callable[[list[Draft], bool], Any]]:
    async with asyncpg.create_pool(url, min_size=1, max_size=2, statement_cache_size=0) as pool:

        async def publish(drafts: list[Draft], commit: bool) -> None:
            async with pool.acquire() as connection:
                transaction = connection.transaction()
                await transaction.start()
                for draft in drafts:
                    await outbox.publish_many_async(connection, [draft], serialize_key=True)
                await (transaction.commit() if commit else transaction.rollback())

        yield publish


@asynccontextmanager
async def by_psycopg(url: str) -> AsyncIterator[Callable[[list[Draft], bool], Any]]:
    with closing(psycopg.connect(url, prepare_threshold=None)) as connection:

        async def publish(drafts: list[Draft], commit: bool) -> None:
            outbox.publish_many(connection, drafts, serialize_key=True)
            (connection.commit if commit else connection.rollback)()

        yield publish


@asynccontextmanager
async def by_async_psycopg(url: str) -> AsyncIterator[Callable[[list[Draft], bool], Any]]:
    connection = await psycopg.AsyncConnection.connect(url, prepare_threshold=None)

    async def publish(drafts: list[Draft], commit: bool) -> None:
        await outbox.publish_many_async(connection, drafts, serialize_key=True)
        await (connection.commit() if commit else connection.rollback())

    yield publish
    await connection.close()


def by_session(driver: str, **connect_args: Any) -> Any:
    @asynccontextmanager
    async def opener(url: str) -> AsyncIterator[Callable[[list[Draft], bool], Any]]:
        where = make_url(url).set(drivername=f"postgresql+{driver}")
        engine = create_engine(where, poolclass=NullPool, connect_args=connect_args)
        with Session(engine) as session:

            async def publish(drafts: list[Draft], commit: bool) -> None:
                outbox.publish_many(session, drafts, serialize_key=True)
                (session.commit if commit else session.rollback)()

            yield publish
        engine.dispose()

    return opener


def by_async_session(driver: str, **connect_args: Any) -> Any:
    @asynccontextmanager
    async def opener(url: str) -> AsyncIterator[Callable[[list[Draft], bool], Any]]:
        where = make_url(url).set(drivername=f"postgresql+{driver}")
        engine = create_async_engine(where, poolclass=NullPool, connect_args=connect_args)
        async with AsyncSession(engine) as session:

            async def publish(drafts: list[Draft], commit: bool) -> None:
                outbox.publish_many(session, drafts, serialize_key=True)
                await (session.commit() if commit else session.rollback())

            yield publish
        await engine.dispose()

    return opener


WAYS = {
    "asyncpg": by_asyncpg,
    "asyncpg pool": by_asyncpg_pool,
    "psycopg": by_psycopg,
    "psycopg async": by_async_psycopg,
    "Session psycopg2": by_session("psycopg2"),
    "Session psycopg": by_session("psycopg", prepare_threshold=None),
    "AsyncSession asyncpg": by_async_session("asyncpg", **UNPREPARED),
    "AsyncSession psycopg": by_async_session("psycopg", prepare_threshold=None),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("notify", [False, True], ids=["polled", "notified"])
async def test_what_is_published_through_the_pooler_arrives(
    post: PooledPost, way: str, notify: bool
) -> None:
    if notify:
        notifier = Notifier(post.url)
    with stirred(post.url, clients=3):
        async with WAYS[way](post.url) as first, WAYS[way](post.url) as second:
            for n in range(12):
                await first([note("a", 2 * n), note("a", 2 * n + 1)], True)
                await second([note("b", n), note("x", 99)], False)
                await second([note("b", n), note("c", n, dedup_key=f"c{n}")], True)
                if notify:
                    notifier.hint()
        await post.relay().drain_once()
    assert by_key(post.broker.messages) == {
        "a": list(range(24)),
        "b": list(range(12)),
        "c": list(range(12)),
    }
    assert {each["prepared"] for each in servers(post.url).values()} == {0}


async def test_serialize_key_makes_writers_take_turns_through_the_pooler(post: PooledPost) -> None:
    done: list[str] = []

    def second() -> None:
        with closing(post.connect()) as tx:
            post.outbox.publish_many(tx, [note("k", 2)], serialize_key=True)
            done.append("second")
            tx.commit()

    with closing(post.connect()) as tx:
        post.outbox.publish_many(tx, [note("k", 1)], serialize_key=True)
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        done.append("first")
        tx.commit()
    thread.join()
    assert done == ["first", "second"]
    await post.relay().drain_once()
    assert told(post.broker.messages) == [("k", 1), ("k", 2)]


# ── Relaying ───────────────────────────────────────────────────────────────────────────────────


@each_driver
async def test_a_relay_leaves_nothing_on_the_servers(post: PooledPost, driver: str) -> None:
    post.broker.fail(lambda m: m.key == "k3", Transient("busy", "not now"), times=2)
    with stirred(post.url, leak=True):
        async with post.by(driver):
            for n in range(20):
                await post.put(*(note(f"k{key}", n) for key in range(10)))
            await eventually_async(post.empty, 30)
    assert by_key(post.broker.messages) == {f"k{key}": list(range(20)) for key in range(10)}
    assert not post.of("database.lost")
    assert not post.of("lane.lost")
    left = {(each["prepared"], each["listening"], each["seqscan"], each["idle"])
            for each in servers(post.url).values()}  # fmt: skip
    assert left == {(0, 0, UNTOUCHED["seqscan"], UNTOUCHED["idle"])}


LANE = lane_of("orders", "k", "")
NEIGHBOURS = [f"n{n}" for n in range(400) if lane_of("orders", f"n{n}", "") == LANE]


@each_driver
async def test_a_late_committer_behind_the_pooler_is_neither_lost_nor_passed(
    post: PooledPost, driver: str
) -> None:
    """The relay's looks and the publisher's transaction share servers, one after the other."""
    with stirred(post.url):
        async with post.by(driver) as relay:
            for n in range(0, 8, 2):
                with closing(post.connect()) as late:
                    post.outbox.publish_many(late, [note("k", n)])
                    for m in range(6):
                        await post.put(note(NEIGHBOURS[m], 1000 + 10 * n + m))
                        number = 1000 + 10 * n + m
                        await eventually_async(
                            lambda number=number: number in
                            [each for _, each in told(post.broker.messages)]
                        )  # fmt: skip
                    late.commit()
                await post.put(note("k", n + 1))
            await eventually_async(post.empty)
            await eventually_async(lambda: relay._office and relay._office.horizon.after(LANE) > 0)
    assert [number for key, number in told(post.broker.messages) if key == "k"] == list(range(8))
    assert not post.of("lane.late")


@each_driver
async def test_it_polls_and_says_so_once(post: PooledPost, driver: str) -> None:
    async with post.by(driver) as relay:
        await eventually_async(lambda: post.of("notify.pooled"))
        (said,) = post.of("notify.pooled")
        assert said["pooling"] == "transaction"
        assert "notify_url" in said["advice"]
        # A new life of the relay does not say it again.
        assert relay._office is not None
        await relay._office._control.close()
        await eventually_async(lambda: post.of("database.back"))
        await asyncio.sleep(0.5)
        await post.put(note("k", 1))
        await eventually_async(lambda: len(post.broker.messages) == 1)
    assert len(post.of("notify.pooled")) == 1
    assert not post.of("notify.lost")


@each_driver
async def test_a_direct_url_to_listen_on_wakes_it(post: PooledPost, driver: str) -> None:
    rarely = {"poll_max_seconds": 60.0, "poll_min_seconds": 60.0}
    url = post.direct.replace("postgresql:", f"postgresql+{driver}:")
    notifier = Notifier(post.url)  # hints pass the pooler
    async with post.by(driver, notify_url=url, **rarely) as relay:

        def listening() -> bool:
            rows = post.sql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND query LIKE 'LISTEN%'"
            )
            return rows == [(1,)]

        await eventually_async(listening)
        await eventually_async(lambda: relay._office and len(relay._office.pulse._waiters) == 16)
        await post.put(note("k", 1))
        await asyncio.sleep(0.3)
        assert post.broker.messages == []
        notifier.hint()
        await eventually_async(lambda: len(post.broker.messages) == 1)
    assert not post.of("notify.pooled")


def test_the_url_to_listen_on_must_be_postgresql(post: PooledPost, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="notify_url needs PostgreSQL"):
        post.relay(notify_url=f"sqlite:///{tmp_path / 'x.db'}")


async def test_it_listens_through_a_pooler_in_session_mode(
    post: PooledPost, postgres: PostgresServer
) -> None:
    with PgBouncerServer(postgres, mode="session", pool_size=20) as session:
        notifier = Notifier(post.direct)
        rarely = {"poll_max_seconds": 60.0, "poll_min_seconds": 60.0}
        async with post.relay(notify_url=session.through(post.direct), **rarely) as relay:
            await eventually_async(
                lambda: relay._office and len(relay._office.pulse._waiters) == 16
            )
            await post.put(note("k", 1))

            def woken() -> bool:
                notifier.hint()
                return len(post.broker.messages) == 1

            await eventually_async(woken)
    assert not post.of("notify.pooled")


def test_the_commands_work_through_the_pooler(
    postgres: PostgresServer, pgbouncer: PgBouncerServer, tmp_path: Path
) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    url = pgbouncer.through(postgres.create_database(name))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    environ |= {"POSTROOM_DATABASE_URL": url, "POSTROOM_BROKER_URL": "stdout://"}

    def postroom(*arguments: str) -> str:
        done = subprocess.run(
            [Path(sys.executable).parent / "postroom", *arguments],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    with stirred(url):
        assert "installed" in postroom("db", "install")
        assert "everything is there" in postroom("db", "check")
        with closing(connect(url)) as tx:
            (published,) = outbox.publish_many(tx, [note("k", 1)])
            tx.commit()
        assert json.loads(postroom("status", "--json"))["pending"] == 1
        assert "1 delivered" in postroom("relay", "--once")
        assert "succeeded" in postroom("messages", "show", published.id)
        postroom("db", "downgrade", "--to", "0")
    postgres.drop_database(name)


# ── When the pooler dies ───────────────────────────────────────────────────────────────────────


class Writer(threading.Thread):
    """Publishes numbers on one key, each until it is committed, whatever the pooler does."""

    def __init__(self, post: PooledPost, key: str, count: int) -> None:
        super().__init__(daemon=True)
        self.post, self.key, self.count = post, key, count
        self.failures = 0

    def run(self) -> None:
        tx: Any = None
        for n in range(self.count):
            id = str(uuid.uuid4())
            while True:
                try:
                    tx = tx or self.post.connect()
                    if self.failures and self.post.outbox.was_committed(tx, id):
                        break
                    self.post.outbox.publish_many(tx, [note(self.key, n, id=id)])
                    tx.commit()
                    break
                except psycopg.Error:
                    self.failures += 1
                    tx = None
                    time.sleep(0.05)
            time.sleep(0.002)


@each_driver
async def test_a_killed_pooler_loses_nothing_and_keeps_order(
    post: PooledPost, pgbouncer: PgBouncerServer, driver: str
) -> None:
    pgbouncer.require_private()
    writers = [Writer(post, f"w{n}", 120) for n in range(4)]
    async with post.by(driver):
        for writer in writers:
            writer.start()
        for _ in range(3):
            count = len(post.broker.messages)
            await eventually_async(lambda count=count: len(post.broker.messages) > count + 20, 30)
            post.forget_look()
            await asyncio.to_thread(pgbouncer.kill)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(pgbouncer.start)
        for writer in writers:
            await asyncio.to_thread(writer.join, 60)
        await eventually_async(post.empty, 30)
    assert first_by_key(post.broker.messages) == {f"w{n}": list(range(120)) for n in range(4)}
    assert post.of("database.lost")
    assert any(writer.failures for writer in writers)
