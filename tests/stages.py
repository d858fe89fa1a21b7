"""Databases with Postroom installed, emptied before each test, and a plain look at their tables."""

import asyncio
import sqlite3
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from doors import mysql_options
from postroom.databases import migrate

COLUMNS = (
    "id", "topic", "key", "type", "aggregate_type", "aggregate_id", "content_type", "headers",
    "payload", "size", "lane",
)  # fmt: skip
MICROSECONDS = {
    "postgresql": "CAST(extract(epoch FROM {}) * 1000000 AS bigint)",
    "mariadb": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})",
    "sqlite": "{}",
}


@dataclass
class Stage:
    """One database and a connection beside the one under test."""

    database: str
    url: str

    @property
    def prefix(self) -> str:
        return "postroom." if self.database == "postgresql" else "postroom_"

    @cached_property
    def connection(self) -> Any:
        """Commits every statement by itself, and so sees what is committed now."""
        if self.database == "sqlite":
            path = self.url.removeprefix("sqlite:///")
            return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        if self.database == "postgresql":
            return psycopg.connect(self.url, autocommit=True)
        options = mysql_options(self.url)
        return pymysql.connect(database=options.pop("db"), **options, autocommit=True)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        statement = statement.replace("{p}", self.prefix)
        if self.database == "sqlite":
            statement = statement.replace("%s", "?")
        cursor = self.connection.cursor()
        cursor.execute(statement, values)
        rows = list(cursor.fetchall()) if cursor.description else []
        cursor.close()
        return rows

    def messages(self, table: str = "outbox") -> list[dict[str, Any]]:
        """What stands in a table, in position order, times as microseconds."""
        quote = "`" if self.database == "mariadb" else ""
        times = ["expires_at"] + (["deliver_at"] if table == "delayed" else [])
        columns = [f"{quote}key{quote}" if name == "key" else name for name in COLUMNS]
        columns += [MICROSECONDS[self.database].format(name) for name in times]
        order = "deliver_at, id" if table == "delayed" else "position"
        rows = self.query(f"SELECT {', '.join(columns)} FROM {{p}}{table} ORDER BY {order}")
        names = [*COLUMNS, *(name.replace("_at", "_us") for name in times)]
        return [
            dict(zip(names, row, strict=True)) | {"id": str(row[0]), "payload": bytes(row[8])}
            for row in rows
        ]

    def payloads(self) -> list[bytes]:
        return [message["payload"] for message in self.messages()]

    def things(self) -> list[str]:
        """The rows of the application's own table."""
        return [row[0] for row in self.query("SELECT name FROM thing ORDER BY name")]

    def clear(self) -> None:
        tables = ("outbox", "delayed", "held", "archive", "dead_letter", "dedup", "inbox")
        for table in (*tables, "inbox_held", "seat", "consumer", "idempotency_key", "ledger"):
            if self.query(f"SELECT 1 FROM {{p}}{table} LIMIT 1"):
                self.query(f"DELETE FROM {{p}}{table}")
        self.query("DELETE FROM {p}meta WHERE name = 'keep_delivered_seconds'")
        self.query("DELETE FROM thing")


class Stages:
    """Makes the database of each kind when a test first asks for it."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._made: dict[str, Stage] = {}

    def __getitem__(self, database: str) -> Stage:
        if database not in self._made:
            self._made[database] = self._make(database)
        self._made[database].clear()
        return self._made[database]

    def close(self) -> None:
        for stage in self._made.values():
            stage.connection.close()

    def _make(self, database: str) -> Stage:
        if database == "sqlite":
            url = f"sqlite:///{self._folder / 'postroom.db'}"
        else:
            fixture = {"postgresql": "postgres", "mariadb": "mariadb"}[database]
            server = self._request.getfixturevalue(fixture)
            url = server.create_database(f"stage_{uuid.uuid4().hex[:12]}")
        # In a thread: a test may ask from inside its own event loop.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(migrate.install(url))).result()
        stage = Stage(database, url)
        stage.query("CREATE TABLE thing (name VARCHAR(100))")
        return stage
