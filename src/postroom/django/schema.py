"""Postroom's tables as Django migrations: the very scripts that `postroom db install` runs.

A migration of Django stands for a version of the schema, and what the database says of itself
decides: tables that `postroom db` made are recognised, and a version that is there is not made
again. As with `postroom db`, one installer works at a time, and undelivered messages are not lost.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError
from django.db import OperationalError, connections, router
from django.db.migrations.operations.base import Operation

from postroom.databases.django import DjangoLink, dialect_of
from postroom.databases.schema import Migration, made_by, migrations
from postroom.databases.sql import DIALECTS, has_query, query_text, split
from postroom.django.settings import under_test
from postroom.errors import Refused
from postroom.flow import Statement

__all__ = ["Refusal", "SchemaVersion", "empty_after_flush"]

WAL_PATIENCE_SECONDS = 30
_ROOM = "postroom.databases"
_REMEMBER = (
    "SET @postroom_wait = @@session.lock_wait_timeout, @postroom_notes = @@session.sql_notes"
)
_RESTORE = "SET SESSION lock_wait_timeout = @postroom_wait, sql_notes = @postroom_notes"


class Refusal(Refused, CommandError):
    """A migration that would lose something; `manage.py` prints it as one sentence."""


class SchemaVersion(Operation):
    """Brings Postroom's tables to a version, or back to the one before it."""

    reversible = True
    reduces_to_sql = True

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """No models, so nothing changes in Django's eyes."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_: Any) -> None:
        connection = schema_editor.connection
        if not _concerns(connection, app_label):
            return
        step = self._step(connection)
        if schema_editor.collect_sql:
            _collect(schema_editor, step.up, wal=dialect_of(connection) == "sqlite")
            return
        _write_ahead(connection)
        with _turn(connection):
            if _version(connection) < self.version:
                _run(connection, step.up)

    def database_backwards(self, app_label: str, schema_editor: Any, *_: Any) -> None:
        connection = schema_editor.connection
        if not _concerns(connection, app_label):
            return
        step = self._step(connection)
        if schema_editor.collect_sql:
            _collect(schema_editor, step.down)
            return
        with _turn(connection):
            present = _version(connection)
            if present > self.version:
                raise Refusal(
                    f"Postroom's tables in {connection.alias!r} are at version {present}: first go "
                    f"back with `manage.py postroom db downgrade --to {self.version}`."
                )
            if present == self.version:
                _refuse_to_lose(connection, self.version)
                _run(connection, step.down)

    def describe(self) -> str:
        return f"Postroom's tables, version {self.version}"

    def _step(self, connection: Any) -> Migration:
        return next(s for s in migrations(dialect_of(connection)) if s.version == self.version)


def empty_after_flush(*, using: str, **details: Any) -> None:
    """Empty our tables when a test's database is flushed: `TransactionTestCase` does so.

    Django flushes the tables of models only. Nothing happens outside of a test run, nor after a
    `migrate`, which sends the same signal with a plan.
    """
    if "plan" in details:
        return
    connection = connections[using]
    if under_test() and connection.vendor in DIALECTS and (version := _version(connection)):
        DjangoLink(connection).execute(Statement("postroom.django", "empty"))
        if version > 1:
            DjangoLink(connection).execute(Statement("postroom.django", "empty_people"))
        if version > 2:
            DjangoLink(connection).execute(Statement("postroom.django", "empty_consumers"))
        if version > 3:
            DjangoLink(connection).execute(Statement("postroom.django", "empty_idempotency"))


def _concerns(connection: Any, app_label: str) -> bool:
    """Not where a router says no, nor in a database that no message can be in."""
    return connection.vendor in DIALECTS and router.allow_migrate(connection.alias, app_label)


def _collect(schema_editor: Any, script: str, *, wal: bool = False) -> None:
    """For `sqlmigrate`: the statements, and nothing is asked of the database."""
    if wal:
        schema_editor.execute("PRAGMA journal_mode = WAL", params=None)
    for statement in split(script):
        schema_editor.execute(statement, params=None)


@contextlib.contextmanager
def _turn(connection: Any) -> Iterator[None]:
    """Alone among installers and in a transaction, as far as the database can.

    Inside a transaction of the caller's this is all left to the caller.
    """
    if connection.in_atomic_block or not connection.get_autocommit():
        yield
        return
    mysql = connection.vendor == "mysql"
    if mysql:
        _execute(connection, _REMEMBER)
    try:
        if _ask(connection, "wait_for_turn") == [(0,)]:
            raise Refusal(f"Another installation in {connection.alias!r} takes long; try again.")
        _ask(connection, "wait_briefly")
        yield
    except BaseException:
        # The connection may be what failed; then it has ended the transaction by itself.
        with contextlib.suppress(Exception):
            _ask(connection, "end_turn") if mysql else _execute(connection, "ROLLBACK")
        raise
    else:
        _ask(connection, "end_turn")
    finally:
        if mysql:
            with contextlib.suppress(Exception):
                _execute(connection, _RESTORE)


def _write_ahead(connection: Any) -> None:
    """SQLite: let readers and the writer pass each other. The switch itself does not wait."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        return
    deadline = time.monotonic() + WAL_PATIENCE_SECONDS
    while True:
        try:
            _execute(connection, "PRAGMA journal_mode = WAL")
            return
        except OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _version(connection: Any) -> int:
    if _ask(connection, "meta_there") == [(0,)]:
        return 0
    rows = _ask(connection, "schema_version")
    return int(rows[0][0]) if rows else 0


def _refuse_to_lose(connection: Any, version: int) -> None:
    """What must not be lost is what `postroom db downgrade` asks for too, by `TABLE_any`."""
    dialect = dialect_of(connection)
    # Elsewhere the turn itself keeps publishers out (SQLite), or nothing can (MariaDB).
    if version == 1 and dialect == "postgresql":
        _ask(connection, "stop_publishing")
    made, before = made_by(dialect, version).tables, made_by(dialect, version - 1).tables
    for table in (name for name in made if name not in before):
        name = re.split(r"postroom[._]", table)[-1]
        if has_query(_ROOM, dialect, f"{name}_any") and _ask(connection, f"{name}_any"):
            what = "undelivered messages" if version == 1 else "records that nothing else holds"
            wait = "let the relay deliver them" if version == 1 else "let them grow old"
            raise Refusal(
                f"There are {what} in {connection.alias!r} ({name}): {wait}, or lose them with "
                f"`manage.py postroom db downgrade --to {version - 1} --force`."
            )


def _run(connection: Any, script: str) -> None:
    for statement in split(script):
        _execute(connection, statement)


def _ask(connection: Any, name: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for statement in split(query_text(_ROOM, dialect_of(connection), name)):
        answer = _execute(connection, statement)
        rows = rows if answer is None else answer
    return rows


def _execute(connection: Any, statement: str) -> list[tuple[Any, ...]] | None:
    # Without parameters the driver leaves percent signs alone.
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else None
