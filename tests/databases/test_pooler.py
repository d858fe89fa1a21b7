"""Connections of ours through PgBouncer: it is noticed, nothing is left on its servers, and what we
rely on is in every transaction."""

import asyncio
import uuid
from collections.abc import Iterator

import pytest

from pooled import UNTOUCHED, connect, servers, stirred
from postroom.databases import migrate
from postroom.databases.database import Database, DatabaseLost
from postroom.databases.pooling import pooling
from postroom.databases.urls import resolve
from postroom.errors import ConfigurationError, PostroomError, Unreachable
from postroom.flow import Flow, Statement
from servers import PgBouncerServer, PostgresServer

DRIVERS = ("asyncpg", "psycopg")
each_driver = pytest.mark.parametrize("driver", DRIVERS)
OUTBOX, DATABASES = "postroom.outbox", "postroom.databases"


def by(driver: str, url: str) -> str:
    return url.replace("postgresql:", f"postgresql+{driver}:")


@pytest.fixture
def direct(postgres: PostgresServer) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


@pytest.fixture
def pooled(pgbouncer: PgBouncerServer, direct: str) -> str:
    return pgbouncer.through(direct)


@pytest.fixture
def session_pooler(postgres: PostgresServer) -> Iterator[PgBouncerServer]:
    with PgBouncerServer(postgres, mode="session", pool_size=3) as server:
        yield server


# ── Who is there? ──────────────────────────────────────────────────────────────────────────────


@each_driver
async def test_a_connection_knows_whether_it_is_pooled(
    direct: str, pooled: str, driver: str
) -> None:
    for url, expected in ((direct, False), (pooled, True)):
        link = await Database(by(driver, url)).connect()
        assert link.pooled is expected
        await link.close()


@each_driver
async def test_the_mode_of_a_pooler_is_seen(
    direct: str, pooled: str, session_pooler: PgBouncerServer, driver: str
) -> None:
    assert await pooling(Database(by(driver, direct))) == "none"
    assert await pooling(Database(by(driver, pooled))) == "transaction"
    session = Database(by(driver, session_pooler.through(direct)))
    assert await pooling(session) == "session"


async def test_the_mode_is_seen_while_others_work(pooled: str) -> None:
    with stirred(pooled):
        for _ in range(5):
            assert await pooling(Database(pooled)) == "transaction"


async def test_a_pooler_without_a_second_server_keeps_its_mode_to_itself(
    postgres: PostgresServer, direct: str
) -> None:
    with PgBouncerServer(postgres, mode="session", pool_size=1) as tight:
        database = Database(tight.through(direct), timeout_seconds=1)
        assert await pooling(database) == "unknown"


async def test_a_url_may_say_so(direct: str) -> None:
    assert resolve(f"{direct}?pgbouncer=true").pooled
    assert not resolve(f"{direct}?pgbouncer=false").pooled
    link = await Database(f"{direct}?pgbouncer=true").connect()
    assert link.pooled
    assert await link.query(DATABASES, "backend")
    await link.close()


@each_driver
async def test_statement_mode_is_refused_in_one_sentence(
    postgres: PostgresServer, direct: str, driver: str
) -> None:
    with PgBouncerServer(postgres, mode="statement") as server:
        database = Database(by(driver, server.through(direct)))
        link = await database.connect()
        with pytest.raises(DatabaseLost) as lost:
            await link.query(DATABASES, "backend")
        error = database.explain(lost.value)
    assert isinstance(error, ConfigurationError)
    assert "pool_mode = transaction" in str(error)


@each_driver
async def test_a_pooler_without_its_server_says_so(pgbouncer: PgBouncerServer, driver: str) -> None:
    nowhere = pgbouncer.through("postgresql://postgres@x/there_is_none")
    with pytest.raises(PostroomError) as refused:
        await Database(by(driver, nowhere), timeout_seconds=5).connect()
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ConfigurationError | Unreachable)


@each_driver
async def test_an_option_that_a_pooler_refuses_is_named(pooled: str, driver: str) -> None:
    with pytest.raises(ConfigurationError, match=r"refuses an option .*options"):
        await Database(by(driver, f"{pooled}?options=-c%20jit%3Doff")).connect()


