"""aiosqlite with fewer trips to its thread: what it does is what aiosqlite does."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from postroom.databases.aiosqlite import connect
from postroom.databases.kinds import kind_of


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(
        f"sqlite+aiosqlite:///{tmp_path}/app.db", connect_args={"async_creator_fn": connect}
    )
    async with made.begin() as connection:
        await connection.execute(text("CREATE TABLE t (n INTEGER PRIMARY KEY)"))
    yield made
    await made.dispose()


def counted(driver: Any) -> list[str]:
    """The trips to the thread from now on."""
    trips: list[str] = []
    put = driver._tx

    class Counting:
        get = put.get

        def put_nowait(self, item: Any) -> None:
            trips.append("trip")
            put.put_nowait(item)

    driver._tx = Counting()
    return trips


async def test_a_statement_is_one_trip(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        await session.execute(text("INSERT INTO t VALUES (0)"))
        raw = await (await session.connection()).get_raw_connection()
        trips = counted(raw.driver_connection)
        for n in range(1, 11):
            await session.execute(text("INSERT INTO t VALUES (:n)"), {"n": n})
        assert len(trips) == 10
        assert await session.scalar(text("SELECT count(*) FROM t")) == 11
        assert len(trips) == 12  # what has rows is fetched too


async def test_a_failed_statement_is_told(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        await session.execute(text("INSERT INTO t VALUES (1)"))
        with pytest.raises(Exception, match="UNIQUE"):
            await session.execute(text("INSERT INTO t VALUES (1)"))
        with pytest.raises(Exception, match="no such table"):
            await session.execute(text("INSERT INTO nowhere VALUES (1)"))


async def test_a_cursor_that_was_closed_keeps_no_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    connection = await connect(path, isolation_level=None)
    await connection.execute("CREATE TABLE t (n INTEGER)")
    await connection.execute("INSERT INTO t VALUES (1), (2), (3)")
    cursor = await connection.cursor()
    await cursor.execute("SELECT n FROM t")
    assert await cursor.fetchone() == (1,)
    await cursor.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed cursor"):
        await cursor.fetchone()
    other = sqlite3.connect(path, timeout=0)
    other.execute("DROP TABLE t")  # nobody reads any more
    other.close()
    await connection.close()
    with pytest.raises(ValueError, match="no active connection"):
        await connection.cursor()


async def test_stopping_closes_cursors_first(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    connection = await connect(path, isolation_level=None)
    await connection.execute("CREATE TABLE t (n INTEGER)")
    await connection.execute("INSERT INTO t VALUES (1), (2)")
    async with connection.cursor() as cursor:
        await cursor.execute("SELECT n FROM t")
        await cursor.fetchone()
    stopped = connection.stop()
    assert stopped is not None
    await stopped
    other = sqlite3.connect(path, timeout=0)
    other.execute("DROP TABLE t")
    other.close()


async def test_it_is_known_as_what_it_is(tmp_path: Path) -> None:
    connection = await connect(str(tmp_path / "app.db"))
    assert kind_of(connection).name == "aiosqlite.Connection"
    await connection.close()
