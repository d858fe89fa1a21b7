"""The database seen from outside, through plain drivers: never through the code under test."""

import asyncio
import json
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql

from postroom.databases import migrate

CONTENT = ("outbox", "delayed", "held", "dead_letter", "archive")
_OURS = {
    "business": "CREATE TABLE business (id VARCHAR(36) PRIMARY KEY, k VARCHAR(50), n BIGINT)",
    "counter": "CREATE TABLE counter (k VARCHAR(50) PRIMARY KEY, n BIGINT NOT NULL)",
}
_CONNECTIONS = {
    "postgresql": "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
    "mariadb": "SELECT COUNT(*) FROM information_schema.processlist"
    " WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}
_TRANSACTIONS = {
    "postgresql": _CONNECTIONS["postgresql"] + " AND xact_start IS NOT NULL",
    "mariadb": _CONNECTIONS["mariadb"]
    + " AND id IN (SELECT trx_mysql_thread_id FROM information_schema.innodb_trx)",
}


def connect(url: str, *, autocommit: bool = False) -> Any:
    """A plain connection of the application's own kind."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        path = url.removeprefix("sqlite:///")
        how: dict[str, Any] = {"isolation_level": None} if autocommit else {}
        return sqlite3.connect(path, timeout=30, check_same_thread=False, **how)
    if parts.scheme == "postgresql":
        return psycopg.connect(url, autocommit=autocommit, connect_timeout=5)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path.strip("/"),
        charset="utf8mb4",
        autocommit=autocommit,
        connect_timeout=5,
    )


def run(connection: Any, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """One statement, with %s for each value on every database."""
    if isinstance(connection, sqlite3.Connection):
        return connection.execute(statement.replace("%s", "?"), values).fetchall()
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return list(cursor.fetchall()) if cursor.description else []


def note_standing(url: str, path: Path | str) -> None:
    """Write down what stands in a table at this moment: a fault has just happened."""
    tables = Tables(url)
    standing = tables.ids("outbox") | tables.ids("held") | tables.ids("delayed")
    tables.close()
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(sorted(standing)) + "\n")


class Tables:
    """Postroom's tables and two of an application, in one database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind = urlsplit(url).scheme.replace("mysql", "mariadb")
        self._prefix = "postroom." if self.kind == "postgresql" else "postroom_"
        self._connection: Any = None

    def install(self) -> None:
        asyncio.run(migrate.install(self.url))
        for statement in _OURS.values():
            self.query(statement)

    def clear(self) -> None:
        """Empty everything and free every lane."""
        others = (
            "dedup",
            "lane_batch",
            "worker",
            "inbox",
            "inbox_held",
            "seat",
            "consumer",
            "idempotency_key",
        )
        for table in (*CONTENT, *others, "ledger"):
            self.query(f"DELETE FROM {{p}}{table}")
        for table in _OURS:
            self.query(f"DELETE FROM {table}")
        self.query("DELETE FROM {p}meta WHERE name = 'routes'")
        self.query("UPDATE {p}lane SET owner = NULL, lease_until = NULL, paused = %s", False)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement, committed at once. `{p}` stands before a table of Postroom's."""
        statement = statement.replace("{p}", self._prefix)
        if self._connection is not None:
            try:
                return run(self._connection, statement, *values)
            except Exception:
                self.close()  # the server may have been killed meanwhile
        self._connection = connect(self.url, autocommit=True)
        return run(self._connection, statement, *values)

    def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
            self._connection = None

    def end_leases(self) -> None:
        """Let the time pass that leases of processes known to be dead would still last."""
        self.query("UPDATE {p}lane SET owner = NULL, lease_until = NULL")
        self.query("DELETE FROM {p}worker")

    def can_write(self) -> bool:
        """Whether nobody holds the lock of an SQLite file; servers have none."""
        if self.kind != "sqlite":
            return True
        connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=0.3)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()
        return True

    def transactions(self) -> int:
        """How many transactions others have open now; on SQLite whether one has the lock."""
        if self.kind == "sqlite":
            return int(not self.can_write())
        ((count,),) = self.query(_TRANSACTIONS[self.kind])
        return int(count)

    def connections(self) -> int:
        """How many connections others have to this database.

        A file knows of none: there it is the threads of aiosqlite in this process, one for each.
        """
        if self.kind == "sqlite":
            return sum("_connection_worker" in thread.name for thread in threading.enumerate())
        ((count,),) = self.query(_CONNECTIONS[self.kind])
        return int(count)

    def ids(self, table: str) -> set[str]:
        return {str(id) for (id,) in self.query(f"SELECT id FROM {{p}}{table}")}

    def waiting(self) -> int:
        """How many messages a relay still has to move, now or later."""
        ((count,),) = self.query(
            "SELECT (SELECT COUNT(*) FROM {p}outbox) + (SELECT COUNT(*) FROM {p}delayed)"
            " + (SELECT COUNT(*) FROM {p}held WHERE next_attempt_at IS NOT NULL)"
        )
        return int(count)

    def dead(self) -> dict[str, str]:
        """The dead letters: id and why."""
        rows = self.query("SELECT id, error_code FROM {p}dead_letter")
        return {str(id): code for id, code in rows}

    def business(self) -> set[str]:
        return {str(id) for (id,) in self.query("SELECT id FROM business")}

    def content(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every message where it stands, for a comparison of before and after."""
        found = {}
        for table in CONTENT:
            columns = "id, lane" if table == "delayed" else "id, lane, position"
            columns += ", attempts, next_attempt_at, blocked" if table == "held" else ""
            rows = self.query(f"SELECT {columns} FROM {{p}}{table} ORDER BY id")
            found[table] = [tuple(row) for row in rows]
        return found

    def owners(self) -> set[str]:
        rows = self.query("SELECT owner FROM {p}lane WHERE owner IS NOT NULL")
        return {owner for (owner,) in rows}
