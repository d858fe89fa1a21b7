"""Postroom beside Alembic: autogenerate leaves our tables alone, and your revisions make them.

In `env.py`, where `context.configure` is called:

    context.configure(..., include_object=postroom.alembic.include_object)

In a revision, which carries out the same scripts as `postroom db install` and `upgrade`, on
Alembic's own connection and in its transaction:

    def upgrade():
        postroom.alembic.upgrade(op, to=1)

    def downgrade():
        postroom.alembic.downgrade(op, to=0)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from postroom.databases import scripts
from postroom.databases.schema import Migration, migrations, newest
from postroom.databases.sqlalchemy import SQLAlchemyLink, manner_of
from postroom.errors import Refused, SchemaError

if TYPE_CHECKING:
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Connection
    from sqlalchemy.schema import SchemaItem

__all__ = ["downgrade", "include_object", "upgrade"]

_SCHEMA, _PREFIX = "postroom", "postroom_"


class Op(Protocol):
    """What we need of `alembic.op`."""

    def get_context(self) -> MigrationContext:
        """The migration under way."""


def include_object(
    object: SchemaItem, name: str | None, type_: str, reflected: bool, compare_to: object
) -> bool:
    """For `context.configure`: whether autogenerate should look at something; not at our tables.

    A table of your own models is looked at, whatever its name is.
    """
    if type_ != "table" or not reflected or compare_to is not None:
        return True
    schema = getattr(object, "schema", None)
    return schema != _SCHEMA and not (name or "").startswith(_PREFIX)


def upgrade(op: Op, *, to: int, since: int | None = None) -> None:
    """Bring Postroom's tables up to version `to`; nothing happens where they are there already.

    `since` counts only in `--sql` mode, where the database cannot be asked: the version it has
    before, one less than `to` unless told.
    """
    context = op.get_context()
    dialect = manner_of(context.dialect).dialect
    goal = scripts.checked(dialect, to)
    if context.as_sql:
        start = max(goal - 1, 0) if since is None else since
        _print(context, dialect, [s for s in migrations(dialect) if start < s.version <= goal])
        return
    with _turn(context, dialect) as (connection, present):
        for step in migrations(dialect):
            if present < step.version <= goal:
                scripts.run(connection, step.up)


def downgrade(op: Op, *, to: int, since: int | None = None, force: bool = False) -> None:
    """Take Postroom's tables back to version `to`; 0 removes them with all they hold.

    Messages that were not delivered would be lost with them: that needs `force`. `since` counts
    only in `--sql` mode: the version the database has before, one more than `to` unless told.
    """
    context = op.get_context()
    dialect = manner_of(context.dialect).dialect
    goal = scripts.checked(dialect, to)
    downward = tuple(reversed(migrations(dialect)))
    if context.as_sql:
        if goal == 0 and not force:
            raise Refused(
                "A script cannot look for undelivered messages before it removes the tables: "
                "write downgrade(op, to=0, force=True) if they may be lost."
            )
        start = goal + 1 if since is None else since
        _print(context, dialect, [s for s in downward if goal < s.version <= start], down=True)
        return
    with _turn(context, dialect) as (connection, present):
        steps = [step for step in downward if goal < step.version <= present]
        versions = [step.version for step in steps]
        if not force and (loss := scripts.would_lose(connection, dialect, versions)) is not None:
            raise Refused(
                f"There are {loss.what} in {_safe(connection)} ({loss.table}): {loss.remedy}, or "
                f"write downgrade(op, to={to}, force=True) to lose them."
            )
        for step in steps:
            scripts.run(connection, step.down)


def _print(
    context: MigrationContext, dialect: str, steps: list[Migration], down: bool = False
) -> None:
    """Put scripts into Alembic's output as they are; its own way would double percent signs."""
    write = context.impl.static_output
    if dialect == "sqlite" and not down and not context.impl.transactional_ddl:
        write("PRAGMA journal_mode = WAL;")
    for step in steps:
        write(f"-- Postroom schema, version {step.version}: {step.name}")
        write((step.down if down else step.up).strip())


@contextmanager
def _turn(context: MigrationContext, dialect: str) -> Iterator[tuple[Connection, int]]:
    """Alone among installers, in Alembic's transaction; gives its connection and the version."""
    connection = context.connection
    assert connection is not None
    if dialect == "postgresql":
        _refuse_autocommit(connection)
        scripts.rows(connection, dialect, "take_turn")
    elif dialect == "sqlite":
        _begin_sqlite(connection)
    elif scripts.rows(connection, dialect, "wait_for_turn") == [(0,)]:
        raise Refused(f"Another installation in {_safe(connection)} takes long; try again.")
    try:
        present = scripts.present_version(connection, dialect, _safe(connection))
        known = newest(dialect)
        if present > known:
            raise SchemaError(
                f"The schema in {_safe(connection)} is at version {present} and this Postroom "
                f"knows {known}; install a newer Postroom."
            )
        yield connection, present
    finally:
        if dialect == "mysql":
            scripts.rows(connection, dialect, "end_turn")


def _refuse_autocommit(connection: Connection) -> None:
    if SQLAlchemyLink(connection).commits_alone():
        raise Refused(
            "Alembic's connection commits every statement by itself, so a failure would leave half "
            "of the tables: run this revision without isolation_level='AUTOCOMMIT' and outside "
            "autocommit_block()."
        )


def _begin_sqlite(connection: Connection) -> None:
    """Begin for real: Python's sqlite3 leaves DDL out of the transactions it opens by itself."""
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:
        scripts.execute(connection, "PRAGMA journal_mode = WAL")
        scripts.execute(connection, "BEGIN IMMEDIATE")


def _safe(connection: Connection) -> str:
    return connection.engine.url.render_as_string(hide_password=True)
