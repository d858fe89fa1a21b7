"""Operations that may be repeated without harm: guarded update, upsert, execute once.

For handlers, and for any code that may see a message twice. Each runs in the caller's own
transaction, on every kind of session and connection. Names of tables and columns are checked and
quoted; values are bound.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from postroom.calling import is_async, must_have_run
from postroom.databases.caller import carry_out, carry_out_async
from postroom.databases.kinds import bare, link_of
from postroom.errors import InvalidMessage, WrongCall
from postroom.flow import Flow, Statement
from postroom.inbox.once import once, once_async

__all__ = [
    "Guarded",
    "execute_once",
    "execute_once_async",
    "guarded_update",
    "guarded_update_async",
    "upsert",
    "upsert_async",
]

ROOM = __package__ or "postroom.inbox"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}(?:\.[A-Za-z_][A-Za-z0-9_$]{0,62})?")
_WHAT = "change"
_INSTEAD = "write `await inbox.execute_once_async(...)`, and roll this transaction back."


class Guarded(enum.Enum):
    """How a guarded update ended: nothing is passed over in silence."""

    updated = "updated"
    refused = "refused"  # the row is there, and is not what it must be
    absent = "absent"  # there is no such row


def guarded_update(
    tx: Any,
    table: str,
    where: Mapping[str, Any],
    set: Mapping[str, Any],
    *,
    only_if: Mapping[str, Any],
) -> Guarded:
    """Change a row only if it is what it must be: `only_if={"state": ["placed", "billed"]}`.

    `where` finds the row, by its key. A value of `only_if` may be a list: any of them will do.
    """
    flow = _guarded_update(_dialect(tx), table, where, set, only_if)
    return carry_out(tx, flow, what=_WHAT, instead="inbox.guarded_update_async")


async def guarded_update_async(
    tx: Any,
    table: str,
    where: Mapping[str, Any],
    set: Mapping[str, Any],
    *,
    only_if: Mapping[str, Any],
) -> Guarded:
    """`guarded_update` on a session or connection of any kind."""
    flow = _guarded_update(_dialect(tx), table, where, set, only_if)
    return await carry_out_async(tx, flow, what=_WHAT)


def upsert(tx: Any, table: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Insert a row, or change the one with this key, which must have a unique index."""
    flow = _upsert(_dialect(tx), table, key, values)
    carry_out(tx, flow, what=_WHAT, instead="inbox.upsert_async")


async def upsert_async(
    tx: Any, table: str, key: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """`upsert` on a session or connection of any kind."""
    await carry_out_async(tx, _upsert(_dialect(tx), table, key, values), what=_WHAT)


def execute_once(tx: Any, name: str, key: str | uuid.UUID, function: Callable[[], Any]) -> bool:
    """Call `function` unless `name` was executed for this key before; whether it was called.

    That it was is remembered in the same transaction, for `keep_inbox_seconds`.
    """
    if is_async(function):  # before anything is written
        raise WrongCall(f"the function is asynchronous: {_INSTEAD}")
    if not once(tx, name, key):
        return False
    must_have_run(function(), function, f"{_INSTEAD[0].upper()}{_INSTEAD[1:]}")
    return True


async def execute_once_async(
    tx: Any, name: str, key: str | uuid.UUID, function: Callable[[], Awaitable[Any]]
) -> bool:
    """`execute_once` on a session or connection of any kind, and with an async function."""
    if not await once_async(tx, name, key):
        return False
    await function()
    return True


def _dialect(tx: Any) -> str:
    return str(link_of(bare(tx, to_write=False)).dialect)


def _guarded_update(
    dialect: str,
    table: str,
    where: Mapping[str, Any],
    set: Mapping[str, Any],
    only_if: Mapping[str, Any],
) -> Flow[Guarded]:
    name = _quoted(table, dialect)
    values: dict[str, Any] = {}
    found = _conditions(where, dialect, "w", values)
    fits = _conditions(only_if, dialect, "g", values)
    changes = ", ".join(_assigned(set, dialect, values))
    # Locked first and then changed: what a count of changed rows means differs between drivers.
    lock = "" if dialect == "sqlite" else " FOR UPDATE"
    look = " ".join(("SELECT 1 FROM", name, "WHERE", found))
    rows = yield Statement(ROOM, "guarded_look", values, text=f"{look} AND {fits}{lock}")
    if not rows:
        rows = yield Statement(ROOM, "guarded_look", values, text=look)
        return Guarded.refused if rows else Guarded.absent
    change = " ".join(("UPDATE", name, "SET", changes, "WHERE", found, "AND", fits))
    yield Statement(ROOM, "guarded_update", values, text=change)
    return Guarded.updated


def _upsert(
    dialect: str, table: str, key: Mapping[str, Any], values: Mapping[str, Any]
) -> Flow[None]:
    given = {**key, **values}
    if not key:
        raise InvalidMessage("upsert needs a key: the columns of a unique index")
    bound = {f"v{n}": value for n, value in enumerate(given.values())}
    columns = [_quoted(each, dialect) for each in given]
    keys = ", ".join(columns[: len(key)])
    parts = [
        *("INSERT INTO", _quoted(table, dialect), f"({', '.join(columns)})"),
        f"VALUES ({', '.join(f':{name}' for name in bound)})",
    ]
    rest = columns[len(key) :]
    if dialect == "mysql":
        same = [f"{each} = VALUES({each})" for each in rest or columns[:1]]
        parts += ["ON DUPLICATE KEY UPDATE", ", ".join(same)]
    elif rest:
        changed = ", ".join(f"{each} = excluded.{each}" for each in rest)
        parts += [f"ON CONFLICT ({keys}) DO UPDATE SET", changed]
    else:
        parts += [f"ON CONFLICT ({keys}) DO NOTHING"]
    yield Statement(ROOM, "upsert", bound, text=" ".join(parts))


def _conditions(
    wanted: Mapping[str, Any], dialect: str, prefix: str, values: dict[str, Any]
) -> str:
    if not wanted:
        raise InvalidMessage("a guarded update says which row, and what it must be")
    parts = []
    for n, (column, value) in enumerate(wanted.items()):
        name = _quoted(column, dialect)
        options = (
            value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
        )
        either = []
        for m, option in enumerate(options):
            if option is None:
                either.append(f"{name} IS NULL")
            else:
                values[f"{prefix}{n}_{m}"] = option
                either.append(f"{name} = :{prefix}{n}_{m}")
        parts.append(f"({' OR '.join(either) or '1 = 0'})")
    return " AND ".join(parts)


def _assigned(changes: Mapping[str, Any], dialect: str, values: dict[str, Any]) -> list[str]:
    if not changes:
        raise InvalidMessage("a guarded update says what to set")
    parts = []
    for n, (column, value) in enumerate(changes.items()):
        values[f"s{n}"] = value
        parts.append(f"{_quoted(column, dialect)} = :s{n}")
    return parts


def _quoted(name: str, dialect: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidMessage(
            f"{name!r} is no name of a table or column: use letters, digits and _, and a dot after "
            "the schema"
        )
    mark = "`" if dialect == "mysql" else '"'
    return ".".join(f"{mark}{part}{mark}" for part in name.split("."))
