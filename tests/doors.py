"""Every kind of connection behind one face, so that one suite runs on all of them.

A `Door` opens a connection of one kind to one database, in one of the ways users set them up; what
it opens (`Open`) executes, commits, rolls back and makes savepoints alike.
"""

import inspect
import json
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiomysql
import aiosqlite
import asyncmy
import asyncmy.cursors
import asyncpg
import psycopg
import psycopg.rows
import psycopg2
import psycopg2.extensions
import psycopg2.extras
import pymysql
import pymysql.cursors
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

import django_doors
from postroom import Outbox, Published
from postroom.databases.kinds import bare, kind_of, link_of
from servers import leave_out

Call = Callable[..., Any]


async def answer(value: Any) -> Any:
    """The value itself, or what awaiting it gives."""
    return await value if inspect.isawaitable(value) else value


@dataclass
class Savepoint:
    rollback: Call
    release: Call


@dataclass
class Open:
    """An open connection: `tx` is what the user gives to `publish`."""

    tx: Any
    run: Call  # one SQL statement
    do_commit: Call
    do_rollback: Call
    do_savepoint: Call

    @property
    def is_async(self) -> bool:
        return kind_of(bare(self.tx, to_write=False)).is_async

    async def execute(self, statement: str) -> None:
        await answer(self.run(statement))

    async def commit(self) -> None:
        await answer(self.do_commit())

    async def rollback(self) -> None:
        await answer(self.do_rollback())

    async def savepoint(self) -> Savepoint:
        return await answer(self.do_savepoint())

    def link(self) -> Any:
        return link_of(self.tx)

    async def call(self, call: Call, *args: Any, **how: Any) -> Any:
        """A call that takes `tx`, made where the connection may be used."""
        return await answer(call(*args, **how))

    async def publish(self, outbox: Outbox, payload: Any, **wishes: Any) -> Published:
        publish = outbox.publish_async if self.is_async else outbox.publish
        return await self.call(publish, self.tx, payload, **wishes)

    async def publish_many(self, outbox: Outbox, drafts: list[Any], **how: Any) -> list[Published]:
        publish_many = outbox.publish_many_async if self.is_async else outbox.publish_many
        return await self.call(publish_many, self.tx, drafts, **how)

    async def was_committed(self, outbox: Outbox, message: Any) -> bool:
        was_committed = outbox.was_committed_async if self.is_async else outbox.was_committed
        return await self.call(was_committed, self.tx, message)


class Plain(Open):
    """Publishes with the plain call, which queues on an `AsyncSession`."""

    async def publish(self, outbox: Outbox, payload: Any, **wishes: Any) -> Published:
        return outbox.publish(self.tx, payload, **wishes)

    async def publish_many(self, outbox: Outbox, drafts: list[Any], **how: Any) -> list[Published]:
        return outbox.publish_many(self.tx, drafts, **how)


@dataclass
class Threaded(Open):
    """Does everything in the thread that the connection belongs to."""

    thread: django_doors.Thread

    def link(self) -> Any:
        return self.thread.link(self.tx)

    async def call(self, call: Call, *args: Any, **how: Any) -> Any:
        return await self.thread(call, *args, **how)


Opener = Callable[..., AbstractAsyncContextManager[Open]]


@dataclass(frozen=True)
class Door:
    kind: str
    database: str
    way: str
    opener: Opener
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}-{self.database}-{self.way}"

    def open(self, url: str, *, alone: bool = False) -> AbstractAsyncContextManager[Open]:
        """Open it; `alone`: as one that commits every statement by itself."""
        return self.opener(url, alone=alone, **dict(self.options))


def raw_savepoint(run: Call) -> Call:
    async def make() -> Savepoint:
        name = f"s{uuid.uuid4().hex[:8]}"
        await answer(run(f"SAVEPOINT {name}"))
        return Savepoint(
            lambda: answer(run(f"ROLLBACK TO SAVEPOINT {name}")),
            lambda: answer(run(f"RELEASE SAVEPOINT {name}")),
        )

    return make


def sqlalchemy_savepoint(begin_nested: Call) -> Call:
    async def make() -> Savepoint:
        nested = await answer(begin_nested())
        return Savepoint(lambda: answer(nested.rollback()), lambda: answer(nested.commit()))

    return make


