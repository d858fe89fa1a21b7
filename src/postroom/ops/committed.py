"""The application's own truth for `verify`: ids from a file, from standard input or from a query.

A query runs on the very connection, and so in the very snapshot, in which the tables are read. Its
rows come a few at a time, whatever the driver.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from postroom.databases.database import WorkerLink
from postroom.errors import ConfigurationError, Unreachable
from postroom.ops.ledger import as_bytes

__all__ = ["check_query", "from_file", "from_query"]

ROWS = 5000


def from_file(name: str) -> Iterator[list[bytes]]:
    """The ids of a file, one a line; `-` is standard input. Lines with # are left out."""
    if name == "-":
        yield from _lines(sys.stdin, "standard input")
        return
    try:
        with Path(name).open(encoding="utf-8") as file:
            yield from _lines(file, name)
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read: {error.strerror}.") from None


def _lines(file: IO[str], name: str) -> Iterator[list[bytes]]:
    some: list[bytes] = []
    try:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if text and not text.startswith("#"):
                some.append(_line_id(text, number, name))
            if len(some) >= ROWS:
                yield some
                some = []
    except UnicodeDecodeError:
        raise ConfigurationError(f"{name} is not text: it needs one message id a line.") from None
    yield some


def _line_id(text: str, number: int, name: str) -> bytes:
    try:
        return as_bytes(text)
    except ValueError:
        raise ConfigurationError(
            f"line {number} of {name} is no message id: {text[:60]!r}; an id is a UUID."
        ) from None


def check_query(text: str) -> str:
    """One query without its semicolon, or a sentence."""
    query = text.strip().rstrip(";").strip()
    if query.partition(" ")[0].partition("\n")[0].upper() not in ("SELECT", "WITH", "VALUES"):
        raise ConfigurationError(
            '--committed-sql needs one SELECT of ids, such as "SELECT message_id FROM orders".'
        )
    if ";" in query:
        raise ConfigurationError("--committed-sql takes one query, without a semicolon in it.")
    return query


async def from_query(link: WorkerLink, query: str) -> AsyncIterator[list[bytes]]:
    """The ids a query returns, on a link that has begun its snapshot."""
    rows = _READERS[link.dialect](link.driver, query)
    while True:
        try:
            some = await anext(rows, None)
        except Exception as error:
            told = link.database.explain(error)
            if isinstance(told, Unreachable):
                raise told from error
            raise ConfigurationError(f"--committed-sql cannot be run: {told}") from error
        if some is None:
            return
        yield [_id(row) for row in some]


def _id(row: Sequence[Any]) -> bytes:
    if len(row) != 1:
        raise ConfigurationError(f"--committed-sql must return one column of ids, not {len(row)}.")
    value = row[0]
    try:
        if isinstance(value, bytes | bytearray | memoryview) and len(value) == 16:
            return bytes(value)
        if isinstance(value, bytes | bytearray):
            value = value.decode()
        return value.bytes if isinstance(value, uuid.UUID) else as_bytes(str(value))
    except ValueError:
        shown = "a row without an id (add WHERE … IS NOT NULL)" if value is None else repr(value)
        raise ConfigurationError(
            f"--committed-sql returned {shown[:80]}, which is no message id: an id is a UUID."
        ) from None


async def _postgresql(driver: Any, query: str) -> AsyncIterator[list[Sequence[Any]]]:
    fetch = f"FETCH {ROWS} FROM postroom_committed"
    await driver.execute("DECLARE postroom_committed NO SCROLL CURSOR FOR " + query)
    if type(driver).__module__.startswith("asyncpg"):
        while rows := await driver.fetch(fetch):
            yield [tuple(row) for row in rows]
        return
    while rows := await (await driver.execute(fetch)).fetchall():
        yield rows


async def _mysql(driver: Any, query: str) -> AsyncIterator[list[Sequence[Any]]]:
    from importlib import import_module

    module = type(driver).__module__.partition(".")[0]
    async with driver.cursor(import_module(f"{module}.cursors").SSCursor) as cursor:
        await cursor.execute(query)
        while rows := await cursor.fetchmany(ROWS):
            yield list(rows)


async def _sqlite(driver: Any, query: str) -> AsyncIterator[list[Sequence[Any]]]:
    async with driver.execute(query) as cursor:
        while rows := await cursor.fetchmany(ROWS):
            yield list(rows)


_READERS = {"postgresql": _postgresql, "mysql": _mysql, "sqlite": _sqlite}
