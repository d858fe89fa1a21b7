"""Connections of our own, to any number of requests at once: for claims outside of the caller's
transaction, and for transactions that Postroom opens for a route.

Each statement about a key is whole by itself and names its epoch, so that it needs no transaction
around it. What goes wrong comes out as one of our errors; a conflict is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from threading import Lock
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from postroom.databases.opening import creator
from postroom.databases.sqlalchemy import SQLAlchemyLink
from postroom.databases.trouble import explain, is_conflict
from postroom.databases.urls import Target, resolve, resolve_for_threads
from postroom.errors import PostroomError, SchemaError
from postroom.flow import Flow, run

__all__ = ["Engines"]

T = TypeVar("T")
TRIES = 8
# An answer must outlive a power cut: its client is told right after.
_PRAGMAS = ("PRAGMA busy_timeout = 30000", "PRAGMA synchronous = FULL")
CONNECT_SECONDS = 10.0


class Engines:
    """Engines for one database, made when first needed: for records and for transactions, for
    event loops and for threads."""

    def __init__(self, url: str, *, connections: int = 10) -> None:
        self.url = url
        self.target: Target = resolve(url)
        self._pool: dict[str, Any] = {
            "pool_size": connections,
            "max_overflow": connections,
            "pool_timeout": CONNECT_SECONDS * 3,
        }
        self._async: dict[bool, AsyncEngine] = {}
        self._sync: dict[bool, Engine] = {}
        self._turn = Lock()

    async def ask_async(self, make: Any) -> Any:
        """Run the flow that `make()` gives, on a connection of its own."""
        for attempt in range(1, TRIES + 1):
            try:
                self._require_file()
                async with self.engine_async(alone=True).connect() as connection:
                    return await connection.run_sync(_run, make())
            except PostroomError:
                raise
            except Exception as error:
                if attempt == TRIES or not is_conflict(error):
                    raise explain(error, self.target) from error
                await asyncio.sleep(0.01 * attempt)
        raise AssertionError("unreachable")

    def ask(self, make: Any) -> Any:
        """`ask_async` for threads."""
        for attempt in range(1, TRIES + 1):
            try:
                self._require_file()
                with self.engine(alone=True).connect() as connection:
                    return _run(connection, make())
            except PostroomError:
                raise
            except Exception as error:
                if attempt == TRIES or not is_conflict(error):
                    raise explain(error, self.target) from error
                time.sleep(0.01 * attempt)
        raise AssertionError("unreachable")

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
        """`alone`: every statement commits by itself."""
        if alone not in self._async:
            target = self.target
            pg = target.dialect == "postgresql"
            made = create_async_engine(
                target.url,
                connect_args=creator(target) if pg else target.connect_args,
                **self._isolation(alone),
                **self._pool,
            )
            self._set_up(made.sync_engine, alone)
            self._async[alone] = made
        return self._async[alone]

    def engine(self, *, alone: bool) -> Engine:
        """The same for threads."""
        with self._turn:
            if alone not in self._sync:
                target = resolve_for_threads(self.url)
                arguments = dict(target.connect_args)
                if target.dialect == "postgresql":
                    arguments["prepare_threshold"] = None  # a pooler may stand in between
                if target.dialect == "sqlite":
                    arguments["check_same_thread"] = False
                made = create_engine(
                    target.url, connect_args=arguments, **self._isolation(alone), **self._pool
                )
                self._set_up(made, alone)
                self._sync[alone] = made
            return self._sync[alone]

    async def close_async(self) -> None:
        """Give every connection up."""
        for engine in self._async.values():
            with suppress(Exception):
                await engine.dispose()
        self._async.clear()
        self.close()

    def close(self) -> None:
        """Give the connections of threads up."""
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

    def _set_up(self, engine: Engine, alone: bool) -> None:
        if self.target.dialect == "sqlite":
            event.listen(engine, "connect", _on_connect_sqlite)
            if not alone:
                event.listen(engine, "begin", _begin_immediate)


def _run(connection: Connection, flow: Flow[T]) -> T:
    return run(flow, SQLAlchemyLink(connection))


def _on_connect_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # we begin ourselves, and at once for real
    cursor = connection.cursor()
    for command in _PRAGMAS:
        cursor.execute(command)
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
