"""The transaction a handler is given: an engine of our own, and whatever the user likes to work on.

Promise: only we commit it. A session's `commit` inside a handler writes to the transaction and does
not end it; a connection's is refused; and a handler that rolls back has failed, since the inbox's
row went with it. A sync handler gets the same by a synchronous driver, in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from postroom import failpoints
from postroom.databases.kinds import bare, find_kind
from postroom.databases.opening import creator
from postroom.databases.sqlalchemy import AsyncSQLAlchemyLink, SQLAlchemyLink
from postroom.databases.urls import Target, resolve_for_threads
from postroom.errors import WrongCall
from postroom.flow import Flow, Statement, run
from postroom.inbox.giving import Gives

__all__ = [
    "AsyncTransaction",
    "SyncTransaction",
    "ThreadTransaction",
    "Transactions",
    "is_closed",
    "transactions_of",
]

T = TypeVar("T")
GOODBYE_SECONDS = 5.0
PREPARED = 100  # statements that a connection keeps prepared
_MAY_COMMIT = "postroom_may_commit"
_FAILED = "postroom_failed"  # a statement on this connection has failed since it began
DEADLOCK = 1213  # MariaDB has then rolled back the whole transaction
# Commits must outlive a power cut: the broker is told right after.
_PRAGMAS = ("PRAGMA busy_timeout = {patience_ms}", "PRAGMA synchronous = FULL")
_MYSQL = "SET SESSION idle_transaction_timeout = {stuck_s}, innodb_lock_wait_timeout = {wait_s}"


class AsyncTransaction:
    """One transaction for async handlers."""

    def __init__(self, connection: AsyncConnection, gives: Gives) -> None:
        self.connection = connection
        self._gives = gives
        self._link = AsyncSQLAlchemyLink(connection)
        self._transaction = connection.sync_connection.get_transaction()  # type: ignore[union-attr]
        self._info: dict[str, Any] = connection.sync_connection.info  # type: ignore[union-attr]
        self._info.pop(_FAILED, None)
        self._given: Any = None
        self.committed = False

    async def carry_out(self, flow: Flow[T]) -> T:
        """Run a flow of ours in it."""
        return await self.connection.run_sync(lambda inner: run(flow, SQLAlchemyLink(inner)))

    async def call(self, function: Callable[[Any], Any]) -> None:
        """Call an async function with what the user wants to be given."""
        if self._gives == "session":
            # One for all that share the transaction: making one costs more than a statement.
            if self._given is None:
                self._given = AsyncSession(self.connection, expire_on_commit=False)
            await function(self._given)
        elif self._gives == "connection":
            await function(self.connection)
        else:
            if self._given is None:
                self._given = (await self.connection.get_raw_connection()).driver_connection
            with _without_commit(self._given):
                await function(self._given)
        await self._check()

    async def _check(self) -> None:
        """Refuse to go on if the handler rolled back, or passed over an error that did."""
        _check(self._transaction)
        if failed := self._info.pop(_FAILED, None):
            with _passed_over(self, failed):
                await self.carry_out(_probe())

    async def write_out(self) -> None:
        """Whatever is queued on the session is written; the transaction goes on."""
        if isinstance(self._given, AsyncSession):
            await self._given.commit()
            await self._check()
        elif self._gives == "driver" and self._given is not None:
            self._info[_FAILED] = "maybe"  # errors of the driver's own statements are not known
            await self._check()

    async def commit(self) -> None:
        """The one commit there is."""
        failpoints.hit("consumer.commit.before")
        self.connection.sync_connection.info[_MAY_COMMIT] = True  # type: ignore[union-attr]
        await self.connection.commit()
        self.committed = True
        failpoints.hit("consumer.commit.after")

    async def release(self) -> None:
        """Forget what was handed out."""
        if isinstance(self._given, AsyncSession):
            with suppress(Exception):
                await self._given.close()

    @property
    def broken(self) -> bool:
        """Whether the connection is gone: what failed on it is no handler's fault."""
        return _broken(self.connection.sync_connection)

    @property
    def active(self) -> bool:
        """Whether SQLAlchemy still knows of it."""
        return self._transaction is not None and self._transaction.is_active


