"""A database with Postroom installed, and a plain hand in its tables to plant what is wrong."""

import asyncio
import datetime as dt
import json
import sqlite3
import uuid
from typing import Any

import psycopg
import pymysql
from commands import Here
from sqlalchemy import make_url

from postroom import Draft, Outbox
from postroom.databases import migrate

NOW = dt.datetime.now(dt.UTC)


class House:
    """One database, as somebody sees it who has lost the instructions."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self.url = url
        self.name = name or uuid.uuid4().hex[:12]
        self._connection: Any = None

    @property
    def dialect(self) -> str:
        kinds = {"postgresql": "postgresql", "mysql": "mariadb", "mariadb": "mariadb"}
        return kinds.get(self.url.split(":")[0].split("+")[0], "sqlite")

    def install(self) -> None:
        asyncio.run(migrate.install(self.url))

    def connect(self, *, autocommit: bool = True) -> Any:
        if self.dialect == "sqlite":
            path = make_url(self.url).database or ""
            level = None if autocommit else "DEFERRED"
            return sqlite3.connect(path, isolation_level=level, timeout=20, check_same_thread=False)
        if self.dialect == "postgresql":
            return psycopg.connect(self.url, autocommit=autocommit)
        parts = make_url(self.url)
        return pymysql.connect(
            host=parts.host,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.database,
            charset="utf8mb4",
            autocommit=autocommit,
        )

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement by itself; {p} is the prefix of our tables, {bare} that of a new name."""
        if self._connection is None:
            self._connection = self.connect()
        postgresql = self.dialect == "postgresql"
        statement = statement.replace("{p}", "postroom." if postgresql else "postroom_")
        statement = statement.replace("{bare}", "" if postgresql else "postroom_")
        statement = statement.replace("{key}", "`key`" if self.dialect == "mariadb" else "key")
        if self.dialect == "sqlite":
            statement = statement.replace("%s", "?")
        cursor = self._connection.cursor()
        try:
            cursor.execute(statement, values)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        finally:
            cursor.close()

    def ago(self, seconds: float) -> Any:
        """A moment, as this database keeps it."""
        moment = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)
        if self.dialect == "sqlite":
            return int(moment.timestamp() * 1e6)
        return moment if self.dialect == "postgresql" else moment.replace(tzinfo=None)

    def publish(
        self, payload: str, *, key: str | None = "k", delay_seconds: float | None = None, **how: Any
    ) -> str:
        """Commit one message; returns its id."""
        due = None
        if delay_seconds is not None:
            due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=abs(delay_seconds))
        draft = Draft(
            payload={"is": payload}, type="note.v1", topic="notes", key=key, deliver_at=due, **how
        )
        connection = self.connect(autocommit=False)
        try:
            (done,) = Outbox().publish_many(connection, [draft])
            connection.commit()
        finally:
            connection.close()
        if delay_seconds is not None and delay_seconds < 0:
            self.sql("UPDATE {p}delayed SET deliver_at = %s WHERE id = %s",
                     self.ago(-delay_seconds), done.id)  # fmt: skip
        return done.id

    def count(self, table: str) -> int:
        return int(self.sql(f"SELECT count(*) FROM {{p}}{table}")[0][0])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def said(here: Here, *arguments: str, code: int = 0) -> Any:
    """What the command answers with --json."""
    done = here(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else None
