"""A database with the outbox installed, a broker in memory, and a plain look at both.

One suite runs on every database: what differs between them (drivers, quoting, times) is in here.
"""

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from sqlalchemy import make_url

from postroom import Outbox, signals
from postroom.brokers import memory
from postroom.brokers.memory import MemoryBroker
from postroom.databases import migrate
from postroom.messages import Draft, Message
from postroom.outbox.relay import Relay
from postroom.retry import RetryPolicy

QUICK: dict[str, Any] = {
    "lease_seconds": 6,
    "send_timeout_seconds": 1,
    "poll_max_seconds": 0.05,
    "horizon_seconds": 0.005,
}
QUICK_RETRY = RetryPolicy((0.03,), attempts=3)
TABLES = ("outbox", "held", "delayed", "dead_letter", "archive", "lane_batch", "dedup", "lane")

# Two topics' worth of keys that share a lane, and one that does not, would be luck: `note` keys are
# spread by CRC-32 like anyone's.


def note(key: str | None, number: int, **wishes: Any) -> Draft:
    """A message whose payload is its number."""
    wishes = {"topic": "orders", "type": "note"} | wishes
    return Draft(payload=number, key=key, **wishes)


def told(messages: list[Message]) -> list[tuple[str | None, int]]:
    """What a broker received, as keys and numbers."""
    return [(message.key, int(message.payload)) for message in messages]


def by_key(messages: list[Message]) -> dict[str | None, list[int]]:
    """What a broker received, as the numbers of each key in their order."""
    keys: dict[str | None, list[int]] = {}
    for message in messages:
        keys.setdefault(message.key, []).append(int(message.payload))
    return keys


def first_by_key(messages: list[Message]) -> dict[str | None, list[int]]:
    """As `by_key`, without what came again: a later delivery of an id is a duplicate."""
    seen: set[str] = set()
    fresh = [m for m in messages if m.id not in seen and not seen.add(m.id)]  # type: ignore[func-returns-value]
    return by_key(fresh)


@dataclass
class Post:
    """One database, one broker."""

    url: str
    broker: MemoryBroker
    outbox: Outbox = field(default_factory=Outbox)
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _look: Any = None

    @property
    def dialect(self) -> str:
        return {"postgresql": "postgresql", "mysql": "mariadb"}.get(
            self.url.split(":")[0], "sqlite"
        )

    @property
    def broker_url(self) -> str:
        return f"memory://{self.broker.name}"

    def relay(self, broker: Any = None, **how: Any) -> Relay:
        """A relay in a hurry."""
        how = QUICK | {"retry": QUICK_RETRY} | how
        return Relay(self.url, broker or self.broker_url, **how)

    def connect(self, *, autocommit: bool = False) -> Any:
        """A connection of the plain driver, as an application has it."""
        if self.dialect == "sqlite":
            path = make_url(self.url).database or ""
            level = None if autocommit else "DEFERRED"
            return sqlite3.connect(path, isolation_level=level, timeout=20)
        if self.dialect == "postgresql":
            return psycopg.connect(self.url, autocommit=autocommit)
        parts = urlsplit(self.url)
        connection = pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.path[1:],
            charset="utf8mb4",
            autocommit=autocommit,
        )
        if not autocommit:
            with connection.cursor() as cursor:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return connection

    def publish(self, *drafts: Draft) -> list[str]:
        """Publish in one transaction and commit it; returns the ids."""
        with closing(self.connect()) as tx:
            published = self.outbox.publish_many(tx, drafts)
            tx.commit()
        return [each.id for each in published]

    async def put(self, *drafts: Draft) -> list[str]:
        """`publish` while a relay runs in this loop: SQLite's one writer may be waiting for it."""
        return await asyncio.to_thread(self.publish, *drafts)

    async def change(self, statement: str, *values: Any) -> None:
        """`sql` for a write while a relay runs in this loop."""

        def write() -> None:
            with closing(self.connect(autocommit=True)) as connection:
                self._execute(connection, statement, values)

        await asyncio.to_thread(write)

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement by itself; {p} is the prefix of our tables and {key} the column."""
        if self._look is None:
            self._look = self.connect(autocommit=True)
        return self._execute(self._look, statement, values)

    def _execute(
        self, connection: Any, statement: str, values: tuple[Any, ...]
    ) -> list[tuple[Any, ...]]:
        prefix = "postroom." if self.dialect == "postgresql" else "postroom_"
        column = "`key`" if self.dialect == "mariadb" else "key"
        statement = statement.replace("{p}", prefix).replace("{key}", column)
        cursor = connection.cursor()
        try:
            if self.dialect == "sqlite":
                cursor.execute(statement.replace("%s", "?"), values)
            else:
                cursor.execute(statement, values or None)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        finally:
            cursor.close()

    def count(self, table: str) -> int:
        return int(self.sql(f"SELECT count(*) FROM {{p}}{table}")[0][0])

    def numbers(self, table: str) -> list[int]:
        """The payloads that stand in a table, in order."""
        rows = self.sql(f"SELECT payload FROM {{p}}{table} ORDER BY position")
        return [int(bytes(row[0])) for row in rows]

    def everything(self) -> dict[str, list[tuple[Any, ...]]]:
        """All rows of all tables, to see whether anything changed."""
        return {
            table: sorted(self.sql(f"SELECT * FROM {{p}}{table}"), key=repr) for table in TABLES
        }

    def empty(self) -> bool:
        """Whether nothing waits for delivery any more."""
        return not any(self.count(table) for table in ("outbox", "held", "delayed"))

    def owners(self) -> dict[int, str | None]:
        return dict(self.sql("SELECT lane, owner FROM {p}lane"))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The signals of one name so far."""
        return [fields for signal, fields in self.heard if signal == name]

    def forget_look(self) -> None:
        """Give up the connection for looking: the server is about to go."""
        if self._look is not None:
            self._look.close()
            self._look = None


def make_post(url: str) -> Iterator[Post]:
    asyncio.run(migrate.install(url))
    yield from watch_post(url)


def watch_post(url: str) -> Iterator[Post]:
    """One whose tables are there."""
    post = Post(url, memory.broker(f"test-{uuid.uuid4().hex[:12]}", limit=100_000))
    unlisten = signals.listen(lambda name, fields: post.heard.append((name, fields)))
    yield post
    unlisten()
    post.forget_look()
    memory._brokers.pop(post.broker.name, None)


# SQLite has one writer at a time, so what is about several open transactions leaves it out.
several_writers = pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
on_postgres = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


FORBID = {
    "postgresql": (
        "CREATE OR REPLACE FUNCTION {p}forbid() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'not allowed'; END $$",
        "CREATE TRIGGER forbid BEFORE INSERT ON {p}TABLE FOR EACH ROW EXECUTE FUNCTION {p}forbid()",
    ),
    "mariadb": (
        "CREATE TRIGGER forbid BEFORE INSERT ON {p}TABLE FOR EACH ROW"
        " SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not allowed'",
    ),
    "sqlite": (
        "CREATE TRIGGER forbid BEFORE INSERT ON {p}TABLE"
        " BEGIN SELECT RAISE(ABORT, 'not allowed'); END",
    ),
}


@asynccontextmanager
async def forbidden(post: Post, table: str) -> AsyncIterator[None]:
    """While this lasts, nothing can be written into a table."""
    for statement in FORBID[post.dialect]:
        await post.change(statement.replace("TABLE", table))
    try:
        yield
    finally:
        place = f" ON {{p}}{table}" if post.dialect == "postgresql" else ""
        await post.change(f"DROP TRIGGER forbid{place}")
