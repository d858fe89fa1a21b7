"""Our own workers' way to the database: connections of their own, fenced against half-done work.

Statements run on the driver's own connection, which is what makes a large read fast. Whatever
interrupts a statement, be it an error, a timeout or a cancelled task, ends the connection: nobody
inherits an open transaction. Behind a pooler no setting is made for the session: every statement
goes in a transaction that brings its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from postroom import failpoints
from postroom.databases import opening, sql
from postroom.databases.asyncpg import AsyncpgLink
from postroom.databases.mysql import AsyncmyLink
from postroom.databases.opening import Opened
from postroom.databases.psycopg import AsyncPsycopgLink
from postroom.databases.sqlite import AiosqliteLink
from postroom.databases.trouble import explain
from postroom.databases.urls import resolve
from postroom.errors import PostroomError, SchemaError, Unreachable
from postroom.flow import AsyncLink, Flow, Rows, Statement, Value, run_async

__all__ = ["Database", "DatabaseLost", "WorkerLink"]

T = TypeVar("T")

_BEGIN = {"postgresql": "BEGIN", "mysql": "START TRANSACTION", "sqlite": "BEGIN IMMEDIATE"}
# One consistent look at everything, however long it takes, that changes nothing.
_SNAPSHOT = {
    "postgresql": (
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        "SET LOCAL enable_seqscan = on",
        "SET LOCAL enable_bitmapscan = on",
    ),
    "mysql": (
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
    ),
    "sqlite": ("PRAGMA query_only = ON", "BEGIN"),
}
_SETUP = {
    "postgresql": (
        "SET idle_in_transaction_session_timeout = {idle_ms}",
        "SET default_transaction_isolation = 'read committed'",
        "SET jit = off",
        # Our reads go by index and stop early; a scan that looks cheaper today is not tomorrow.
        "SET enable_seqscan = off",
        "SET enable_bitmapscan = off",
    ),
    "mysql": (
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SET SESSION idle_transaction_timeout = {idle_s}, innodb_lock_wait_timeout = {wait_s}",
    ),
    # No server ends anybody's transaction here: this is how long we queue for the file's one lock,
    # which eager writers can keep from us for a while.
    "sqlite": ("PRAGMA busy_timeout = {patience_ms}", "PRAGMA synchronous = NORMAL"),
}


class DatabaseLost(Exception):
    """A statement did not come to its end; what it did, if anything, must be looked up."""


class Database:
    """Where the outbox lives. `connect` opens one more connection for a worker."""

    def __init__(self, url: str, *, timeout_seconds: float = 30.0) -> None:
        self.target = resolve(url)
        self.dialect = self.target.dialect
        self.timeout_seconds = timeout_seconds
        self._pooled = False
        self._engine: AsyncEngine | None = None
        if self.dialect != "postgresql":
            self._engine = create_async_engine(
                self.target.url,
                poolclass=NullPool,
                connect_args=self.target.connect_args,
                isolation_level="AUTOCOMMIT",
            )

    async def connect(self, *, idle_seconds: float | None = None) -> WorkerLink:
        """Open a connection to a server that takes writes, or say in one sentence what is wrong.

        A transaction of ours that stands still for `idle_seconds` is ended by the server, so that
        a frozen process keeps nobody waiting.
        """
        idle = idle_seconds or self.timeout_seconds
        if path := self.target.missing_file:
            raise SchemaError(f"There is no file {path}; make it with `postroom db install`.")
        try:
            failpoints.hit("link.open.before")
            link = WorkerLink(self, await self._open(), idle)
        except Exception as error:
            raise explain(error, self.target) from error
        try:
            await link.prepare()
            failpoints.hit("link.open.after")
        except BaseException as error:
            await link.close()
            if isinstance(error, PostroomError) or not isinstance(error, Exception):
                raise
            raise explain(error, self.target) from error
        return link

    async def _open(self) -> Opened:
        """Connect to the end even if cancelled: a half-made connection is nobody's to close."""
        work = asyncio.ensure_future(self._open_one())
        try:
            done, _ = await asyncio.wait([work], timeout=self.timeout_seconds)
            if not done:
                raise TimeoutError
            return work.result()
        except (asyncio.CancelledError, TimeoutError):
            await asyncio.wait([work], timeout=2)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled() and work.exception() is None:
                await WorkerLink(self, work.result(), self.timeout_seconds).close()
            raise

    async def _open_one(self) -> Opened:
        if self._engine is not None:
            return await opening.through_sqlalchemy(self._engine, self.dialect)
        opened = await opening.postgresql(self.target, pooled=self._pooled)
        self._pooled = opened.pooled
        return opened

    def explain(self, error: BaseException) -> PostroomError:
        """What went wrong, as an error of ours."""
        cause = error.__cause__ if isinstance(error, DatabaseLost) else error
        return explain(cause or error, self.target)


