"""Doors to connections that users do not open themselves: pools and frameworks hand them out."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import psycopg2
import psycopg_pool
import pymysql
import sqlmodel
import wrapt
from dbutils.persistent_db import PersistentDB
from dbutils.pooled_db import PooledDB
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import make_url
from sqlalchemy.util import greenlet_spawn
from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelAsyncSession
from werkzeug.local import LocalProxy

import doors
from doors import (
    Door,
    Open,
    mysql_options,
    of_session,
    open_async_engine,
    open_engine,
    raw_savepoint,
    sqlalchemy_url,
)


@asynccontextmanager
async def flask_session(url: str, driver: str, alone: bool = False) -> AsyncIterator[Open]:
    """`db.session` of Flask-SQLAlchemy, in an application that has a second database too."""
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlalchemy_url(url, driver)
    app.config["SQLALCHEMY_BINDS"] = {"other": "sqlite://"}
    options = {"isolation_level": "AUTOCOMMIT"} if alone else {}
    db = SQLAlchemy(app, engine_options=options)
    with app.app_context():
        try:
            yield of_session(db.session, db.session)
        finally:
            db.session.remove()
            for engine in db.engines.values():
                engine.dispose()


@asynccontextmanager
async def sqlmodel_session(url: str, driver: str, alone: bool = False) -> AsyncIterator[Open]:
    async with open_engine(url, driver, alone) as engine:
        with sqlmodel.Session(engine) as tx:
            yield of_session(tx, tx)


@asynccontextmanager
async def sqlmodel_async_session(url: str, driver: str, alone: bool = False) -> AsyncIterator[Open]:
    async with open_async_engine(url, driver, alone) as engine, SQLModelAsyncSession(engine) as tx:
        yield of_session(tx, tx)


@asynccontextmanager
async def psycopg_pooled(url: str, pool: Any, alone: bool = False) -> AsyncIterator[Open]:
    with (
        pool(url, min_size=0, max_size=1, kwargs={"autocommit": alone}, open=True) as made,
        made.connection() as tx,
    ):
        yield Open(tx, tx.execute, tx.commit, tx.rollback, raw_savepoint(tx.execute))
        tx.rollback()


@asynccontextmanager
async def psycopg_pooled_async(url: str, pool: Any, alone: bool = False) -> AsyncIterator[Open]:
    async with (
        pool(url, min_size=0, max_size=1, kwargs={"autocommit": alone}, open=False) as made,
        made.connection() as tx,
    ):
        yield Open(tx, tx.execute, tx.commit, tx.rollback, raw_savepoint(tx.execute))
        await tx.rollback()


def of_driver(tx: Any, connection: Any) -> Open:
    """A synchronous connection of any driver, in the manner they have in common."""

    def run(statement: str) -> None:
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement)

    return Open(tx, run, connection.commit, connection.rollback, raw_savepoint(run))


@asynccontextmanager
async def raw_connection(url: str, driver: str, alone: bool = False) -> AsyncIterator[Open]:
    """`engine.raw_connection()`."""
    async with open_engine(url, driver, alone) as engine:
        with closing(engine.raw_connection()) as tx:
            yield of_driver(tx, tx)


@asynccontextmanager
async def raw_async_connection(
    url: str, driver: str, adapted: bool = False, alone: bool = False
) -> AsyncIterator[Open]:
    """`await engine.raw_connection()`, or what an event of the engine's pool receives."""
    async with open_async_engine(url, driver, alone) as engine, AsyncExitStack() as stack:
        raw = await engine.raw_connection()
        inside: Any = raw.driver_connection
        stack.push_async_callback(greenlet_spawn, raw.close)
        tx = raw.dbapi_connection if adapted else raw

        async def run(statement: str) -> None:
            if driver in ("asyncmy", "aiomysql"):
                async with inside.cursor() as cursor:
                    await cursor.execute(statement)
            else:
                await inside.execute(statement)

        if driver == "asyncpg":  # SQLAlchemy begins with its own first statement
            if not alone:
                await run("BEGIN")
            yield Open(
                tx,
                run,
                lambda: run("COMMIT; BEGIN"),
                lambda: run("ROLLBACK; BEGIN"),
                raw_savepoint(run),
            )
        else:
            yield Open(tx, run, inside.commit, inside.rollback, raw_savepoint(run))


class TracedConnection(wrapt.ObjectProxy):
    """As OpenTelemetry and others put it around what `connect` returns."""


