"""SQL in files: one query a name, PostgreSQL's form first, other dialects only where they differ.

A room keeps `queries.sql` and, for what differs, `queries.mysql.sql` and `queries.sqlite.sql`:

    -- name: read_meta
    -- Why this query is as it is.
    SELECT value FROM postroom.meta WHERE name = :name

A query marked `-- only: postgresql` has no counterpart elsewhere: the store goes another way.
Where a dialect has no form of its own, `postroom.` becomes its table prefix `postroom_`. A query of
several statements (each ends with `;` at a line's end) is carried out in order, in one transaction,
and its rows are those of the last statement that returns any. A parameter is int, str, bytes or
None; a list of int is an array literal on PostgreSQL, a JSON array on SQLite, `(1, 2)` on MariaDB.
In SQLite's files NOW_US stands for the present in microseconds since 1970.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from postroom.flow import Value

__all__ = [
    "DIALECTS",
    "Prepared",
    "has_query",
    "prepare",
    "prepare_text",
    "query_names",
    "query_text",
    "split",
]

DIALECTS = ("postgresql", "mysql", "sqlite")

_NAME = re.compile(r"^-- name: *(\w+) *$", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
# unixepoch('subsec') is NULL before SQLite 3.42.
_SQLITE_NOW_US = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"
_PLACEHOLDERS = {"format": "%s", "qmark": "?"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """One statement in a driver's own form: text with placeholders and the names they stand for."""

    text: str
    names: tuple[str, ...]
    inline: tuple[str, ...]

    def bind(self, dialect: str, values: Mapping[str, Value]) -> tuple[str, tuple[Any, ...]]:
        """The text and the values in the order of its placeholders."""
        text = self.text
        for name in self.inline:
            value = values[name]
            assert isinstance(value, list)
            numbers = ", ".join(map(str, map(int, value))) or "NULL"
            text = text.replace(f"\x00{name}\x00", f"({numbers})")
        bound = [values[name] for name in self.names]
        if list in map(type, bound):
            bound = [adapt(dialect, value) for value in bound]
        return text, tuple(bound)


def adapt(dialect: str, value: Value) -> Any:
    """A value as the driver takes it."""
    if isinstance(value, list):
        if dialect == "postgresql":
            return "{" + ",".join(map(str, map(int, value))) + "}"
        return json.dumps(value)
    return value


@cache
def _room(room: str) -> dict[str, dict[str, str]]:
    """Every query of a room by dialect."""
    folder = resources.files(room)
    by_dialect: dict[str, dict[str, str]] = {}
    common = _parse(folder.joinpath("queries.sql").read_text(encoding="utf-8"))
    for dialect in DIALECTS:
        own = {}
        if dialect != "postgresql":
            path = folder.joinpath(f"queries.{dialect}.sql")
            own = _parse(path.read_text(encoding="utf-8").replace("NOW_US", _SQLITE_NOW_US))
            shared = {
                name: text.replace("postroom.", "postroom_")
                for name, text in common.items()
                if not text.startswith("\n-- only: postgresql")
            }
        else:
            shared = common
        by_dialect[dialect] = shared | own
    return by_dialect


def _parse(text: str) -> dict[str, str]:
    parts = _NAME.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def query_names(room: str, dialect: str) -> set[str]:
    """The names a room answers in a dialect."""
    return set(_room(room)[dialect])


def has_query(room: str, dialect: str, name: str) -> bool:
    """Whether a room knows this query in this dialect."""
    return name in _room(room)[dialect]


def query_text(room: str, dialect: str, name: str) -> str:
    """The text of one query as it stands for this dialect."""
    return _room(room)[dialect][name].strip()


@cache
def prepare(room: str, dialect: str, name: str, style: str) -> tuple[Prepared, ...]:
    """The statements of a query in the driver's parameter style: format, qmark or dollar.

    Lists of int are written into the text on MariaDB, which has no better way; the names of such
    parameters end in `_list` there.
    """
    return tuple(_render(text, dialect, style) for text in split(query_text(room, dialect, name)))


@lru_cache(maxsize=1000)
def prepare_text(text: str, dialect: str, style: str) -> tuple[Prepared, ...]:
    """`prepare` for statements that stand in no file."""
    return tuple(_render(part, dialect, style) for part in split(text))


def _render(text: str, dialect: str, style: str) -> Prepared:
    names: list[str] = []
    inline: list[str] = []

    def place(match: re.Match[str]) -> str:
        name = match.group(1)
        if dialect == "mysql" and name.endswith("_list"):
            if name not in inline:
                inline.append(name)
            return f"\x00{name}\x00"
        if style == "dollar":
            if name not in names:
                names.append(name)
            return f"${names.index(name) + 1}"
        names.append(name)
        return _PLACEHOLDERS[style]

    if style == "format":
        text = text.replace("%", "%%")
    return Prepared(_PARAMETER.sub(place, text), tuple(names), tuple(inline))


def split(script: str) -> list[str]:
    """The statements of a script: each ends with `;` at the end of a line, outside `$$` bodies.

    Comment lines are left out, so that a colon in a sentence is never taken for a parameter.
    """
    statements: list[str] = []
    lines: list[str] = []
    in_body = False
    for line in script.splitlines():
        if not in_body and (not line.strip() or line.lstrip().startswith("--")):
            continue
        lines.append(line)
        if line.count("$$") % 2:
            in_body = not in_body
        if not in_body and line.rstrip().endswith(";"):
            statements.append("\n".join(lines).rstrip().rstrip(";"))
            lines = []
    if lines:
        statements.append("\n".join(lines).strip())
    return statements
