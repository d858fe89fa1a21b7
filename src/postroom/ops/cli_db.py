"""`postroom db`: make, change and check Postroom's tables, and print the SQL for review."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from postroom.ops.cli_common import (
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    localized,
    run,
    shown,
)

if TYPE_CHECKING:
    from postroom.databases.migrate import Change

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Make, change and check Postroom's tables.")


class Dialect(StrEnum):
    """The kinds of SQL, by the names people use."""

    postgresql = "postgresql"
    mysql = "mysql"
    mariadb = "mariadb"
    sqlite = "sqlite"

    @property
    def own_name(self) -> str:
        return "mysql" if self is Dialect.mariadb else self.value


DialectOption = Annotated[
    Dialect | None, typer.Option("--dialect", help="The kind of SQL; else that of the database.")
]


@app.command()
def install(
    context: typer.Context,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the tables. Nothing happens when they are there already."""
    from postroom.databases import migrate

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    _tell(console, url, run(migrate.install(url)))


@app.command()
def upgrade(
    context: typer.Context,
    to: Annotated[int | None, typer.Option("--to", help="A version; else the newest.")] = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring the tables to the newest version, without losing anything in them."""
    from postroom.databases import migrate

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    _tell(console, url, run(migrate.upgrade(url, to)))


@app.command()
def downgrade(
    context: typer.Context,
    to: Annotated[int, typer.Option("--to", help="The version to go back to; 0 removes all.")],
    force: Annotated[
        bool, typer.Option("--force", help="Lose messages that were not delivered.")
    ] = False,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the tables back to an older version. Stop relays and publishers first."""
    from postroom.databases import migrate

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    _tell(console, url, run(migrate.downgrade(url, to, force)))


@app.command()
def check(
    context: typer.Context,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the tables with what this Postroom needs; exit with 1 when something is wrong."""
    from postroom.databases import migrate
    from postroom.databases.urls import resolve

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    problems = run(migrate.check(url))
    safe = resolve(url).safe
    console.answer(
        {"database": safe, "ok": not problems, "problems": problems},
        localized("\n".join(map(shown, problems))) or f"{safe}: everything is there.",
        lines=True,
    )
    if problems:
        raise typer.Exit(1)


@app.command()
def sql(
    context: typer.Context,
    dialect: DialectOption = None,
    from_version: Annotated[
        int, typer.Option("--from", min=0, help="Leave out what this version has.")
    ] = 0,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what install or upgrade would run, to review it or to run it by other means."""
    from postroom.databases import migrate

    console = Console.of(context, database=database, config=config, as_json=as_json)
    name = _dialect(console, dialect)
    script = migrate.sql(name, from_version)
    console.answer({"dialect": name, "sql": script}, script, lines=True)


@app.command()
def grants(
    context: typer.Context,
    dialect: DialectOption = None,
    publisher: Annotated[
        str | None, typer.Option("--publisher", help="Name of the role that publishes.")
    ] = None,
    relay: Annotated[
        str | None, typer.Option("--relay", help="Name of the role that relays.")
    ] = None,
    consumer: Annotated[
        str | None, typer.Option("--consumer", help="Name of the role that consumes.")
    ] = None,
    operator: Annotated[
        str | None, typer.Option("--operator", help="Name of the role that watches and repairs.")
    ] = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the script that makes the four database roles."""
    from postroom.databases import migrate

    console = Console.of(context, database=database, config=config, as_json=as_json)
    given = {
        "publisher": publisher,
        "relay": relay,
        "consumer": consumer,
        "operator": operator,
    }
    names = {role: name for role, name in given.items() if name is not None}
    dialect_name = _dialect(console, dialect)
    script = migrate.grants(dialect_name, names)
    console.answer({"dialect": dialect_name, "sql": script}, script, lines=True)


def _dialect(console: Console, named: Dialect | None) -> str:
    if named is not None:
        return named.own_name
    from postroom.databases.urls import resolve

    return resolve(console.settings().require_database()).dialect


def _tell(console: Console, url: str, change: Change) -> None:
    from postroom.databases.urls import resolve

    safe = resolve(url).safe
    if change.before == change.after:
        sentence = f"{safe}: at version {change.after} already, nothing to do."
    elif change.after == 0:
        sentence = f"{safe}: Postroom's tables are removed."
    elif change.before == 0:
        sentence = f"{safe}: installed, schema version {change.after}."
    else:
        sentence = f"{safe}: schema version {change.before} became {change.after}."
    console.answer({"database": safe, "before": change.before, "after": change.after}, sentence)
