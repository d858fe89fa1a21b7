"""What only some kinds of connection do, and what people give in place of one."""

import asyncio
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiomysql
import aiosqlite
import asyncpg
import psycopg
import psycopg2.extensions
import psycopg2.pool
import psycopg_pool
import pytest
from dbutils.pooled_db import PooledDB
from django.db import models
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from doors import mysql_options, odd_adapters, sqlalchemy_url
from postroom import Draft, Outbox, message
from postroom.databases import migrate
from postroom.errors import SeveralBinds, UnknownConnection, WouldCommitAlone
from stages import Stage, Stages

outbox = Outbox()


@pytest.fixture
def postgresql(stages: Stages) -> Stage:
    return stages["postgresql"]


# ── psycopg2 ───────────────────────────────────────────────────────────────────────────────────


def test_with_connection_begins_though_psycopg2_shows_it_nowhere(postgresql: Stage) -> None:
    with closing(psycopg2.connect(postgresql.url)) as connection:
        connection.autocommit = True
        with suppress(ZeroDivisionError), connection:
            outbox.publish(connection, b"no", type="t")
            raise ZeroDivisionError
        with connection:
            outbox.publish(connection, b"yes", type="t")
            assert postgresql.payloads() == []
        with pytest.raises(WouldCommitAlone):
            outbox.publish(connection, b"alone", type="t")
    assert postgresql.payloads() == [b"yes"]


def test_an_asynchronous_psycopg2_connection_is_refused(postgresql: Stage) -> None:
    with (
        closing(psycopg2.connect(postgresql.url, async_=True)) as connection,
        pytest.raises(UnknownConnection, match="made with async_=True"),
    ):
        outbox.publish(connection, b"", type="t")


def test_lists_registered_as_json_do_not_matter_through_sqlalchemy(postgresql: Stage) -> None:
    engine = create_engine(sqlalchemy_url(postgresql.url, "psycopg2"))
    with odd_adapters(), engine.begin() as connection:
        drafts = [Draft(payload=b"%d" % n, type="t", key=f"'{n}'") for n in range(3)]
        outbox.publish_many(connection, drafts)
    engine.dispose()
    assert postgresql.payloads() == [b"0", b"1", b"2"]
    assert [row["key"] for row in postgresql.messages()] == ["'0'", "'1'", "'2'"]


# ── Pools and wrappers ─────────────────────────────────────────────────────────────────────────


def test_a_connection_given_back_to_its_pool_is_named(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'a.db'}")
    raw = engine.raw_connection()
    raw.close()
    with pytest.raises(UnknownConnection, match="given back to its pool: take one"):
        outbox.publish(raw, b"", type="t")
    pool = PooledDB(sqlite3, database=str(tmp_path / "a.db"))
    pooled = pool.connection()
    pooled.close()
    with pytest.raises(UnknownConnection, match=r"call `pool\.connection\(\)` again"):
        outbox.publish(pooled, b"", type="t")
    pool.close()


def test_dbutils_reconnects_only_where_it_was_not_told_of_a_transaction(
    stages: Stages,
) -> None:
    """Why it is refused: with `begin` the lost connection is an error, without it nobody knows."""
    stage = stages["postgresql"]
    pool = PooledDB(psycopg2, dsn=stage.url)
    with closing(pool.connection()) as connection:
        connection.begin()
        outbox.publish(connection, b"lost with its transaction", type="t")
        stage.query("SELECT pg_terminate_backend(%s)", connection._con._con.info.backend_pid)
        with pytest.raises(psycopg2.Error):
            connection.cursor().execute("INSERT INTO thing VALUES ('b')")
    pool.close()
    assert (stage.things(), stage.payloads()) == ([], [])


async def test_an_aiosqlite_connection_that_is_not_open_is_named() -> None:
    with pytest.raises(UnknownConnection, match="this aiosqlite connection is not open"):
        await outbox.publish_async(aiosqlite.connect("nothing.db"), b"", type="t")


