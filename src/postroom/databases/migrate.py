"""Installing, upgrading, removing and checking Postroom's tables.

Safe to run from several processes at once: one works, the others wait and find nothing left to do.
Each migration is one transaction on PostgreSQL and SQLite. MariaDB commits every DDL statement by
itself; its scripts may be run again from the start, so what was half done is completed. A change
that would have to wait behind a long transaction gives up and says so.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from postroom.databases import scripts
from postroom.databases.opening import creator
from postroom.databases.schema import found, lacking, made_by, migrations, newest, remedy
from postroom.databases.sql import DIALECTS, query_text
from postroom.databases.trouble import explain
from postroom.databases.urls import Target, resolve
from postroom.errors import ConfigurationError, PostroomError, Refused, SchemaError
from postroom.flow import Rows

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = [
    "ROLES",
    "Change",
    "check",
    "downgrade",
    "grants",
    "install",
    "out_of_order",
    "sql",
    "upgrade",
    "version",
]

ROLES = {
    "publisher": "postroom_publisher",
    "relay": "postroom_relay",
    "consumer": "postroom_consumer",
    "operator": "postroom_operator",
}
LANES = 16
WAL_PATIENCE_SECONDS = 30

_ROLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class Change:
    """The schema version before and after."""

    before: int
    after: int


async def install(url: str) -> Change:
    """Make Postroom's tables; nothing happens when they are there already."""
    target = resolve(url)
    goal = newest(target.dialect)
    async with _open(target) as connection:
        if target.dialect == "sqlite":
            await _write_ahead(connection, target)
        # Looked at in our turn: a version below the newest may be another installer on its way.
        async with _turn(connection, target):
            before = await _known(connection, target)
            if 0 < before < goal:
                raise SchemaError(
                    f"Postroom's tables in {target.safe} are of version {before}; "
                    f"run `postroom db upgrade` to bring them to {goal}."
                )
            await _climb(connection, target, goal)
        return Change(before, goal)


async def upgrade(url: str, to: int | None = None) -> Change:
    """Bring the tables to a version, the newest unless told."""
    target = resolve(url)
    goal = scripts.checked(target.dialect, to)
    async with _open_existing(target) as connection:
        if connection is None or await _known(connection, target) == 0:
            raise _not_installed(target)
        async with _turn(connection, target):
            before = await _known(connection, target)
            if before > goal:
                raise Refused(
                    f"{target.safe} is at version {before} already; "
                    f"`postroom db downgrade --to {goal}` goes back."
                )
            await _climb(connection, target, goal)
        return Change(before, goal)


async def downgrade(url: str, to: int, force: bool = False) -> Change:
    """Take the tables back to a version; 0 removes them with all they hold.

    Messages that were not delivered would be lost with them: that needs `force`.
    """
    target = resolve(url)
    goal = scripts.checked(target.dialect, to)
    async with _open_existing(target) as connection:
        before = await _known(connection, target) if connection else 0
        if before < goal:
            raise Refused(f"{target.safe} is at version {before}, which is below {goal} already.")
        if connection is not None:
            await _descend(connection, target, goal, force)
        return Change(before, goal)


async def version(url: str) -> int:
    """The version of the schema in the database; 0 when it is not installed."""
    target = resolve(url)
    async with _open_existing(target) as connection:
        return await _version(connection, target) if connection else 0


def out_of_order(table: str, cache: int) -> str:
    """Say that positions of a table are handed out in advance, and how to mend it."""
    return (
        f"The sequence of {table} hands out {cache} positions at a time, so later messages of a "
        f"key may get lower ones; ALTER TABLE {table} ALTER COLUMN position SET CACHE 1."
    )


