"""Connections of our own, to any number of requests at once: for claims outside of the caller's
transaction, and for transactions that Postroom opens for a route.

Each statement about a key is whole by itself and names its epoch, so that it needs no transaction
around it. What goes wrong comes out as one of our errors; a conflict is tried again. A database
that does not answer in time is given up together with the connection: whatever it still does with
what it was asked there, is done under the same owner and epoch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property, partial
from threading import Lock
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from postroom.databases.opening import creator
from postroom.databases.sqlalchemy import SQLAlchemyLink
from postroom.databases.sqlite import AiosqliteLink
from postroom.databases.trouble import explain, is_conflict, not_of_it
from postroom.databases.urls import Target, resolve, resolve_for_threads
from postroom.errors import PostroomError, SchemaError
from postroom.flow import Flow, run, run_async
from postroom.idempotency.afterwards import Afterwards
from postroom.idempotency.deadlines import Deadlines, shut
from postroom.idempotency.forks import keep_untouched, renewed_in_child

__all__ = ["Engines"]

T = TypeVar("T")
TRIES = 8
# An answer must outlive a power cut: its client is told right after.
_PRAGMAS = ("PRAGMA busy_timeout = {patience_ms}", "PRAGMA synchronous = FULL")
PATIENCE_SECONDS = 30.0
GRACE_SECONDS = 1.0


class Engines:
    """Engines for one database, made when first needed: for records and for transactions, for
    event loops and for threads."""

    def __init__(
        self,
        url: str | Callable[[], str],
        *,
        connections: int = 10,
        timeout_seconds: float = 10.0,
    ) -> None:
        self._find_url = url if callable(url) else None
        if isinstance(url, str):
            self.url = url
            _ = self.target  # a URL that is wrong is an error here
        self._seconds = timeout_seconds
        self._pool: dict[str, Any] = {"pool_size": connections, "max_overflow": connections}
        self._async: dict[asyncio.AbstractEventLoop, dict[bool, AsyncEngine]] = {}
        self._sync: dict[bool, Engine] = {}
        self.renew()
        renewed_in_child(self)

    @cached_property
    def url(self) -> str:
        """The database, looked for when it is first used."""
        assert self._find_url is not None
        return self._find_url()

    @property
    def name(self) -> str:
        """The database for people to see."""
        return self.target.safe

    @cached_property
    def target(self) -> Target:
        """The database that the URL names."""
        return resolve(self.url)

    def renew(self) -> None:
        """Begin without a connection, as after a fork."""
        keep_untouched(*self._sync.values(), *self._async.values())
        self._async, self._sync = {}, {}
        self._deadlines = Deadlines(self._seconds)
        self.afterwards = Afterwards(self)
        self._turn = Lock()

    async def ask_async(self, make: Any) -> Any:
        """Run the flow that `make()` gives, on a connection of its own."""
        until = time.monotonic() + self._seconds
        for attempt in range(1, TRIES + 1):
            try:
                self._require_file()
                async with self._in_time_async(until) as connection:
                    return await _run_async(connection, make())
            except PostroomError:
                raise
            except Exception as error:
                _let_pass(error)
                if self._is_final(error, attempt, until):
                    raise explain(error, self.target) from error
                await asyncio.sleep(0.01 * attempt)
        raise AssertionError("unreachable")

    def ask(self, make: Any) -> Any:
        """`ask_async` for threads."""
        until = time.monotonic() + self._seconds
        for attempt in range(1, TRIES + 1):
            try:
                self._require_file()
                with self._in_time() as connection:
                    return _run(connection, make())
            except PostroomError:
                raise
            except Exception as error:
                _let_pass(error)
                if self._is_final(error, attempt, until):
                    raise explain(error, self.target) from error
                time.sleep(0.01 * attempt)
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _in_time_async(self, until: float) -> AsyncIterator[AsyncConnection]:
        loop = asyncio.get_running_loop()
        ended = loop.time() + until - time.monotonic()
        engine, cut = self.engine_async(alone=True), None
        # SQLite keeps its own time, and a thread that is at it cannot be called off.
        at = None if self.target.dialect == "sqlite" else ended
        try:
            async with asyncio.timeout_at(at) as limit, engine.connect() as connection:
                if engine.dialect.driver == "psycopg":
                    # When cancelled it asks its server first. It is to find no server.
                    raw = await connection.get_raw_connection()
                    cut = loop.call_at(ended, shut, raw.driver_connection)
                    limit.reschedule(ended + GRACE_SECONDS)
                yield connection
        except Exception as error:
            if cut is not None and loop.time() >= ended:
                raise TimeoutError from error
            raise
        finally:
            if cut is not None:
                cut.cancel()

    @contextmanager
    def _in_time(self) -> Iterator[Connection]:
        """The drivers of the others have limits of their own."""
        engine = self.engine(alone=True)
        if engine.dialect.driver != "psycopg":
            with engine.connect() as connection:
                yield connection
            return
        with self._deadlines.kept(), engine.connect() as connection:
            self._deadlines.on(connection.connection.driver_connection)
            yield connection

    def _is_final(self, error: Exception, attempt: int, until: float) -> bool:
        return attempt == TRIES or not is_conflict(error) or time.monotonic() >= until

    @asynccontextmanager
    async def begin_async(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at the end, or rolled back by an error."""
        async with self.engine_async(alone=False).begin() as connection:
            yield connection

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """The same for threads."""
        with self.engine(alone=False).begin() as connection:
            yield connection

    def engine_async(self, *, alone: bool) -> AsyncEngine:
        """`alone`: every statement commits by itself. Connections belong to the event loop that
        runs when they are made."""
        loop = asyncio.get_running_loop()
        with self._turn:
            if loop not in self._async:
                self._forget_closed()
                self._async[loop] = {}
            engines = self._async[loop]
            if alone not in engines:
                target = self.target
                pg = target.dialect == "postgresql"
                made = create_async_engine(
                    target.url,
                    connect_args=creator(target) if pg else target.connect_args,
                    pool_timeout=self._patience(alone),
                    **self._isolation(alone),
                    **self._pool,
                )
                self._set_up(made.sync_engine, alone)
                engines[alone] = made
            return engines[alone]

    def _forget_closed(self) -> None:
        """A closed loop takes its connections with it: nobody can say goodbye on them."""
        for loop in [loop for loop in self._async if loop.is_closed()]:
            for engine in self._async.pop(loop).values():
                engine.sync_engine.dispose(close=False)

    def engine(self, *, alone: bool) -> Engine:
        """The same for threads."""
        with self._turn:
            if alone not in self._sync:
                target = resolve_for_threads(self.url)
                arguments = dict(target.connect_args)
                if target.dialect == "postgresql":
                    arguments["prepare_threshold"] = None  # a pooler may stand in between
                if alone:
                    arguments |= self._limits(target, arguments)
                if target.dialect == "sqlite":
                    arguments["check_same_thread"] = False
                made = create_engine(
                    target.url,
                    connect_args=arguments,
                    pool_timeout=self._patience(alone),
                    **self._isolation(alone),
                    **self._pool,
                )
                self._set_up(made, alone)
                if alone and target.dialect == "postgresql":
                    event.listen(made, "do_connect", self._connect)
                self._sync[alone] = made
            return self._sync[alone]

    async def close_async(self) -> None:
        """Give the connections of this event loop and of threads up; other loops have their own."""
        await self.afterwards.end_async()
        with self._turn:
            self._forget_closed()
            engines = self._async.pop(asyncio.get_running_loop(), {})
        for engine in engines.values():
            with suppress(Exception):
                await engine.dispose()
        self.close()

    def close(self) -> None:
        """Give the connections of threads up."""
        self.afterwards.end()
        for engine in self._sync.values():
            with suppress(Exception):
                engine.dispose()
        self._sync.clear()

    def _require_file(self) -> None:
        if path := self.target.missing_file:
            raise SchemaError(f"There is no file {path}; make it with `postroom db install`.")

    def _isolation(self, alone: bool) -> dict[str, Any]:
        if alone:
            return {"isolation_level": "AUTOCOMMIT", "pool_reset_on_return": None}
        return {} if self.target.dialect == "sqlite" else {"isolation_level": "READ COMMITTED"}

    def _patience(self, alone: bool) -> float:
        """What a point of a resumable request waits for is its own to limit."""
        return min(self._seconds, PATIENCE_SECONDS) if alone else PATIENCE_SECONDS

    def _limits(self, target: Target, arguments: dict[str, Any]) -> dict[str, Any]:
        """How long a driver for threads waits by itself."""
        if target.dialect == "mysql":
            seconds = self._seconds
            connect = min(arguments["connect_timeout"], seconds)
            return {"connect_timeout": connect, "read_timeout": seconds, "write_timeout": seconds}
        if target.dialect == "postgresql":  # in whole seconds, and zero is for ever
            most = arguments["connect_timeout"] or math.inf
            return {"connect_timeout": min(most, math.ceil(self._seconds))}
        return {}

    def _connect(self, dialect: Any, _: Any, args: Any, arguments: Any) -> Any:
        """SQLAlchemy has questions of its own, before it gives a connection out."""
        made = dialect.connect(*args, **arguments)
        self._deadlines.on(made)
        return made

    def _set_up(self, engine: Engine, alone: bool) -> None:
        if self.target.dialect == "sqlite":
            patience_ms = int(self._patience(alone) * 1000)
            event.listen(engine, "connect", partial(_on_connect_sqlite, patience_ms))
            if not alone:
                event.listen(engine, "begin", _begin_immediate)


def _run(connection: Connection, flow: Flow[T]) -> T:
    try:
        return run(flow, SQLAlchemyLink(connection))
    except Exception as error:
        if not_of_it(error) is not None:
            connection.invalidate()  # in the middle of a statement: no use to others
        raise


async def _run_async(connection: AsyncConnection, flow: Flow[T]) -> T:
    if connection.dialect.name == "sqlite":
        # SQLAlchemy executes and fetches in separate calls, and keeps the file's lock in between.
        raw = await connection.get_raw_connection()
        driver: Any = raw.driver_connection
        return await run_async(flow, AiosqliteLink(driver))
    return await connection.run_sync(_run, flow)


def _let_pass(error: Exception) -> None:
    """A time limit that broke in is not ours to explain, and nothing to try again."""
    if (other := not_of_it(error)) is not None:
        raise other


def _on_connect_sqlite(patience_ms: int, connection: Any, _: Any) -> None:
    connection.isolation_level = None  # we begin ourselves, and at once for real
    cursor = connection.cursor()
    for command in _PRAGMAS:
        cursor.execute(command.format(patience_ms=patience_ms))
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
