"""psycopg 3 connections. Each statement has a cursor of our own, so the connection's row factory
and cursor factory do not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postroom.databases.steps import Manner, Step, drive, drive_async
from postroom.flow import Rows, Statement

if TYPE_CHECKING:
    import psycopg

__all__ = ["AsyncPsycopgLink", "PsycopgLink"]

_MANNER = Manner("postgresql", "format")


def _commits_alone(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    if not connection.autocommit:
        return False
    from psycopg.pq import TransactionStatus

    return connection.pgconn.transaction_status == TransactionStatus.IDLE


class PsycopgLink:
    """Carries out statements on a `psycopg.Connection`."""

    dialect = "postgresql"

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def commits_alone(self) -> bool:
        return _commits_alone(self.connection)

    def execute(self, statement: Statement) -> Rows:
        return drive(statement, _MANNER, self._take)

    def _take(self, step: Step) -> Rows | None:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        with Cursor(self.connection, row_factory=tuple_row) as cursor:
            if step.many is not None:
                cursor.executemany(step.text.encode(), step.many)
                return None
            cursor.execute(step.text.encode(), step.values)
            return cursor.fetchall() if cursor.description else None


class AsyncPsycopgLink:
    """Carries out statements on a `psycopg.AsyncConnection`."""

    dialect = "postgresql"

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection

    def commits_alone(self) -> bool:
        return _commits_alone(self.connection)

    async def execute(self, statement: Statement) -> Rows:
        return await drive_async(statement, _MANNER, self._take)

    async def _take(self, step: Step) -> Rows | None:
        from psycopg import AsyncCursor
        from psycopg.rows import tuple_row

        async with AsyncCursor(self.connection, row_factory=tuple_row) as cursor:
            if step.many is not None:
                await cursor.executemany(step.text.encode(), step.many)
                return None
            await cursor.execute(step.text.encode(), step.values)
            return await cursor.fetchall() if cursor.description else None