@each_driver
async def test_a_pooler_that_is_full_says_so(
    postgres: PostgresServer, direct: str, driver: str
) -> None:
    with PgBouncerServer(postgres, pool_size=1) as tight, connect(tight.through(direct)) as client:
        client.execute("SELECT 1")  # and keeps the one server
        with pytest.raises(Unreachable) as refused:
            await Database(by(driver, tight.through(direct)), timeout_seconds=1).connect()
    assert "did not answer in time" in str(refused.value)


# ── What is in every transaction, and nowhere else ─────────────────────────────────────────────


@each_driver
async def test_transactions_bring_their_settings_and_leave_none(pooled: str, driver: str) -> None:
    await migrate.install(by(driver, pooled))
    with stirred(pooled):
        links = [await Database(by(driver, pooled)).connect(idle_seconds=7) for _ in range(3)]
        for n in range(30):
            link = links[n % 3]
            await link.query(OUTBOX, "meta_write", item=f"n{n}", value=str(n))
            await link.query(OUTBOX, "lanes_state")
            await link.transact(_several(n))
        for link in links:
            await link.close()
    found = servers(pooled)
    assert len(found) > 3
    assert {tuple(each.items()) for each in found.values()} == {tuple(UNTOUCHED.items())}


def _several(n: int) -> Flow[None]:
    yield Statement(OUTBOX, "meta_write", {"item": "same", "value": str(n)})
    rows = yield Statement(OUTBOX, "meta_read", {"item": "same"})
    assert rows == [(str(n),)]


@each_driver
async def test_what_others_leave_on_a_server_does_not_matter(
    pooled: str, direct: str, driver: str
) -> None:
    await migrate.install(direct)
    with stirred(pooled, leak=True):
        link = await Database(by(driver, pooled)).connect()
        levels = set()
        for _ in range(40):

            def look() -> Flow[str]:
                ((level,),) = yield Statement("link_room", "level")
                return str(level)

            levels.add(await link.transact(look()))
        await link.close()
    assert levels == {"read committed"}


@each_driver
async def test_a_transaction_that_stands_still_is_ended(
    pooled: str, direct: str, driver: str
) -> None:
    """Or a frozen relay would keep its lanes from everybody."""
    await migrate.install(direct)
    link = await Database(by(driver, pooled)).connect(idle_seconds=0.5)
    freed = []

    def freeze() -> Flow[None]:
        yield Statement(OUTBOX, "lanes_lock_free", {"lane_list": [1], "owner": "me"})
        with connect(direct) as other:
            other.execute("SET lock_timeout = '5s'")
            other.execute("UPDATE postroom.lane SET epoch = epoch + 1 WHERE lane = 1")
            freed.append(True)
        yield Statement(OUTBOX, "lanes_state")

    with pytest.raises(DatabaseLost):
        await link.transact(freeze())
    assert freed
    assert link.lost


@each_driver
async def test_another_server_behind_the_pooler_ends_the_connection(
    postgres: PostgresServer, pgbouncer: PgBouncerServer, pooled: str, driver: str
) -> None:
    """The pooler goes over to it without a word, and what we remember would be void."""
    postgres.require_private()
    pgbouncer.require_private()
    database = Database(by(driver, pooled))
    link = await database.connect()
    await link.query(DATABASES, "backend")
    postgres.stop()
    postgres.start()
    with pytest.raises(DatabaseLost) as lost:
        await link.query(DATABASES, "backend")
    assert "another server" in str(database.explain(lost.value))
    again = await database.connect()
    await again.query(DATABASES, "backend")
    await again.close()


# ── The schema ─────────────────────────────────────────────────────────────────────────────────


@each_driver
async def test_the_schema_is_managed_through_the_pooler(pooled: str, driver: str) -> None:
    url = by(driver, pooled)
    with stirred(pooled, clients=8, pause_seconds=0):
        changes = await asyncio.gather(*(migrate.install(url) for _ in range(4)))
        assert {change.after for change in changes} == {await migrate.version(url)}
        for _ in range(3):
            assert await migrate.check(url) == []
        assert (await migrate.downgrade(url, 0)).after == 0
        await migrate.install(url)
    assert {each["prepared"] for each in servers(pooled).values()} == {0}
