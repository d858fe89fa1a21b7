"""MariaDB and MySQL connections of PyMySQL, mysqlclient, asyncmy and aiomysql. Each statement has a
plain cursor of our own, so the connection's cursor class does not matter."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from postroom.databases.steps import Manner, Step, drive, drive_async
from postroom.flow import Rows, Statement

__all__ = ["AsyncmyLink", "MysqlclientLink", "PymysqlLink", "for_aiomysql"]

_MANNER = Manner("mysql", "format")
_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS, which the server sends with every answer


def _commits_alone(connection: Any) -> bool:
    in_transaction = connection.server_status & _IN_TRANSACTION
    return bool(connection.get_autocommit()) and not in_transaction


def _plain_cursor(connection: Any) -> Any:
    """The driver's plain cursor class: rows are tuples, and executemany writes one INSERT."""
    for cls in type(connection).__mro__:
        library = cls.__module__.partition(".")[0]
        if library in ("pymysql", "MySQLdb", "asyncmy", "aiomysql"):
            return import_module(f"{library}.cursors").Cursor
    raise AssertionError(type(connection))


@cache
def _silent(cursor: Any) -> Any:
    """A cursor of aiomysql that does not warn of a taken dedup key, which is no error here."""

    async def show_nothing(self: Any, connection: Any) -> None: ...

    return type("Cursor", (cursor,), {"_show_warnings": show_nothing})


class _Bytes:
    """Bytes for aiomysql, of a type it leaves to PyMySQL."""

    __slots__ = ("value",)

    def __init__(self, value: bytes) -> None:
        self.value = value

    def literal(self, mapping: object = None) -> str:
        return f"_binary X'{self.value.hex()}'"


def for_aiomysql(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values as aiomysql can send them.

    With PyMySQL 1.2.3 and later it cannot escape bytes itself (aio-libs/aiomysql#1080); any other
    type it leaves to PyMySQL's table of encoders, where ours has its place.
    """
    import_module("pymysql.converters").encoders[_Bytes] = _Bytes.literal
    return tuple([_Bytes(value) if isinstance(value, bytes) else value for value in values])


class PymysqlLink:
    """Carries out statements on a `pymysql.Connection`."""

    dialect = "mysql"

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._cursor = _plain_cursor(connection)

    def commits_alone(self) -> bool:
        return _commits_alone(self.connection)

    def execute(self, statement: Statement) -> Rows:
        return drive(statement, _MANNER, self._take)

    def _take(self, step: Step) -> Rows | None:
        with self.connection.cursor(self._cursor) as cursor:
            if step.many is not None:
                cursor.executemany(step.text, step.many)
                return None
            cursor.execute(step.text, step.values)
            return list(cursor.fetchall()) if cursor.description else None


class MysqlclientLink(PymysqlLink):
    """Carries out statements on a `MySQLdb.connections.Connection`."""

    def commits_alone(self) -> bool:
        """mysqlclient keeps the server's status to itself, so the server is asked."""
        if not self.connection.get_autocommit():
            return False
        with self.connection.cursor(self._cursor) as cursor:
            cursor.execute("SELECT @@in_transaction")
            return not cursor.fetchone()[0]


class AsyncmyLink:
    """Carries out statements on an `asyncmy` or `aiomysql` connection."""

    dialect = "mysql"

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._cursor = _plain_cursor(connection)
        self._is_aiomysql = self._cursor.__module__.startswith("aiomysql.")
        if self._is_aiomysql:
            self._cursor = _silent(self._cursor)

    def commits_alone(self) -> bool:
        return _commits_alone(self.connection)

    async def execute(self, statement: Statement) -> Rows:
        return await drive_async(statement, _MANNER, self._take)

    async def _take(self, step: Step) -> Rows | None:
        step = step.with_values(for_aiomysql) if self._is_aiomysql else step
        async with self.connection.cursor(self._cursor) as cursor:
            if step.many is not None:
                await cursor.executemany(step.text, step.many)
                return None
            await cursor.execute(step.text, step.values)
            return list(await cursor.fetchall()) if cursor.description else None