class ThreadTransaction(Protocol):
    """One transaction for sync handlers, of any kind."""

    def carry_out(self, flow: Flow[T]) -> T: ...
    def call(self, function: Callable[[Any], Any]) -> None: ...
    def write_out(self) -> None: ...
    def commit(self) -> None: ...
    @property
    def broken(self) -> bool: ...


class SyncTransaction:
    """One transaction for sync handlers; everything of it happens in one thread."""

    def __init__(self, connection: Connection, gives: Gives) -> None:
        self.connection = connection
        self._gives = gives
        self._link = SQLAlchemyLink(connection)
        self._transaction = connection.get_transaction()
        connection.info.pop(_FAILED, None)
        self._given: Any = None
        self.committed = False

    def carry_out(self, flow: Flow[T]) -> T:
        """Run a flow of ours in it."""
        return run(flow, self._link)

    def call(self, function: Callable[[Any], Any]) -> None:
        """Call a function with what the user wants to be given."""
        if self._gives == "session":
            if self._given is None:
                self._given = Session(self.connection, expire_on_commit=False)
            function(self._given)
        elif self._gives == "connection":
            function(self.connection)
        else:
            if self._given is None:
                self._given = self.connection.connection.driver_connection
            with _without_commit(self._given):
                function(self._given)
        self._check()

    def _check(self) -> None:
        """As above."""
        _check(self._transaction)
        if failed := self.connection.info.pop(_FAILED, None):
            with _passed_over(self, failed):
                self.carry_out(_probe())

    def write_out(self) -> None:
        """As above."""
        if isinstance(self._given, Session):
            self._given.commit()
            self._check()
        elif self._gives == "driver" and self._given is not None:
            self.connection.info[_FAILED] = "maybe"
            self._check()

    def commit(self) -> None:
        """The one commit there is."""
        failpoints.hit("consumer.commit.before")
        self.connection.info[_MAY_COMMIT] = True
        self.connection.commit()
        self.committed = True
        failpoints.hit("consumer.commit.after")

    def release(self) -> None:
        """As above."""
        if isinstance(self._given, Session):
            with suppress(Exception):
                self._given.close()

    @property
    def broken(self) -> bool:
        """As above."""
        return _broken(self.connection)

    @property
    def active(self) -> bool:
        """As above."""
        return self._transaction is not None and self._transaction.is_active