def sqlalchemy_url(url: str, driver: str) -> Any:
    parsed = make_url(url)
    return parsed.set(drivername=f"{parsed.drivername}+{driver}")


def _engine_options(alone: bool) -> dict[str, Any]:
    return {"poolclass": NullPool} | ({"isolation_level": "AUTOCOMMIT"} if alone else {})


@asynccontextmanager
async def open_engine(url: str, driver: str, alone: bool) -> AsyncIterator[Any]:
    if driver == "mysqldb":
        mysqlclient()
    engine = create_engine(sqlalchemy_url(url, driver), **_engine_options(alone))
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def open_async_engine(url: str, driver: str, alone: bool) -> AsyncIterator[Any]:
    engine = create_async_engine(sqlalchemy_url(url, driver), **_engine_options(alone))
    try:
        yield engine
    finally:
        await engine.dispose()


def of_session(tx: Any, session: Any, cls: type[Open] = Open) -> Open:
    async def run(statement: str) -> None:
        connection = await answer(session.connection())
        await answer(connection.exec_driver_sql(statement))

    return cls(
        tx, run, session.commit, session.rollback, sqlalchemy_savepoint(session.begin_nested)
    )


@asynccontextmanager
async def session(
    url: str, driver: str, scoped: bool = False, alone: bool = False
) -> AsyncIterator[Open]:
    async with open_engine(url, driver, alone) as engine:
        if scoped:
            registry = scoped_session(sessionmaker(engine))
            try:
                yield of_session(registry, registry)
            finally:
                registry.remove()
        else:
            with Session(engine) as tx:
                yield of_session(tx, tx)


@asynccontextmanager
async def async_session(
    url: str, driver: str, scoped: bool = False, plain: bool = False, alone: bool = False
) -> AsyncIterator[Open]:
    cls = Plain if plain else Open
    async with open_async_engine(url, driver, alone) as engine:
        if scoped:
            registry = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
            try:
                yield of_session(registry, registry(), cls)
            finally:
                await registry.remove()
        else:
            async with AsyncSession(engine) as tx:
                yield of_session(tx, tx, cls)


@asynccontextmanager
async def core(url: str, driver: str, alone: bool = False) -> AsyncIterator[Open]:
    async with open_engine(url, driver, alone) as engine:
        with engine.connect() as tx:
            nested = sqlalchemy_savepoint(tx.begin_nested)
            yield Open(tx, tx.exec_driver_sql, tx.commit, tx.rollback, nested)


@asynccontextmanager
async def async_core(url: str, driver: str, alone: bool = False) -> AsyncIterator[Open]:
    async with open_async_engine(url, driver, alone) as engine, engine.connect() as tx:
        nested = sqlalchemy_savepoint(tx.begin_nested)
        yield Open(tx, tx.exec_driver_sql, tx.commit, tx.rollback, nested)


@asynccontextmanager
async def psycopg_sync(url: str, alone: bool = False, **how: Any) -> AsyncIterator[Open]:
    with psycopg.connect(url, autocommit=alone, **how) as tx:
        yield Open(tx, tx.execute, tx.commit, tx.rollback, raw_savepoint(tx.execute))
        tx.rollback()


@asynccontextmanager
async def psycopg_async(url: str, alone: bool = False, **how: Any) -> AsyncIterator[Open]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=alone, **how) as tx:
        yield Open(tx, tx.execute, tx.commit, tx.rollback, raw_savepoint(tx.execute))
        await tx.rollback()


@contextmanager
def odd_adapters() -> Iterator[None]:
    """What applications register with psycopg2 for the whole process, and worse."""
    extensions = psycopg2.extensions
    before = dict(extensions.adapters)
    psycopg2.extras.register_uuid()
    for each in (list, dict):
        extensions.register_adapter(each, psycopg2.extras.Json)
    for each in (str, bytes, int):
        extensions.register_adapter(each, lambda _: extensions.AsIs("'odd'"))
    try:
        yield
    finally:
        extensions.adapters.clear()
        extensions.adapters.update(before)


