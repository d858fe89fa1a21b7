"""Carrying out the schema's scripts, and asking what is there, on a connection of SQLAlchemy.

Shared by our own commands, which open connections themselves, and by Alembic, which lends its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from postroom.databases.schema import found, made_by, newest
from postroom.databases.sql import query_text, split
from postroom.errors import ConfigurationError, SchemaError
from postroom.flow import Rows

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["Loss", "checked", "execute", "present_version", "rows", "run", "would_lose"]


class Loss(NamedTuple):
    """What would be lost with a table, and how to have it empty."""

    table: str
    what: str
    remedy: str


_PRECIOUS: dict[int, tuple[Loss, ...]] = {
    1: tuple(
        Loss(table, "undelivered messages", "let the relay deliver them")
        for table in ("outbox", "delayed", "held", "dead_letter")
    ),
    2: (
        Loss("inbox", "records of what consumers have handled", "prune them when they are old"),
        Loss("job", "unfinished jobs", "finish them with `postroom dead redrive --resume`"),
    ),
    3: (Loss("inbox_held", "messages that consumers have not handled", "let the consumers run"),),
    4: (Loss("idempotency_key", "what clients were answered", "prune them when they are old"),),
    5: (Loss("ledger", "requests and what became of them", "keep a copy of the table"),),
}


def rows(connection: Connection, dialect: str, name: str) -> Rows:
    """What a query of this room answers; of several statements, the last that has rows."""
    answer: Rows = []
    for statement in split(query_text("postroom.databases", dialect, name)):
        answer = execute(connection, statement) or answer
    return answer


def run(connection: Connection, script: str) -> None:
    """Carry out a script, statement by statement, in whatever transaction there is."""
    for statement in split(script):
        execute(connection, statement)


def execute(connection: Connection, statement: str) -> Rows:
    """Carry out one statement as it stands."""
    # Without parameters the driver leaves percent signs alone.
    result = connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
    return [tuple(row) for row in result.fetchall()] if result.returns_rows else []


def checked(dialect: str, version: int | None) -> int:
    """A schema version that exists; the newest unless told."""
    known = newest(dialect)
    if version is None:
        return known
    if not 0 <= version <= known:
        raise ConfigurationError(f"There is no schema version {version}; the newest is {known}.")
    return version


def present_version(connection: Connection, dialect: str, safe: str) -> int:
    """The version recorded in the database; 0 when Postroom is not installed in it."""
    if rows(connection, dialect, "meta_there") == [(0,)]:
        return 0
    version = next((row[0] for row in rows(connection, dialect, "schema_version")), "0")
    if not version.isdecimal():
        raise SchemaError(f"The schema version recorded in {safe} is not a number.")
    return int(version)


def would_lose(connection: Connection, dialect: str, versions: Sequence[int]) -> Loss | None:
    """What nobody else remembers and these versions' tables hold, if anything.

    Going below version 1 also keeps publishers out, so that nothing is added after the look.
    """
    shape = made_by(dialect, newest(dialect))
    there = found(connection, dialect, set(shape.tables))
    present = {re.split(r"postroom[._]", name)[-1] for name in there.tables}
    # Elsewhere the turn itself keeps publishers out (SQLite), or nothing can (MariaDB).
    if dialect == "postgresql" and 1 in versions:
        rows(connection, dialect, "stop_publishing")
    # What is worst comes first: messages that were never delivered.
    for loss in (loss for version in sorted(versions) for loss in _PRECIOUS.get(version, ())):
        if loss.table in present and rows(connection, dialect, f"{loss.table}_any"):
            return loss
    return None
