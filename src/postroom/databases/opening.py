"""Opening one connection of our own, and finding out what is at its other end.

PostgreSQL's drivers are called without SQLAlchemy in between, which would ask the server things
first, in named prepared statements: a pooler in transaction mode may send the name to another
server, which knows it not, or knows another statement by it. The first thing asked here has no
name: who answers? A server that is not the one that greeted us stands behind a pooler.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from postroom.databases.sql import query_text

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from postroom.databases.urls import Target

__all__ = ["Opened", "creator", "postgresql", "through_sqlalchemy"]

ROOM = "postroom.databases"
GOODBYE_SECONDS = 2.0


class Opened(Protocol):
    """A connection of the driver's own, and what is known of its other end."""

    driver: Any
    read_only: bool
    pooled: bool
    server: int  # the moment at which the server started, which tells it from any other

    async def tell(self, text: str) -> None:
        """Carry out one command."""

    async def end(self) -> None:
        """Give it up, whatever it is in the middle of."""


class _ThroughSQLAlchemy:
    """MariaDB and SQLite: nothing stands between us and them."""

    pooled = False
    server = 0

    def __init__(self, connection: AsyncConnection, driver: Any) -> None:
        self.driver = driver
        self.read_only = False
        self._connection = connection

    async def tell(self, text: str) -> None:
        await self._connection.exec_driver_sql(text)

    async def look(self, dialect: str) -> None:
        """Find out whether it takes writes."""
        text = query_text(ROOM, dialect, "writable")
        (writable,) = (await self._connection.exec_driver_sql(text)).one()
        self.read_only = not writable

    async def end(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._connection.invalidate()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._connection.close()


class _File(_ThroughSQLAlchemy):
    """SQLite keeps the lock of a closed connection while somebody still has one of its cursors."""

    async def end(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self.driver.rollback()
        await super().end()


async def through_sqlalchemy(engine: AsyncEngine, dialect: str) -> Opened:
    """Open a connection of MariaDB or SQLite."""
    connection = await engine.connect()
    driver = (await connection.get_raw_connection()).driver_connection
    opened = (_File if dialect == "sqlite" else _ThroughSQLAlchemy)(connection, driver)
    try:
        await opened.look(dialect)
    except BaseException:
        await opened.end()
        raise
    return opened


class _Asyncpg:
    """By asyncpg. Behind a pooler it prepares nothing that has a name."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.read_only = self.pooled = False
        self.server = 0

    @classmethod
    async def open(cls, arguments: dict[str, Any], *, pooled: bool) -> _Asyncpg:
        import asyncpg

        arguments.pop("prepared_statement_cache_size", None)  # SQLAlchemy's own
        if pooled:
            arguments["statement_cache_size"] = 0
        return cls(await asyncpg.connect(**arguments))

    async def introduce(self) -> tuple[int, int]:
        """The process that greeted us, and the one that answers."""
        answer = bytearray()

        async def keep(data: bytes) -> None:
            answer.extend(data)

        # COPY is the one question asyncpg asks without giving it a name first.
        await self.driver.copy_from_query(query_text(ROOM, "postgresql", "introduce"), output=keep)
        pid, read_only, self.server = map(int, answer.split())
        self.read_only = bool(read_only)
        return self.driver.get_server_pid(), pid

    def prepare_nothing(self) -> bool:
        """Whether it could still be told to; asyncpg must know from the start."""
        return False

    async def tell(self, text: str) -> None:
        await self.driver.execute(text)

    async def end(self) -> None:
        self.driver.terminate()


class _Psycopg:
    """By psycopg, which names only what it has been asked a few times."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.read_only = self.pooled = False
        self.server = 0

    @classmethod
    async def open(cls, arguments: dict[str, Any], *, pooled: bool) -> _Psycopg:
        import psycopg

        if pooled:
            arguments["prepare_threshold"] = None
        return cls(await psycopg.AsyncConnection.connect(**arguments, autocommit=True))

    async def introduce(self) -> tuple[int, int]:
        """The process that greeted us, and the one that answers."""
        cursor = await self.driver.execute(query_text(ROOM, "postgresql", "introduce").encode())
        pid, read_only, self.server = await cursor.fetchone()
        self.read_only = bool(read_only)
        return self.driver.info.backend_pid, pid

    def prepare_nothing(self) -> bool:
        self.driver.prepare_threshold = None
        return True

    async def tell(self, text: str) -> None:
        await self.driver.execute(text.encode())

    async def end(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self.driver.close()


async def postgresql(target: Target, *, pooled: bool = False) -> Opened:
    """Open a connection of PostgreSQL; `pooled` is what earlier ones were found to be."""
    kind: Any = _Asyncpg if target.url.get_driver_name() == "asyncpg" else _Psycopg
    expected = pooled or target.pooled
    while True:
        opened = await kind.open(_arguments(target), pooled=expected)
        try:
            greeted, answered = await opened.introduce()
        except BaseException:
            await opened.end()
            raise
        opened.pooled = target.pooled or greeted != answered
        if expected or not opened.pooled or opened.prepare_nothing():
            return opened  # type: ignore[no-any-return]
        await opened.end()
        expected = True


def creator(target: Target, *, prepared: int = 0) -> dict[str, Any]:
    """Arguments with which SQLAlchemy's engine for PostgreSQL gets its connections from here.

    `prepared` says how many statements of asyncpg's a connection may keep prepared. None, unless
    nothing stands in between; but then each takes three ways to the server instead of one.
    """

    async def create(*_: Any, **__: Any) -> Any:
        opened = await postgresql(target)
        if opened.pooled and prepared:
            await opened.end()
            raise ConnectionError("a pooler has come to stand in between")
        return opened.driver

    arguments: dict[str, Any] = {"async_creator_fn": create}
    if target.url.get_driver_name() == "asyncpg":
        # SQLAlchemy's own memory of what it has prepared.
        arguments["prepared_statement_cache_size"] = prepared
    return arguments


def _arguments(target: Target) -> dict[str, Any]:
    _, arguments = target.url.get_dialect()().create_connect_args(target.url)
    return {**arguments, **target.connect_args}