def set_odd_casts(connection: Any) -> None:
    """Casts on the connection for every type there is to read."""
    oids = (16, 17, 20, 21, 23, 25, 1043, 2950)
    odd = psycopg2.extensions.new_type(oids, "ODD", lambda value, cursor: object())
    psycopg2.extensions.register_type(odd, connection)


class OwnConnection(psycopg2.extensions.connection):
    """A subclass as applications write them, with a cursor of its own making."""

    def cursor(self, *args: Any, **how: Any) -> Any:
        return super().cursor(*args, **{"cursor_factory": psycopg2.extras.RealDictCursor} | how)


@asynccontextmanager
async def psycopg2_sync(
    url: str, odd: bool = False, alone: bool = False, **how: Any
) -> AsyncIterator[Open]:
    def run(statement: str) -> None:
        with tx.cursor() as made:
            made.execute(statement)

    with closing(psycopg2.connect(url, **how)) as tx, odd_adapters() if odd else nullcontext():
        tx.autocommit = alone
        if odd:
            set_odd_casts(tx)
        yield Open(tx, run, tx.commit, tx.rollback, raw_savepoint(run))


async def set_codecs(connection: Any) -> None:
    """What many applications set on every asyncpg connection."""
    for name in ("json", "jsonb"):
        await connection.set_type_codec(
            name, schema="pg_catalog", encoder=json.dumps, decoder=json.loads
        )
    await connection.set_type_codec(
        "uuid", schema="pg_catalog", encoder=lambda u: u.hex, decoder=uuid.UUID
    )


@asynccontextmanager
async def asyncpg_raw(
    url: str, codecs: bool = False, pool: bool = False, alone: bool = False
) -> AsyncIterator[Open]:
    init = set_codecs if codecs else None
    async with AsyncExitStack() as stack:
        if pool:
            made = await stack.enter_async_context(
                asyncpg.create_pool(url, min_size=1, max_size=2, init=init)
            )
            tx = await stack.enter_async_context(made.acquire())
        else:
            tx = await asyncpg.connect(url)
            stack.push_async_callback(tx.close)
            if init:
                await init(tx)
        run = tx.execute
        if not alone:
            await run("BEGIN")
        yield Open(
            tx,
            run,
            lambda: run("COMMIT; BEGIN"),
            lambda: run("ROLLBACK; BEGIN"),
            raw_savepoint(run),
        )
        if not alone:
            await run("ROLLBACK")


@asynccontextmanager
async def sqlite_sync(
    url: str, row_factory: Any = None, text_factory: Any = str, alone: bool = False, **how: Any
) -> AsyncIterator[Open]:
    how |= {"isolation_level": None} if alone else {}
    tx = sqlite3.connect(make_url(url).database, **how)
    tx.row_factory = row_factory
    tx.text_factory = text_factory
    with closing(tx):
        yield Open(tx, tx.execute, tx.commit, tx.rollback, raw_savepoint(tx.execute))


@asynccontextmanager
async def sqlite_async(
    url: str, row_factory: Any = None, text_factory: Any = str, alone: bool = False
) -> AsyncIterator[Open]:
    how: Any = {"isolation_level": None} if alone else {}
    async with aiosqlite.connect(make_url(url).database, **how) as tx:
        tx.row_factory = row_factory
        tx.text_factory = text_factory
        yield Open(tx, tx.execute, tx.commit, tx.rollback, raw_savepoint(tx.execute))


def mysql_options(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password,
        "db": parts.path[1:],
        "charset": "utf8mb4",
    }


class OwnMysqlConnection(pymysql.Connection):
    """A subclass as applications write them."""


@asynccontextmanager
async def pymysql_sync(
    url: str,
    cursor: Any = pymysql.cursors.Cursor,
    connect: Any = pymysql.connect,
    alone: bool = False,
) -> AsyncIterator[Open]:
    options = mysql_options(url)
    options["database"] = options.pop("db")
    tx = connect(**options, autocommit=alone, cursorclass=cursor)

    def run(statement: str) -> None:
        with tx.cursor() as made:
            made.execute(statement)

    with closing(tx):
        yield Open(tx, run, tx.commit, tx.rollback, raw_savepoint(run))