async def check(url: str) -> list[str]:
    """What is wrong with the schema and how to mend it, a sentence each; empty when all is well."""
    target = resolve(url)
    async with _open_existing(target) as connection:
        if connection is None:
            return [str(_not_installed(target))]
        problems = await _check_server(connection, target)
        present, goal = await _version(connection, target), newest(target.dialect)
        shape = made_by(target.dialect, min(present, goal) or goal)
        there = await connection.run_sync(found, target.dialect, set(shape.tables))
        if present == 0:
            if not there.tables:
                return [*problems, str(_not_installed(target))]
            return [*problems, "The installation is incomplete; run `postroom db install` again."]
        if present < goal:
            problems.append(
                f"The schema is at version {present} and this Postroom is written for {goal}; "
                f"{remedy(present, goal)}."
            )
        if present > goal:
            problems.append(
                f"The schema is at version {present} and this Postroom knows {goal}; "
                "install a newer Postroom."
            )
        if target.dialect == "postgresql":
            functions = await _rows(connection, target, "functions")
            there.functions = {f"postroom.{name}" for (name,) in functions}
            caches = await _rows(connection, target, "caches")
            problems += [out_of_order(str(table), int(size)) for table, size in caches]
        missing = lacking(shape, there)
        if not missing and await _rows(connection, target, "lane_count") != [(LANES,)]:
            missing.append("rows of the lane table are missing")
        mend = "restore it, or run the statement for it from `postroom db sql`"
        return problems + [f"{what[0].upper()}{what[1:]}; {mend}." for what in missing]


def sql(dialect: str, from_version: int = 0) -> str:
    """The script that `install` or `upgrade` would run, for review or for another tool."""
    _require_dialect(dialect)
    steps = [step for step in migrations(dialect) if step.version > from_version]
    begin, end = {
        "postgresql": ("BEGIN;\n" + _text("wait_briefly", dialect) + ";\n", "COMMIT;\n"),
        "mysql": (_text("wait_briefly", dialect) + ";\n", ""),
        "sqlite": ("BEGIN IMMEDIATE;\n", "COMMIT;\n"),
    }[dialect]
    head = "PRAGMA journal_mode = WAL;\n\n" if dialect == "sqlite" and steps else ""
    return head + "\n".join(
        f"-- Postroom schema, version {step.version}: {step.name}\n{begin}\n{step.up}\n{end}"
        for step in steps
    )


def grants(dialect: str, names: Mapping[str, str] | None = None) -> str:
    """The script that makes the four roles; `names` may name them otherwise than `ROLES`."""
    _require_dialect(dialect)
    unknown = set(names or {}) - set(ROLES)
    if unknown:
        raise ConfigurationError(f"{unknown.pop()} is not one of the roles {', '.join(ROLES)}.")
    script = resources.files("postroom.databases").joinpath("migrations", dialect, "grants.sql")
    text = script.read_text(encoding="utf-8")
    for role, name in (ROLES | dict(names or {})).items():
        text = text.replace(f"{{{role}}}", _quote(name, dialect))
    return text


def _quote(name: str, dialect: str) -> str:
    # A name outside the list could be quoted too, but no role needs one.
    if not _ROLE_NAME.fullmatch(name) or name.lower() in ("public", "none"):
        raise ConfigurationError(
            f"{name!r} cannot be a role: use up to 63 letters, digits, _ and -, "
            "beginning with a letter or _."
        )
    return f"`{name}`" if dialect == "mysql" else f'"{name}"'


# Going up and down.


async def _climb(connection: AsyncConnection, target: Target, goal: int) -> None:
    present = await _version(connection, target)
    for step in migrations(target.dialect):
        if present < step.version <= goal:
            await connection.run_sync(scripts.run, step.up)


async def _descend(connection: AsyncConnection, target: Target, goal: int, force: bool) -> None:
    # In one turn, so that a refusal or a lock not got leaves the schema as it was.
    async with _turn(connection, target):
        present = await _version(connection, target)
        steps = [s for s in reversed(migrations(target.dialect)) if goal < s.version <= present]
        versions = [step.version for step in steps]
        if not force and (
            loss := await connection.run_sync(scripts.would_lose, target.dialect, versions)
        ):
            sentence = f"There are {loss.what} in {target.safe} ({loss.table})"
            raise Refused(f"{sentence}: {loss.remedy}, or use --force to lose them.")
        for step in steps:
            await connection.run_sync(scripts.run, step.down)


