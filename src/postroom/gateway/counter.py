"""The gateway's own connections: a few, kept open, one for each thing that is asked at a time.

Promise: an answer is given only for what is committed. Who finds no connection in time, or loses
one, is told that nothing is known; asking again with the same key tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, overload

from postroom import failpoints
from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.databases.schema import remedy
from postroom.errors import SchemaError, Unreachable
from postroom.flow import Flow, Rows, Statement
from postroom.ledger import store
from postroom.ledger.rules import Entry
from postroom.outbox.admission import SCHEMA_VERSION
from postroom.outbox.requests import Ledger, Receipt, Request, accept
from postroom.outbox.store import ROOM
from postroom.worker.waiting import undisturbed

__all__ = ["Counter"]

T = TypeVar("T")
LEDGER = Ledger()


class Counter:
    """Where requests are handed in and asked for."""

    def __init__(
        self, database: str, *, connections: int = 8, patience_seconds: float = 5.0
    ) -> None:
        self._database = Database(database, timeout_seconds=max(patience_seconds, 5.0))
        # SQLite has one writer at a time anyway.
        self._most = 1 if self._database.dialect == "sqlite" else connections
        self._patience = patience_seconds
        self.begin()

    def begin(self) -> None:
        """Have nothing of an earlier event loop: of that, only errors would come."""
        self._idle: list[WorkerLink] = []
        self._free = asyncio.Semaphore(self._most)

    @property
    def target(self) -> str:
        """The database, without its secrets."""
        return self._database.target.safe

    async def open(self) -> None:
        """See that the tables are there, or say what to do."""
        rows = await self._work(Statement(ROOM, "meta_read", {"item": "schema_version"}))
        found = int(rows[0][0]) if rows else 0
        if found < SCHEMA_VERSION:
            raise SchemaError(
                f"the tables in {self.target} are of version {found}, the gateway needs version "
                f"{SCHEMA_VERSION}: {remedy(found, SCHEMA_VERSION)}."
            )

    async def close(self) -> None:
        """Close every connection."""
        while self._idle:
            await self._idle.pop().close()

    async def accept(self, request: Request) -> Receipt:
        """Accept a request, or find what stands under its key."""
        failpoints.hit("gateway.accept.before")
        receipt = await self._work(lambda: accept(request))
        failpoints.hit("gateway.accept.after")
        LEDGER.committed(receipt)
        return receipt

    async def find(self, scope: str, key: str) -> Entry | None:
        """What stands under a key."""
        rows = await self._work(store.look(scope, key))
        return next(iter(store.entries(rows)), None)

    @overload
    async def _work(self, work: Statement) -> Rows: ...

    @overload
    async def _work(self, work: Callable[[], Flow[T]]) -> T: ...

    async def _work(self, work: Any) -> Any:
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise Unreachable("all connections to the database are in use") from None
        # Whoever asked may go away meanwhile; what was begun comes to its end.
        return await undisturbed(self._carry_out(work))

    async def _carry_out(self, work: Any) -> Any:
        try:
            try:
                return await self._on(await self._link(), work)
            except DatabaseLost:
                # A connection that stood idle may have been dead for long. Whatever the first try
                # came to, the second finds it: it has the same id.
                return await self._on(await self._database.connect(), work)
        except DatabaseLost as error:
            raise self._database.explain(error) from error
        finally:
            self._free.release()

    async def _on(self, link: WorkerLink, work: Any) -> Any:
        try:
            if isinstance(work, Statement):  # alone, without a transaction around it
                answer: Any = await link.ask(work)
            else:
                answer = await link.transact(work())
        except BaseException:
            await link.close()
            raise
        self._idle.append(link)
        return answer

    async def _link(self) -> WorkerLink:
        while self._idle:
            link = self._idle.pop()
            if not link.lost:
                return link
        return await self._database.connect()
