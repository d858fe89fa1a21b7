"""asyncpg connections, from a pool or not. Users' codecs do not matter: only text, integers and
bytes cross this link."""

from __future__ import annotations

from typing import Any

from postroom.databases.steps import Manner, Step, drive_async
from postroom.flow import Rows, Statement

__all__ = ["AsyncpgLink"]

_MANNER = Manner("postgresql", "dollar", arrays=True)


class AsyncpgLink:
    """Carries out statements on an `asyncpg.Connection`."""

    dialect = "postgresql"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def commits_alone(self) -> bool:
        return not self.connection.is_in_transaction()

    async def execute(self, statement: Statement) -> Rows:
        return await drive_async(statement, _MANNER, self._take)

    async def _take(self, step: Step) -> Rows | None:
        if step.many is not None:
            await self.connection.executemany(step.text, step.many)
            return None
        if step.lone:
            return list(map(tuple, await self.connection.fetch(step.text, *step.values)))
        # fetch alone does not tell a SELECT without rows from an UPDATE.
        prepared = await self.connection.prepare(step.text)
        rows = await prepared.fetch(*step.values)
        return [tuple(row) for row in rows] if prepared.get_attributes() else None
