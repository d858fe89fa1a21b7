"""One transaction of an application on each kind of pool: a change, and the message it makes.

Each pool has room for a few connections, so that one that is lost to it is missed soon.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiosqlite
import asyncmy
import asyncpg
import psycopg_pool
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from doors import mysql_options, sqlalchemy_url
from postroom.messages import new_id
from postroom.outbox.publish import Outbox

SIZE = 2
OUTBOX = Outbox()
WISHES: dict[str, Any] = {"type": "fact", "topic": "facts", "key": "key"}


@dataclass(frozen=True)
class Pool:
    """What a test does with a pool."""

    write: Callable[[str], Awaitable[None]]  # a transaction with the business row and the message
    ask: Callable[[str], Awaitable[bool]]  # outbox.was_committed
    taken: Callable[[], int] = lambda: 0  # connections that somebody has and did not give back


Opener = Callable[[str], AbstractAsyncContextManager[Pool]]


@contextlib.asynccontextmanager
async def of_asyncpg(url: str) -> AsyncIterator[Pool]:
    async def write(id: str) -> None:
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute("INSERT INTO business (id, k, n) VALUES ($1, 'key', 0)", id)
            await OUTBOX.publish_async(connection, {"n": 0}, id=id, **WISHES)

    async def ask(id: str) -> bool:
        async with pool.acquire() as connection:
            return await OUTBOX.was_committed_async(connection, id)

    async with asyncpg.create_pool(url, min_size=1, max_size=SIZE) as pool:
        yield Pool(write, ask, lambda: pool.get_size() - pool.get_idle_size())


@contextlib.asynccontextmanager
async def of_psycopg(url: str) -> AsyncIterator[Pool]:
    async def write(id: str) -> None:
        async with pool.connection() as connection:
            await connection.execute("INSERT INTO business (id, k, n) VALUES (%s, 'key', 0)", [id])
            await OUTBOX.publish_async(connection, {"n": 0}, id=id, **WISHES)

    async def ask(id: str) -> bool:
        async with pool.connection() as connection:
            return await OUTBOX.was_committed_async(connection, id)

    def taken() -> int:
        stats = pool.get_stats()
        return stats["pool_size"] - stats["pool_available"]

    async with psycopg_pool.AsyncConnectionPool(url, min_size=1, max_size=SIZE, open=False) as pool:
        yield Pool(write, ask, taken)


@contextlib.asynccontextmanager
async def of_asyncmy(url: str) -> AsyncIterator[Pool]:
    async def write(id: str) -> None:
        async with pool.acquire() as connection:
            await connection.begin()
            async with connection.cursor() as cursor:
                await cursor.execute("INSERT INTO business (id, k, n) VALUES (%s, 'key', 0)", [id])
            await OUTBOX.publish_async(connection, {"n": 0}, id=id, **WISHES)
            await connection.commit()

    async def ask(id: str) -> bool:
        async with pool.acquire() as connection:
            return await OUTBOX.was_committed_async(connection, id)

    async with asyncmy.create_pool(**mysql_options(url), minsize=1, maxsize=SIZE) as pool:
        yield Pool(write, ask, lambda: pool.size - pool.freesize)


@contextlib.asynccontextmanager
async def of_aiosqlite(url: str) -> AsyncIterator[Pool]:
    """It has no pool of its own: each user opens the file."""
    path = url.removeprefix("sqlite:///")

    async def write(id: str) -> None:
        async with aiosqlite.connect(path, timeout=10) as connection:
            await connection.execute("INSERT INTO business (id, k, n) VALUES (?, 'key', 0)", [id])
            await OUTBOX.publish_async(connection, {"n": 0}, id=id, **WISHES)
            await connection.commit()

    async def ask(id: str) -> bool:
        async with aiosqlite.connect(path, timeout=10) as connection:
            return await OUTBOX.was_committed_async(connection, id)

    yield Pool(write, ask)


def of_session(driver: str) -> Opener:
    """SQLAlchemy's pool. One message is written at once, another is queued until the commit."""

    @contextlib.asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Pool]:
        engine = create_async_engine(sqlalchemy_url(url, driver), pool_size=SIZE, max_overflow=0)
        change = text("INSERT INTO business (id, k, n) VALUES (:id, 'key', 0)")

        async def write(id: str) -> None:
            later = new_id()
            async with AsyncSession(engine) as session, session.begin():
                # One by one: after a cancelled executemany SQLAlchemy leaves a connection of
                # aiosqlite, and its lock, to the garbage collector.
                await session.execute(change, {"id": id})
                await session.execute(change, {"id": later})
                await OUTBOX.publish_async(session, {"n": 0}, id=id, **WISHES)
                OUTBOX.publish(session, {"n": 0}, id=later, **WISHES)

        async def ask(id: str) -> bool:
            async with AsyncSession(engine) as session:
                return await OUTBOX.was_committed_async(session, id)

        yield Pool(write, ask, lambda: engine.pool.checkedout())  # type: ignore[attr-defined]
        await engine.dispose()

    return opened


POOLS: dict[str, tuple[str, Opener]] = {
    "asyncpg": ("postgresql", of_asyncpg),
    "psycopg": ("postgresql", of_psycopg),
    "asyncmy": ("mariadb", of_asyncmy),
    "aiosqlite": ("sqlite", of_aiosqlite),
    "session-asyncpg": ("postgresql", of_session("asyncpg")),
    "session-psycopg": ("postgresql", of_session("psycopg")),
    "session-asyncmy": ("mariadb", of_session("asyncmy")),
    "session-aiosqlite": ("sqlite", of_session("aiosqlite")),
}