def mysqlclient() -> Any:
    """Its module; what needs it is left out where it could not be built."""
    try:
        import MySQLdb.cursors
    except ImportError:
        leave_out("mysqlclient is not installed; scripts/install-mysqlclient builds it")
    return MySQLdb


@asynccontextmanager
async def mysqlclient_sync(
    url: str, cursor: str = "Cursor", alone: bool = False
) -> AsyncIterator[Open]:
    library = mysqlclient()
    options = mysql_options(url)
    options["database"] = options.pop("db")
    tx = library.connect(**options, cursorclass=getattr(library.cursors, cursor))
    tx.autocommit(alone)

    def run(statement: str) -> None:
        with tx.cursor() as made:
            made.execute(statement)

    with closing(tx):
        yield Open(tx, run, tx.commit, tx.rollback, raw_savepoint(run))


@asynccontextmanager
async def mysql_async(
    url: str, library: Any, cursor: Any = None, pool: bool = False, alone: bool = False
) -> AsyncIterator[Open]:
    name = "cursor_cls" if library is asyncmy else "cursorclass"
    how = mysql_options(url) | ({name: cursor} if cursor else {}) | {"autocommit": alone}

    async def run(statement: str) -> None:
        async with tx.cursor() as made:
            await made.execute(statement)

    async with AsyncExitStack() as stack:
        if pool:
            made = await library.create_pool(minsize=1, maxsize=1, **how)
            stack.push_async_callback(made.wait_closed)
            stack.callback(made.close)
            tx = await stack.enter_async_context(made.acquire())
        else:
            tx = await library.connect(**how)
            stack.callback(tx.close)
        yield Open(tx, run, tx.commit, tx.rollback, raw_savepoint(run))
        if pool and not alone:
            await tx.rollback()  # aiomysql's pool drops a connection that is in a transaction


@asynccontextmanager
async def django_connection(
    url: str, by_hand: bool = False, proxy: bool = False, alone: bool = False
) -> AsyncIterator[Open]:
    def make(thread: Any, blocks: Any, tx: Any) -> Open:
        async def savepoint() -> Savepoint:
            await thread(blocks.begin)
            return Savepoint(
                lambda: thread(blocks.end, commit=False), lambda: thread(blocks.end, commit=True)
            )

        return Threaded(
            tx,
            partial(thread, blocks.run),
            partial(thread, blocks.again, commit=True),
            partial(thread, blocks.again, commit=False),
            raw_savepoint(partial(thread, blocks.run)) if by_hand else savepoint,
            thread,
        )

    async with django_doors.opened(
        url, make, by_hand=by_hand and not alone, proxy=proxy, alone=alone
    ) as opened:
        yield opened


def _door(kind: str, database: str, way: str, opener: Opener, **options: Any) -> Door:
    return Door(kind, database, way, opener, tuple(options.items()))


def _sqlalchemy_doors() -> list[Door]:
    doors = []
    for database, drivers in (
        ("postgresql", ("psycopg2", "psycopg")),
        ("mariadb", ("pymysql", "mysqldb")),
        ("sqlite", ("pysqlite",)),
    ):
        for driver in drivers:
            doors += [
                _door("sqlalchemy.Session", database, driver, session, driver=driver),
                _door("sqlalchemy.Connection", database, driver, core, driver=driver),
                _door(
                    "sqlalchemy.scoped_session", database, driver, session,
                    driver=driver, scoped=True,
                ),
            ]  # fmt: skip
    for database, drivers in (
        ("postgresql", ("asyncpg", "psycopg")),
        ("mariadb", ("asyncmy", "aiomysql")),
        ("sqlite", ("aiosqlite",)),
    ):
        for driver in drivers:
            doors += [
                _door("sqlalchemy.AsyncSession", database, driver, async_session, driver=driver),
                _door("sqlalchemy.AsyncConnection", database, driver, async_core, driver=driver),
                _door(
                    "sqlalchemy.AsyncSession", database, f"{driver}-plain", async_session,
                    driver=driver, plain=True,
                ),
                _door(
                    "sqlalchemy.async_scoped_session", database, driver, async_session,
                    driver=driver, scoped=True, plain=True,
                ),
            ]  # fmt: skip
    return doors