async def test_aiomysql_does_not_warn_of_a_taken_dedup_key(stages: Stages) -> None:
    stage = stages["mariadb"]
    connection = await aiomysql.connect(**mysql_options(stage.url))
    with closing(connection), warnings.catch_warnings():
        warnings.simplefilter("error")
        for expected in (False, True):
            published = await outbox.publish_async(connection, b"1", type="t", dedup_key="d")
            assert published.duplicate is expected
        await connection.commit()
    assert stage.payloads() == [b"1"]


def test_pymysql_in_the_place_of_mysqldb(stages: Stages) -> None:
    stage = stages["mariadb"]
    url = sqlalchemy_url(stage.url, "mysqldb").render_as_string(hide_password=False)
    program = f"""
import pymysql
pymysql.install_as_MySQLdb()
import MySQLdb
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from postroom import Outbox
outbox = Outbox()
with Session(create_engine({url!r})) as session:
    driver = session.connection().connection.driver_connection
    assert type(driver).__module__ == "pymysql.connections"
    outbox.publish(session, b"session", type="t")
    session.commit()
url = session.bind.url
where = dict(host=url.host, port=url.port, database=url.database)
connection = MySQLdb.connect(user=url.username, password=url.password, **where)
outbox.publish(connection, b"raw", type="t")
connection.commit()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert stage.payloads() == [b"session", b"raw"]


# ── Flask-SQLAlchemy with bind keys ────────────────────────────────────────────────────────────


@dataclass
class Shop:
    app: Flask
    db: Any
    order: Any
    audit: Any
    urls: dict[str, str]

    def stored(self, name: str) -> tuple[int, int]:
        """How many orders or audits and how many messages one of the databases holds."""
        table = {"main": "orders", "audit": "audits"}[name]
        with closing(sqlite3.connect(self.urls[name].removeprefix("sqlite:///"))) as connection:
            return tuple(
                connection.execute(f"SELECT count(*) FROM {each}").fetchone()[0]
                for each in (table, "postroom_outbox")
            )


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    urls = {name: f"sqlite:///{tmp_path / name}.db" for name in ("main", "audit")}
    for url in urls.values():
        asyncio.run(migrate.install(url))
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = urls["main"]
    app.config["SQLALCHEMY_BINDS"] = {"audit": urls["audit"]}
    db: Any = SQLAlchemy(app)

    class Order(db.Model):
        __tablename__ = "orders"
        id = db.Column(db.Integer, primary_key=True)

    class Audit(db.Model):
        __tablename__ = "audits"
        __bind_key__ = "audit"
        id = db.Column(db.Integer, primary_key=True)

    with app.app_context():
        db.create_all()
        yield Shop(app, db, Order, Audit, urls)
        db.session.remove()
        for engine in db.engines.values():
            engine.dispose()


def test_a_flask_session_on_one_database_needs_nothing_said(shop: Shop) -> None:
    shop.db.session.add(shop.order(id=1))
    outbox.publish(shop.db.session, b"1", type="t")
    shop.db.session.commit()
    assert shop.stored("main") == (1, 1)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_flask_session_on_several_databases_must_say_which(shop: Shop, flushed: bool) -> None:
    session = shop.db.session
    session.add(shop.audit(id=1))
    if flushed:
        session.flush()
        with pytest.raises(SeveralBinds, match=r"Outbox\(bind=engine\)"):
            outbox.publish(session, b"1", type="t")
    else:
        outbox.publish(session, b"1", type="t")
        with pytest.raises(SeveralBinds, match=r"Outbox\(bind=engine\)"):
            session.commit()
    session.rollback()
    assert (shop.stored("main"), shop.stored("audit")) == ((0, 0), (0, 0))


@pytest.mark.parametrize(("key", "name"), [(None, "main"), ("audit", "audit")])
def test_a_bind_key_is_chosen_by_its_engine(shop: Shop, key: str | None, name: str) -> None:
    mine = Outbox(bind=shop.db.engines[key])
    shop.db.session.add_all([shop.order(id=1), shop.audit(id=1)])
    mine.publish(shop.db.session, b"1", type="t")
    shop.db.session.commit()
    assert {each: shop.stored(each)[1] for each in shop.urls} == {
        each: int(each == name) for each in shop.urls
    }


# ── What is no connection ──────────────────────────────────────────────────────────────────────


class Base(DeclarativeBase): ...


class Row(Base):
    __tablename__ = "row"
    id: Mapped[int] = mapped_column(primary_key=True)


@message("handed.v1")
@dataclass
class Handed:
    n: int


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "Engine": (lambda: create_engine("sqlite://"), "with engine.begin() as connection:"),
    "AsyncEngine": (
        lambda: create_async_engine("sqlite+aiosqlite://"),
        "async with engine.begin() as connection:",
    ),
    "sessionmaker": (sessionmaker, "with Session() as session:"),
    "async_sessionmaker": (async_sessionmaker, "async with Session() as session:"),
    "sqlalchemy pool": (lambda: create_engine("sqlite://").pool, "with engine.begin()"),
    "psycopg_pool": (
        lambda: psycopg_pool.ConnectionPool("", open=False),
        "`with pool.connection() as connection:`",
    ),
    "null pool": (
        lambda: psycopg_pool.NullConnectionPool("", open=False),
        "`with pool.connection() as connection:`",
    ),
    "async psycopg_pool": (
        lambda: psycopg_pool.AsyncConnectionPool("", open=False),
        "`async with pool.connection() as connection:`",
    ),
    "psycopg2 pool": (lambda: psycopg2.pool.SimpleConnectionPool(0, 1), "pool.getconn()"),
    "asyncpg pool": (lambda: asyncpg.create_pool("postgresql://h"), "async with pool.acquire()"),
    "asyncpg acquire": (
        lambda: asyncpg.create_pool("postgresql://h").acquire(),
        "has not been entered",
    ),
    "aiomysql pool": (
        lambda: aiomysql.Pool(0, 1, False, -1, asyncio.get_running_loop()),
        "async with pool.acquire() as connection:",
    ),
    "dbutils pool": (lambda: PooledDB(sqlite3, database=":memory:"), "pool.connection()"),
    "cursor": (lambda: sqlite3.connect(":memory:").cursor(), "the cursor's connection"),
    "transaction": (
        lambda: create_engine("sqlite://").connect().begin(),
        "that the transaction is of",
    ),
    "begin not entered": (lambda: create_engine("sqlite://").begin(), "has not been entered"),
    "flask": (lambda: SQLAlchemy(), "give `db.session`"),
    "mapped row": (lambda: Row(id=1), "session or connection comes first"),
    "message": (lambda: Handed(1), "session or connection comes first"),
    "django model": (lambda: object.__new__(models.Model), "inside `transaction.atomic()`"),
    "generator": (lambda: (each for each in ()), "`Depends` hands it to you"),
    "url": (lambda: "sqlite:///x.db", "builtins.str is none: open a session or connection"),
    "None": (lambda: None, "give the session or connection of your transaction"),
    "anything": (object, "give it one of sqlalchemy.Session, "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_what_is_no_connection_is_told_what_to_give(mistake: str) -> None:
    make, remedy = MISTAKES[mistake]
    given = make()
    with pytest.raises(UnknownConnection) as refused:
        outbox.publish(given, b"", type="t")
    assert remedy in str(refused.value)
    with pytest.raises(UnknownConnection):
        await outbox.publish_async(given, b"", type="t")


async def test_a_connection_that_was_not_awaited_is_named() -> None:
    coroutine = psycopg.AsyncConnection.connect("postgresql://nowhere")
    with pytest.raises(UnknownConnection, match="has not been awaited"):
        await outbox.publish_async(coroutine, b"", type="t")
    coroutine.close()