@asynccontextmanager
async def _turn(connection: AsyncConnection, target: Target) -> AsyncIterator[None]:
    """Alone among installers, and in a transaction where the database can.

    An error needs no clean-up: it closes the connection, and that ends both.
    """
    if await _rows(connection, target, "wait_for_turn") == [(0,)]:
        raise Refused(f"Another installation in {target.safe} takes long; try again.")
    await _rows(connection, target, "wait_briefly")
    yield
    await _rows(connection, target, "end_turn")


async def _write_ahead(connection: AsyncConnection, target: Target) -> None:
    """Let readers and the writer pass each other. The switch does not wait for others by itself."""
    deadline = time.monotonic() + WAL_PATIENCE_SECONDS
    while True:
        try:
            await _execute(connection, "PRAGMA journal_mode = WAL")
            return
        except Exception as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


# Asking.


@asynccontextmanager
async def _open(target: Target) -> AsyncIterator[AsyncConnection]:
    """A connection of our own; whatever goes wrong on it comes out as one of our errors."""
    # Here, so that a script is printed and a wrong setting named without loading SQLAlchemy.
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    pg = target.dialect == "postgresql"
    try:
        engine = create_async_engine(
            target.url,
            poolclass=NullPool,
            connect_args=creator(target) if pg else target.connect_args,
            isolation_level="AUTOCOMMIT",  # `_turn` begins its transactions itself
        )
        try:
            async with engine.connect() as connection:
                yield connection
        finally:
            await engine.dispose()
    except PostroomError:
        raise
    except Exception as error:
        raise explain(error, target) from error


@asynccontextmanager
async def _open_existing(target: Target) -> AsyncIterator[AsyncConnection | None]:
    """None instead of a connection when it would create the SQLite file it asks about."""
    if target.missing_file:
        yield None
        return
    async with _open(target) as connection:
        yield connection


async def _version(connection: AsyncConnection, target: Target) -> int:
    return await connection.run_sync(scripts.present_version, target.dialect, target.safe)


async def _known(connection: AsyncConnection, target: Target) -> int:
    """The version, unless a newer Postroom made it: only that one knows how to change it."""
    present, known = await _version(connection, target), newest(target.dialect)
    if present > known:
        raise SchemaError(
            f"The schema in {target.safe} is at version {present} and this Postroom knows {known}; "
            "install a newer Postroom."
        )
    return present


async def _check_server(connection: AsyncConnection, target: Target) -> list[str]:
    problems = []
    if await _rows(connection, target, "writable") != [(1,)]:
        problems.append("The server is read-only; point the URL at the primary.")
    if target.dialect == "sqlite":
        ((mode,),) = await _execute(connection, "PRAGMA journal_mode")
        if mode != "wal":
            problems.append(f"The journal mode is {mode}, not WAL; run `postroom db install`.")
    return problems


async def _rows(connection: AsyncConnection, target: Target, name: str) -> Rows:
    return await connection.run_sync(scripts.rows, target.dialect, name)


async def _execute(connection: AsyncConnection, statement: str) -> Rows:
    return await connection.run_sync(scripts.execute, statement)


def _text(name: str, dialect: str) -> str:
    return query_text("postroom.databases", dialect, name)


def _require_dialect(dialect: str) -> None:
    if dialect not in DIALECTS:
        raise ConfigurationError(f"The dialect must be one of {', '.join(DIALECTS)}.")


def _not_installed(target: Target) -> SchemaError:
    return SchemaError(f"Postroom's tables are not in {target.safe}; run `postroom db install`.")