def _django_doors() -> list[Door]:
    wrapper, proxy = "django.BaseDatabaseWrapper", "django.ConnectionProxy"
    return [
        door
        for database in ("postgresql", "mariadb", "sqlite")
        for door in (
            _door(wrapper, database, "atomic", django_connection),
            _door(wrapper, database, "by_hand", django_connection, by_hand=True),
            _door(proxy, database, "atomic", django_connection, proxy=True),
        )
    ]


DOORS = [
    *_sqlalchemy_doors(),
    *_django_doors(),
    _door("psycopg.Connection", "postgresql", "default", psycopg_sync),
    _door(
        "psycopg.Connection", "postgresql", "dict_row", psycopg_sync,
        row_factory=psycopg.rows.dict_row, cursor_factory=psycopg.ClientCursor,
    ),
    _door("psycopg.AsyncConnection", "postgresql", "default", psycopg_async),
    _door(
        "psycopg.AsyncConnection", "postgresql", "dict_row", psycopg_async,
        row_factory=psycopg.rows.dict_row,
    ),
    _door("psycopg2.connection", "postgresql", "default", psycopg2_sync),
    _door("psycopg2.connection", "postgresql", "odd", psycopg2_sync, odd=True),
    _door(
        "psycopg2.connection", "postgresql", "subclass", psycopg2_sync,
        connection_factory=OwnConnection,
    ),
    *(
        _door(
            "psycopg2.connection", "postgresql", name, psycopg2_sync,
            cursor_factory=getattr(psycopg2.extras, name),
        )
        for name in ("DictCursor", "RealDictCursor", "NamedTupleCursor")
    ),
    _door("asyncpg.Connection", "postgresql", "default", asyncpg_raw),
    _door("asyncpg.Connection", "postgresql", "codecs", asyncpg_raw, codecs=True),
    _door("asyncpg.PoolConnectionProxy", "postgresql", "default", asyncpg_raw, pool=True),
    _door(
        "asyncpg.PoolConnectionProxy", "postgresql", "codecs", asyncpg_raw, pool=True, codecs=True
    ),
    _door("sqlite3.Connection", "sqlite", "default", sqlite_sync),
    _door("sqlite3.Connection", "sqlite", "Row", sqlite_sync, row_factory=sqlite3.Row),
    _door("sqlite3.Connection", "sqlite", "bytes", sqlite_sync, text_factory=bytes),
    _door("aiosqlite.Connection", "sqlite", "default", sqlite_async),
    _door("aiosqlite.Connection", "sqlite", "Row", sqlite_async, row_factory=sqlite3.Row),
    _door("aiosqlite.Connection", "sqlite", "bytes", sqlite_async, text_factory=bytes),
    _door("pymysql.Connection", "mariadb", "default", pymysql_sync),
    _door(
        "pymysql.Connection", "mariadb", "DictCursor", pymysql_sync,
        cursor=pymysql.cursors.DictCursor,
    ),
    _door("pymysql.Connection", "mariadb", "subclass", pymysql_sync, connect=OwnMysqlConnection),
    _door("MySQLdb.Connection", "mariadb", "default", mysqlclient_sync),
    _door("MySQLdb.Connection", "mariadb", "DictCursor", mysqlclient_sync, cursor="DictCursor"),
    _door("MySQLdb.Connection", "mariadb", "SSCursor", mysqlclient_sync, cursor="SSCursor"),
    _door("asyncmy.Connection", "mariadb", "default", mysql_async, library=asyncmy),
    _door(
        "asyncmy.Connection", "mariadb", "DictCursor", mysql_async,
        library=asyncmy, cursor=asyncmy.cursors.DictCursor,
    ),
    _door("aiomysql.Connection", "mariadb", "default", mysql_async, library=aiomysql),
    _door(
        "aiomysql.Connection", "mariadb", "DictCursor", mysql_async,
        library=aiomysql, cursor=aiomysql.DictCursor,
    ),
    *(
        _door(
            f"{library.__name__}.Connection", "mariadb", "pool", mysql_async,
            library=library, pool=True,
        )
        for library in (asyncmy, aiomysql)
    ),
]  # fmt: skip