class WorkerLink:
    """One connection of a worker; statements and transactions on it take turns."""

    def __init__(self, database: Database, opened: Opened, idle_seconds: float) -> None:
        self.database = database
        self.dialect = database.dialect
        self.driver: Any = opened.driver
        self.pooled = opened.pooled
        self.lost = False
        self._why: Exception | None = None  # the error that ended it
        self.asked_at: float | None = None  # since when a statement is under way
        self._opened = opened
        self._idle_ms = max(int(idle_seconds * 1000), 100)
        self._turn = asyncio.Lock()
        self._begin = _BEGIN[self.dialect]
        self._link = _link_on(self.dialect, self.driver)

    async def prepare(self) -> None:
        """Refuse a read-only server, and set the session up if it is ours alone."""
        if self._opened.read_only:
            safe = self.database.target.safe
            raise Unreachable(f"{safe} is read-only or recovering; point the URL at the primary.")
        numbers = {
            "idle_ms": self._idle_ms,
            "idle_s": max(1, self._idle_ms // 1000),
            # Longer than a frozen neighbour can keep its locks.
            "wait_s": max(1, self._idle_ms // 1000) + 2,
            "patience_ms": int(self.database.timeout_seconds * 900),
            "server": self._opened.server,
        }
        if self.pooled:
            begin = sql.split(sql.query_text(opening.ROOM, self.dialect, "begin_pooled"))
            self._begin = ";\n".join(begin).format(**numbers)
            return
        for command in _SETUP[self.dialect]:
            await self._opened.tell(command.format(**numbers))

    async def query(self, room: str, name: str, **values: Value) -> Rows:
        """Carry out one query: alone if it is one statement and the session is our own, else in a
        transaction."""
        return await self.ask(Statement(room, name, values))

    async def ask(self, statement: Statement) -> Rows:
        """`query` for a statement."""

        def alone() -> Flow[Rows]:
            return (yield statement)

        several = len(sql.prepare(statement.room, self.dialect, statement.name, "format")) > 1
        if several or self.pooled:
            return await self.transact(alone())
        async with self._guarded():
            return await self._link.execute(statement)

    async def transact(self, flow: Flow[T]) -> T:
        """Carry out a flow in one transaction and commit it.

        On SQLite the flow runs in the connection's thread, so that the file's lock never waits for
        the event loop, which a synchronous writer of the application may block.
        """
        async with self._guarded():
            if isinstance(self._link, AiosqliteLink):
                return await self._link.transact(self._begin, flow)
            failpoints.hit("tx.begin.before")
            await self._plain(self._begin)
            failpoints.hit("tx.begin.after")
            result = await run_async(flow, self._link)
            failpoints.hit("tx.commit.before")
            await self._plain("COMMIT")
            failpoints.hit("tx.commit.after")
            return result

    async def begin_snapshot(self) -> None:
        """From here on every query sees the database as it is now, until the link is closed."""
        async with self._guarded():
            for text in _SNAPSHOT[self.dialect]:
                await self._plain(text)

    async def close(self) -> None:
        """Give the connection up; never raises, never waits long."""
        self.lost = True
        with contextlib.suppress(Exception):
            await asyncio.shield(self._opened.end())

    @contextlib.asynccontextmanager
    async def _guarded(self) -> Any:
        async with self._turn:
            if self.lost:
                raise DatabaseLost("the connection is gone") from self._why
            self.asked_at = time.monotonic()
            try:
                async with asyncio.timeout(self.database.timeout_seconds):
                    yield
            except asyncio.CancelledError:
                await self.close()
                raise
            except Exception as error:
                self._why = error
                await self.close()
                raise DatabaseLost(str(error)) from error
            finally:
                self.asked_at = None

    async def _plain(self, text: str) -> None:
        if self.dialect == "mysql":
            async with self.driver.cursor() as cursor:
                await cursor.execute(text)
        else:
            await self.driver.execute(text)


def _link_on(dialect: str, driver: Any) -> AsyncLink:
    if dialect == "sqlite":
        return AiosqliteLink(driver)
    if dialect == "mysql":
        return AsyncmyLink(driver)
    if type(driver).__module__.startswith("asyncpg"):
        return AsyncpgLink(driver)
    return AsyncPsycopgLink(driver)