class Transactions:
    """Where a consumer's transactions come from; both engines are made when first needed."""

    def __init__(
        self, url: str, target: Target, *, gives: Gives, connections: int, stuck_seconds: float
    ) -> None:
        self._url = url
        self._target = target
        self._gives = gives
        self._numbers = {
            "stuck_s": max(1, int(stuck_seconds)),
            "wait_s": max(1, int(stuck_seconds)) + 2,
            "patience_ms": int(stuck_seconds * 1000),
        }
        self._pool = {"pool_size": connections, "max_overflow": 2, "pool_timeout": stuck_seconds}
        self.pooled = True  # whether a pooler stands in between, as far as is known
        self._async_engine: AsyncEngine | None = None
        self._sync_engine: Engine | None = None
        # SQLite has one writer at a time, and who finds it taken sleeps before it looks again.
        alone = target.dialect == "sqlite"
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Lock() if alone else nullcontext()
        self._turn_in_thread: AbstractContextManager[Any] = (
            threading.Lock() if alone else nullcontext()
        )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncTransaction]:
        """A transaction that is rolled back unless it is committed inside."""
        async with self._turn, self._engine().connect() as connection:
            await connection.begin()
            tx = AsyncTransaction(connection, self._gives)
            try:
                yield tx
            finally:
                # After a commit that was refused SQLAlchemy takes it for ended: the connection must
                # not be given to others with what stands in it.
                if not tx.committed and not tx.active:
                    await connection.invalidate()
                await tx.release()

    @contextmanager
    def begin_sync(self) -> Iterator[ThreadTransaction]:
        """The same for a thread."""
        with self._turn_in_thread, self._engine_for_threads().connect() as connection:
            connection.begin()
            tx = SyncTransaction(connection, self._gives)
            try:
                yield tx
            finally:
                if not tx.committed and not tx.active:
                    connection.invalidate()
                tx.release()

    def look(self, flow: Flow[T]) -> T:
        """Run a flow that only reads where sync handlers work."""
        with self.begin_sync() as tx:
            return tx.carry_out(flow)

    def prepare_for_threads(self) -> None:
        """Find out now whether there is a synchronous driver."""
        self._engine_for_threads()

    async def close(self) -> None:
        """Give every connection up; never raises, never waits long."""
        if self._async_engine is not None:
            with suppress(Exception):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._async_engine.dispose()
        if self._sync_engine is not None:
            with suppress(Exception):
                self._sync_engine.dispose()

    def _engine(self) -> AsyncEngine:
        if self._async_engine is None:
            target = self._target
            self._async_engine = create_async_engine(
                target.url,
                connect_args=self._connect_args(),
                **self._isolation(),
                **self._pool,
            )
            self._set_up(self._async_engine.sync_engine)
        return self._async_engine

    def _connect_args(self) -> dict[str, Any]:
        target = self._target
        if target.dialect == "postgresql":
            return creator(target, prepared=0 if self.pooled else PREPARED)
        if target.dialect == "sqlite":
            from postroom.databases.aiosqlite import connect

            return {**target.connect_args, "async_creator_fn": connect}
        return target.connect_args

    def _engine_for_threads(self) -> Engine:
        if self._sync_engine is None:
            target = resolve_for_threads(self._url)
            connect_args = dict(target.connect_args)
            if target.dialect == "postgresql":
                connect_args["prepare_threshold"] = None  # a pooler may stand in between
            if target.dialect == "sqlite":
                connect_args["check_same_thread"] = False
            self._sync_engine = create_engine(
                target.url, connect_args=connect_args, **self._isolation(), **self._pool
            )
            self._set_up(self._sync_engine)
        return self._sync_engine

    def _isolation(self) -> dict[str, Any]:
        if self._target.dialect == "sqlite":
            return {}
        return {"isolation_level": "READ COMMITTED"}

    def _set_up(self, engine: Engine) -> None:
        event.listen(engine, "commit", _refuse_commit)
        event.listen(engine, "handle_error", _note_error)
        if self._target.dialect == "sqlite":
            event.listen(engine, "connect", self._on_connect_sqlite)
            event.listen(engine, "begin", _begin_immediate)
        elif self._target.dialect == "mysql":
            event.listen(engine, "connect", self._on_connect_mysql)

    def _on_connect_sqlite(self, connection: Any, _: Any) -> None:
        connection.isolation_level = None  # we begin ourselves, and at once for real
        self._set_limits(connection)

    def _on_connect_mysql(self, connection: Any, _: Any) -> None:
        self._set_limits(connection)

    def _set_limits(self, connection: Any) -> None:
        """How long a driver's connection waits, and how long its transaction may be silent."""
        commands = {"sqlite": _PRAGMAS, "mysql": (_MYSQL,)}.get(self._target.dialect, ())
        cursor = connection.cursor()
        for command in commands:
            cursor.execute(command.format(**self._numbers))
        cursor.close()


def _begin_immediate(connection: Connection) -> None:
    connection.info.pop(_MAY_COMMIT, None)
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _refuse_commit(connection: Connection) -> None:
    """Only we commit: the rows of other messages may stand in the same transaction."""
    if not connection.info.pop(_MAY_COMMIT, False):
        _refuse()


