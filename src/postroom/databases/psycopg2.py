"""psycopg2 connections. Each statement has a plain cursor of our own with its own type casts, and
values are adapted here, so what users register or set on the connection does not matter."""

from __future__ import annotations

from functools import cache
from typing import Any

from postroom.databases.steps import Manner, Step, drive
from postroom.errors import UnknownConnection
from postroom.flow import Rows, Statement

__all__ = ["Psycopg2Link", "array", "without_view"]

# Its executemany sends one statement a row; one array a column is one statement in all.
_MANNER = Manner("postgresql", "format", arrays=True)


class Psycopg2Link:
    """Carries out statements on a `psycopg2.extensions.connection`."""

    dialect = "postgresql"

    def __init__(self, connection: Any) -> None:
        if connection.async_:
            raise UnknownConnection(
                "a psycopg2 connection made with async_=True has no transactions that can be "
                "waited for: give it one made without, or a connection of psycopg 3 or asyncpg"
            )
        self.connection = connection

    def commits_alone(self) -> bool:
        """`with connection:` makes an autocommit connection begin with its next statement and
        shows it nowhere, so that one is asked before it is refused."""
        if not self.connection.autocommit or not self._is_idle():
            return False
        with self._cursor() as cursor:
            cursor.execute("SELECT 1")
        return self._is_idle()

    def execute(self, statement: Statement) -> Rows:
        return drive(statement, _MANNER, self._take)

    def _is_idle(self) -> bool:
        from psycopg2.extensions import TRANSACTION_STATUS_IDLE

        return bool(self.connection.get_transaction_status() == TRANSACTION_STATUS_IDLE)

    def _take(self, step: Step) -> Rows | None:
        with self._cursor(reads=step.reads) as cursor:
            if step.many is not None:
                cursor.executemany(step.text, [tuple(map(_adapted, row)) for row in step.many])
                return None
            cursor.execute(step.text, tuple(map(_adapted, step.values)))
            if not cursor.description:
                return None
            return [tuple(map(without_view, row)) for row in cursor.fetchall()]

    def _cursor(self, *, reads: bool = True) -> Any:
        from psycopg2.extensions import cursor, register_type

        made = cursor(self.connection)
        if reads:
            for cast in _casts():
                register_type(cast, made)
        return made


def _adapted(value: Any) -> Any:
    """A value as psycopg2 would adapt it if nobody had told it otherwise."""
    if value is None:
        return None
    adapters = _adapters()
    adapter = adapters.get(type(value))
    if adapter is None:  # a list, or something that is a str and more
        adapter = next((made for cls, made in adapters.items() if isinstance(value, cls)), array)
    return adapter(value)


@cache
def _casts() -> tuple[Any, ...]:
    from psycopg2 import BINARY
    from psycopg2.extensions import INTEGER, LONGINTEGER, UNICODE

    return (UNICODE, INTEGER, LONGINTEGER, BINARY)


@cache
def _adapters() -> dict[type, Any]:
    from psycopg2 import extensions

    return {str: extensions.QuotedString, bytes: extensions.Binary, int: extensions.Int}


def array(value: Any) -> Any:
    """A list as an array, though many applications register lists as JSON.

    It goes as one text, which the statement casts: to adapt each value by itself, and have the
    server parse each as an expression, takes twice as long.
    """
    if not isinstance(value, list):
        return value
    return _adapters()[str]("{" + ",".join(map(_element, value)) + "}")


def _element(value: str | bytes | int | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        if "\\" in value or '"' in value:
            value = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{value}"'
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return str(int(value))


def without_view(value: Any) -> Any:
    """A value as it is, bytes for a memoryview."""
    return value.tobytes() if isinstance(value, memoryview) else value
