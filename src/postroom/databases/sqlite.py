"""sqlite3 and aiosqlite connections. Each statement has a cursor of our own without a row factory,
and reads text as str whatever the connection's text factory is."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from postroom import failpoints
from postroom.databases.steps import Manner, Step, drive
from postroom.errors import UnknownConnection
from postroom.flow import Flow, Rows, Statement, run

if TYPE_CHECKING:
    import aiosqlite

__all__ = ["AiosqliteLink", "SqliteLink"]

T = TypeVar("T")
_MANNER = Manner("sqlite", "qmark")


def _commits_alone(connection: Any) -> bool:
    """`autocommit` exists since Python 3.12 and is -1 where `isolation_level` decides."""
    autocommit = getattr(connection, "autocommit", -1)
    alone = connection.isolation_level is None if autocommit == -1 else bool(autocommit)
    return alone and not connection.in_transaction


@contextmanager
def _text_as_str(connection: Any) -> Iterator[None]:
    theirs = connection.text_factory
    connection.text_factory = str
    try:
        yield
    finally:
        connection.text_factory = theirs


class SqliteLink:
    """Carries out statements on a `sqlite3.Connection`."""

    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def commits_alone(self) -> bool:
        return _commits_alone(self.connection)

    def execute(self, statement: Statement) -> Rows:
        return drive(statement, _MANNER, self._take)

    def _take(self, step: Step) -> Rows | None:
        cursor = self.connection.cursor()
        cursor.row_factory = None
        try:
            if step.many is not None:
                cursor.executemany(step.text, step.many)
                return None
            with _text_as_str(self.connection):
                cursor.execute(step.text, step.values)
                return cursor.fetchall() if cursor.description else None
        finally:
            cursor.close()


class AiosqliteLink:
    """Carries out statements on an `aiosqlite.Connection`, each in one call to its thread.

    SQLite keeps a file's lock until a statement has returned its last row. With several calls for
    one statement the lock would wait for the event loop, and a synchronous writer on the same loop
    for the lock.
    """

    dialect = "sqlite"

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self.connection = connection
        try:
            self._link = SqliteLink(connection._conn)
        except ValueError:
            raise UnknownConnection(
                "this aiosqlite connection is not open: write `async with aiosqlite.connect(...) "
                "as connection:` and publish inside"
            ) from None

    def commits_alone(self) -> bool:
        return self._link.commits_alone()

    async def execute(self, statement: Statement) -> Rows:
        return await self._call(partial(self._link.execute, statement))

    async def transact(self, begin: str, flow: Flow[T]) -> T:
        """Carry out a flow from BEGIN to COMMIT in one call to the thread.

        The thread rolls the transaction back if the caller is cancelled before the COMMIT.
        """
        abandoned = Event()
        try:
            return await self._call(partial(self._transact, begin, flow, abandoned))
        except asyncio.CancelledError:
            abandoned.set()
            raise

    def _transact(self, begin: str, flow: Flow[T], abandoned: Event) -> T:
        connection, link = self._link.connection, _Abandonable(self._link, abandoned)
        try:
            link.check()
            failpoints.hit("tx.begin.before")
            connection.execute(begin)
            failpoints.hit("tx.begin.after")
            result = run(flow, link)
            failpoints.hit("tx.commit.before")
            link.check()
            connection.execute("COMMIT")
            failpoints.hit("tx.commit.after")
            return result
        except BaseException:
            with suppress(sqlite3.Error):
                connection.rollback()
            raise

    async def _call(self, work: Callable[[], T]) -> T:
        return await self.connection._execute(work)  # type: ignore[no-any-return, no-untyped-call]


class _Abandonable:
    """A link that refuses further statements once its caller is gone."""

    dialect = "sqlite"

    def __init__(self, link: SqliteLink, abandoned: Event) -> None:
        self._link = link
        self._abandoned = abandoned

    def check(self) -> None:
        if self._abandoned.is_set():
            raise asyncio.CancelledError

    def execute(self, statement: Statement) -> Rows:
        self.check()
        return self._link.execute(statement)