def _refuse(*_: Any) -> None:
    raise WrongCall(
        "a handler neither commits nor rolls back: its changes are committed with the inbox's row "
        "after it has returned, and undone when it raises an error"
    )


def _without_commit(driver: Any) -> AbstractContextManager[None]:
    """A driver's own connection whose `commit` and `rollback` are refused meanwhile. Where its
    class is sealed, as those of asyncmy and sqlite3 are, its user must know."""
    names = _hideable.get(type(driver))
    if names is None:
        names = _hideable[type(driver)] = tuple(filter(partial(_can_hide, driver), _ENDS))
    return _hidden(driver, names) if names else _NOTHING_HIDDEN


_ENDS = ("commit", "rollback")
_NOTHING_HIDDEN = nullcontext()
_hideable: dict[type, tuple[str, ...]] = {}  # of each class of connection


def _can_hide(driver: Any, name: str) -> bool:
    try:
        setattr(driver, name, getattr(driver, name))
        delattr(driver, name)
    except (AttributeError, TypeError):
        return False
    return True


@contextmanager
def _hidden(driver: Any, names: tuple[str, ...]) -> Iterator[None]:
    for name in names:
        setattr(driver, name, _refuse)
    try:
        yield
    finally:
        for name in names:
            delattr(driver, name)


def _check(transaction: Any) -> None:
    if not transaction.is_active:
        raise WrongCall(
            "the handler rolled its transaction back: raise an error instead, or use a savepoint"
        )


def _note_error(context: Any) -> None:
    """PostgreSQL and MariaDB may have ended the transaction, and answer COMMIT as if not."""
    if context.connection is not None:
        code = next(iter(context.original_exception.args), None)
        context.connection.info[_FAILED] = "ended" if code == DEADLOCK else "maybe"


def _probe() -> Flow[None]:
    """A statement that fails in a transaction that can only be rolled back."""
    yield Statement("postroom.inbox", "probe", {}, text="SELECT 1")


@contextmanager
def _passed_over(tx: AsyncTransaction | SyncTransaction, failed: str) -> Iterator[None]:
    said = (
        "the handler passed over an error of the database that ended its transaction: raise it, or "
        "use a savepoint around the part that may fail"
    )
    try:
        yield
    except Exception as error:
        if tx.broken:
            raise
        raise WrongCall(said) from error
    if failed == "ended":
        raise WrongCall(said)


def _broken(connection: Any) -> bool:
    if connection is None or connection.closed or connection.invalidated:
        return True
    return is_closed(connection.connection.driver_connection)


def is_closed(driver: Any) -> bool:
    """Whether a driver's own connection is gone."""
    driver = bare(driver, to_write=False)
    kind = find_kind(driver)
    library = kind.library if kind is not None else ""
    if library == "asyncpg":
        return bool(driver.is_closed())
    if library in ("psycopg", "psycopg2"):
        return bool(driver.closed)
    if library == "pymysql":
        return not driver.open
    if library == "MySQLdb":
        return not _answers(driver)
    if library in ("asyncmy", "aiomysql"):
        return bool(getattr(driver, "_closed", False) or getattr(driver, "_writer", 1) is None)
    return False


def _answers(driver: Any) -> bool:
    """mysqlclient does not note that its server is gone, and does not reconnect to ask."""
    try:
        driver.ping()
    except Exception:
        return False
    return True


def transactions_of(
    gives: Gives, alias: str | None, url: str, target: Target, **how: Any
) -> Transactions:
    """Where the transactions of a consumer come from; `alias` is that of Django's DATABASES."""
    if gives != "django":
        return Transactions(url, target, gives=gives, **how)
    from postroom.inbox.django import DjangoTransactions

    assert alias is not None
    return DjangoTransactions(alias, url, target, gives=gives, **how)
