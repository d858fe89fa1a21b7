"""sqlite3 and aiosqlite connections. Each statement has a cursor of our own without a row factory,
and reads text as str whatever the connection's text factory is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from postroom.databases.steps import Manner, Step, drive, drive_async
from postroom.errors import UnknownConnection
from postroom.flow import Rows, Statement

if TYPE_CHECKING:
    import aiosqlite

__all__ = ["AiosqliteLink", "SqliteLink"]

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
    """Carries out statements on an `aiosqlite.Connection`."""

    dialect = "sqlite"

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self.connection = connection
        try:
            self._inside = connection._conn
        except ValueError:
            raise UnknownConnection(
                "this aiosqlite connection is not open: write `async with aiosqlite.connect(...) "
                "as connection:` and publish inside"
            ) from None

    def commits_alone(self) -> bool:
        return _commits_alone(self._inside)

    async def execute(self, statement: Statement) -> Rows:
        return await drive_async(statement, _MANNER, self._take)

    async def _take(self, step: Step) -> Rows | None:
        async with self.connection.cursor() as cursor:
            cursor.row_factory = None
            if step.many is not None:
                await cursor.executemany(step.text, step.many)
                return None
            with _text_as_str(self.connection):
                await cursor.execute(step.text, step.values)
                rows = await cursor.fetchall()
                return list(rows) if cursor.description else None  # type: ignore[arg-type]
