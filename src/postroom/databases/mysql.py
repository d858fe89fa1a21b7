"""MariaDB and MySQL connections of PyMySQL, asyncmy and aiomysql. Each statement has a plain cursor
of our own, so the connection's cursor class does not matter."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from postroom.databases.steps import Manner, Step, drive, drive_async
from postroom.errors import ConfigurationError
from postroom.flow import Rows, Statement

__all__ = ["AsyncmyLink", "PymysqlLink", "check_aiomysql"]

_MANNER = Manner("mysql", "format")
_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS, which the server sends with every answer


def _commits_alone(connection: Any) -> bool:
    in_transaction = connection.server_status & _IN_TRANSACTION
    return bool(connection.get_autocommit()) and not in_transaction


def _plain_cursor(connection: Any) -> Any:
    """The driver's plain cursor class: rows are tuples, and executemany writes one INSERT."""
    root = type(connection).__module__.partition(".")[0]
    return import_module(f"{root}.cursors").Cursor


def check_aiomysql() -> None:
    """Refuse an aiomysql that cannot send bytes, rather than fail inside it without a word."""
    helper = getattr(import_module("aiomysql.connection"), "escape_bytes_prefixed", None)
    if isinstance(helper, str):
        raise ConfigurationError(
            "this aiomysql cannot send bytes with this PyMySQL (aio-libs/aiomysql#1080): "
            "pip install 'PyMySQL<1.2.3', or use asyncmy"
        )


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


class AsyncmyLink:
    """Carries out statements on an `asyncmy` or `aiomysql` connection."""

    dialect = "mysql"

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._cursor = _plain_cursor(connection)
        if self._cursor.__module__.startswith("aiomysql."):
            check_aiomysql()

    def commits_alone(self) -> bool:
        return _commits_alone(self.connection)

    async def execute(self, statement: Statement) -> Rows:
        return await drive_async(statement, _MANNER, self._take)

    async def _take(self, step: Step) -> Rows | None:
        async with self.connection.cursor(self._cursor) as cursor:
            if step.many is not None:
                await cursor.executemany(step.text, step.many)
                return None
            await cursor.execute(step.text, step.values)
            return list(await cursor.fetchall()) if cursor.description else None