@asynccontextmanager
async def proxied(url: str, opener: Any, proxy: Any, alone: bool = False) -> AsyncIterator[Open]:
    async with opener(url, alone=alone) as opened:
        opened.tx = proxy(opened.tx)
        yield opened


def dbutils_options(url: str, database: str, alone: bool) -> dict[str, Any]:
    if database == "postgresql":
        return {"creator": psycopg2, "dsn": url}
    if database == "sqlite":
        return {"creator": sqlite3, "database": make_url(url).database}
    options = mysql_options(url)
    return {"creator": pymysql, "database": options.pop("db"), "autocommit": alone, **options}


@asynccontextmanager
async def dbutils(url: str, server: str, style: str, alone: bool = False) -> AsyncIterator[Open]:
    """A connection of DBUtils that was told of its transaction, or `alone`: was not."""
    options = dbutils_options(url, server, alone)
    if style == "persistent":
        pool: Any = PersistentDB(closeable=True, **options)
    else:
        pool = PooledDB(maxshared=2 if style == "shared" else 0, **options)
    with closing(pool.connection()) as tx:
        if not alone:
            tx.begin()
        opened = of_driver(tx, tx)

        def commit() -> None:
            tx.commit()
            tx.begin()

        def rollback() -> None:
            tx.rollback()
            tx.begin()

        opened.do_commit, opened.do_rollback = commit, rollback
        yield opened
        tx.rollback()
    if style != "persistent":
        pool.close()


def _door(kind: str, database: str, way: str, door: Any, **options: Any) -> Door:
    return Door(kind, database, way, door, tuple(options.items()))


_SYNC = (
    ("postgresql", "psycopg2"),
    ("postgresql", "psycopg"),
    ("mariadb", "pymysql"),
    ("sqlite", "pysqlite"),
)
_ASYNC = (
    ("postgresql", "asyncpg"),
    ("postgresql", "psycopg"),
    ("mariadb", "asyncmy"),
    ("mariadb", "aiomysql"),
    ("sqlite", "aiosqlite"),
)
_FAIRY = "sqlalchemy._ConnectionFairy"

HANDED_DOORS = [
    *(
        _door("sqlalchemy.scoped_session", database, f"flask-{driver}", flask_session,
              driver=driver)
        for database, driver in _SYNC
    ),
    *(
        _door("sqlalchemy.Session", database, f"sqlmodel-{driver}", sqlmodel_session,
              driver=driver)
        for database, driver in _SYNC
    ),
    *(
        _door("sqlalchemy.AsyncSession", database, f"sqlmodel-{driver}", sqlmodel_async_session,
              driver=driver)
        for database, driver in _ASYNC
    ),
    *(
        _door("psycopg.Connection", "postgresql", pool.__name__, psycopg_pooled, pool=pool)
        for pool in (psycopg_pool.ConnectionPool, psycopg_pool.NullConnectionPool)
    ),
    *(
        _door("psycopg.AsyncConnection", "postgresql", pool.__name__, psycopg_pooled_async,
              pool=pool)
        for pool in (psycopg_pool.AsyncConnectionPool, psycopg_pool.AsyncNullConnectionPool)
    ),
    *(
        _door(_FAIRY, database, driver, raw_connection, driver=driver)
        for database, driver in _SYNC
    ),
    *(
        _door(_FAIRY, database, f"async-{driver}", raw_async_connection, driver=driver)
        for database, driver in _ASYNC
    ),
    *(
        _door("sqlalchemy.AdaptedConnection", database, driver, raw_async_connection,
              driver=driver, adapted=True)
        for database, driver in _ASYNC
    ),
    *(
        _door(kind, database, way, proxied, opener=opener, proxy=proxy)
        for kind, proxy in (
            ("wrapt.ObjectProxy", TracedConnection),
            ("werkzeug.LocalProxy", lambda tx: LocalProxy(lambda: tx)),
        )
        for database, way, opener in (
            ("postgresql", "psycopg2", doors.psycopg2_sync),
            ("postgresql", "asyncpg", doors.asyncpg_raw),
            ("mariadb", "pymysql", doors.pymysql_sync),
            ("sqlite", "sqlite3", doors.sqlite_sync),
        )
    ),
    *(
        _door(f"dbutils.{kind}", database, way, dbutils, server=database, style=way)
        for way, kind, databases in (
            ("dedicated", "PooledDedicatedDBConnection", ("postgresql", "mariadb", "sqlite")),
            ("shared", "PooledSharedDBConnection", ("postgresql",)),
            ("persistent", "SteadyDBConnection", ("postgresql", "mariadb")),
        )
        for database in databases
    ),
]  # fmt: skip
