"""What the migrations make, and what of it a database lacks.

A migration is a pair of scripts, `NNNN_name.up.sql` and `NNNN_name.down.sql`, one pair for each
dialect; it writes its own number into `meta`, so that the script a person reviews is the whole of
what is run. What they make is read from the scripts themselves, so there is no second list to
keep; a test holds it against real databases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from postroom import framework
from postroom.databases.sql import split

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = [
    "Migration",
    "Shape",
    "Table",
    "found",
    "lacking",
    "made_by",
    "migrations",
    "newest",
    "remedy",
]

_FILE = re.compile(r"(?P<version>\d{4})_(?P<name>\w+)\.up\.sql")
_MAYBE = r"(?:IF NOT EXISTS )?"
_TABLE = re.compile(
    rf"CREATE TABLE {_MAYBE}(?P<name>[\w.]+)(?: \((?P<body>.*?)\n\)| PARTITION)", re.S
)
_INDEX = re.compile(
    rf"CREATE (?:UNIQUE )?INDEX {_MAYBE}(?P<name>\w+) ON (?:ONLY )?(?P<table>[\w.]+)"
)
_COLUMN = re.compile(rf"ALTER TABLE (?P<table>[\w.]+) ADD COLUMN {_MAYBE}`?(?P<name>\w+)")
_KEYLESS = re.compile(r"ALTER TABLE (?P<table>[\w.]+) DROP CONSTRAINT \w+_pkey")
_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION (?P<name>[\w.]+)\(")
_NOT_A_COLUMN = {"PRIMARY", "UNIQUE", "KEY", "CONSTRAINT", "CHECK"}


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema, up and down."""

    version: int
    name: str
    up: str
    down: str


@dataclass(slots=True)
class Table:
    """What a table has, by name."""

    columns: set[str] = field(default_factory=set)
    indexes: set[str] = field(default_factory=set)
    has_primary_key: bool = False


@dataclass(slots=True)
class Shape:
    """Tables and functions, by name as in SQL."""

    tables: dict[str, Table] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """All migrations of a dialect, in order from version 1."""
    folder = resources.files("postroom.databases").joinpath("migrations", dialect)
    steps = []
    for up in folder.iterdir():
        match = _FILE.fullmatch(up.name)
        if match:
            down = folder.joinpath(up.name.replace(".up.", ".down.")).read_text(encoding="utf-8")
            text = up.read_text(encoding="utf-8")
            steps.append(Migration(int(match["version"]), match["name"], text, down))
    return tuple(sorted(steps, key=lambda step: step.version))


def newest(dialect: str) -> int:
    """The schema version this Postroom is written for."""
    return migrations(dialect)[-1].version


def remedy(found: int, wanted: int) -> str:
    """What to do about tables of another version than the code needs, as it is done here."""
    if found > wanted:
        return "upgrade postroom"
    if (host := framework.present()) is not None:
        return f"run `{host.migrate}`"
    revision = f"postroom.alembic.upgrade(op, to={wanted})"
    return f"run `postroom db upgrade`, or a revision with `{revision}`"


def made_by(dialect: str, version: int) -> Shape:
    """What the migrations up to a version make."""
    shape = Shape()
    for step in migrations(dialect):
        if step.version <= version:
            for statement in split(step.up):
                _read(statement, shape)
    return shape


def _read(statement: str, shape: Shape) -> None:
    if match := _TABLE.match(statement):
        shape.tables[match["name"]] = _read_table(match["body"])
    elif match := _INDEX.match(statement):
        shape.tables[match["table"]].indexes.add(match["name"])
    elif match := _COLUMN.match(statement):
        shape.tables[match["table"]].columns.add(match["name"])
    elif match := _KEYLESS.match(statement):
        shape.tables[match["table"]].has_primary_key = False
    elif match := _FUNCTION.match(statement):
        shape.functions.add(match["name"])


def _read_table(body: str | None) -> Table:
    table = Table()
    if body is None:  # a partition has what its parent has
        return table
    for line in filter(None, map(str.strip, body.splitlines())):
        words = line.replace("`", "").split()
        table.has_primary_key |= "PRIMARY KEY" in line
        if words[0] not in _NOT_A_COLUMN:
            table.columns.add(words[0])
        elif "KEY" in words[:2] and words[0] != "PRIMARY":
            table.indexes.add(words[words.index("KEY") + 1])
    return table


def found(connection: Connection, dialect: str, names: set[str]) -> Shape:
    """What of these tables is in the database."""
    from sqlalchemy import inspect

    inspector = inspect(connection)
    schema, prefix = ("postroom", "postroom.") if dialect == "postgresql" else (None, "")
    shape = Shape()
    for bare in inspector.get_table_names(schema=schema):
        if (name := prefix + bare) in names:
            shape.tables[name] = Table(
                columns={column["name"] for column in inspector.get_columns(bare, schema)},
                indexes={str(index["name"]) for index in inspector.get_indexes(bare, schema)},
                has_primary_key=bool(
                    inspector.get_pk_constraint(bare, schema)["constrained_columns"]
                ),
            )
    return shape


def lacking(wanted: Shape, there: Shape) -> list[str]:
    """What is wanted and not there, each named in a few words."""
    problems = []
    for name, table in wanted.tables.items():
        if name not in there.tables:
            problems.append(f"table {name} is missing")
            continue
        real = there.tables[name]
        problems += [
            f"column {column} of {name} is missing"
            for column in sorted(table.columns - real.columns)
        ]
        problems += [
            f"index {index} of {name} is missing" for index in sorted(table.indexes - real.indexes)
        ]
        if table.has_primary_key and not real.has_primary_key:
            problems.append(f"the primary key of {name} is missing")
    problems += [
        f"function {name} is missing" for name in sorted(wanted.functions - there.functions)
    ]
    return problems
