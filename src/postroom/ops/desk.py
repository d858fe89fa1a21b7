"""What every operator's action shares: a connection of its own, a name for the audit, and words
that people and programs can read."""

from __future__ import annotations

import base64
import datetime as dt
import difflib
import json
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.dead_letters import store as letters
from postroom.errors import ConfigurationError, PostroomError
from postroom.flow import Row, Value
from postroom.inbox.returning import Consumers

__all__ = [
    "archive_blocks",
    "checked_id",
    "checked_reason",
    "checked_source",
    "desk",
    "known_sources",
    "moment",
    "readable",
]

# Where redriven letters of consumers go.
letters.return_to("consumer", Consumers())

ROOM = __package__ or "postroom.ops"
PAGE_BLOCKS = 32
_SPAN = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@asynccontextmanager
async def desk(url: str) -> AsyncIterator[WorkerLink]:
    """A connection to do one thing on; what goes wrong on it comes out as one of our errors."""
    database = Database(url)
    link = await database.connect()
    try:
        yield link
    except DatabaseLost as lost:
        cause = lost.__cause__
        if isinstance(cause, PostroomError):
            raise cause from None
        raise database.explain(lost) from lost
    finally:
        await link.close()


async def archive_blocks(
    link: WorkerLink, room: str, name: str, **values: Value
) -> AsyncIterator[list[Row]]:
    """Yield the rows of PostgreSQL's archive, a range of blocks of each day at a time, by the query
    `name`. Its pages need no index, and only a replay moves rows while they are read."""
    ((end,),) = await link.query(ROOM, "archive_end")
    for block in range(0, end, PAGE_BLOCKS):
        rows = await link.query(room, name, block=block, blocks=PAGE_BLOCKS, **values)
        if rows:
            yield rows


def checked_id(id: str) -> str:
    """An id in its one spelling, or an error that says what an id is."""
    try:
        return str(uuid.UUID(id))
    except ValueError:
        raise ConfigurationError(f"{id!r} is not a message id: an id is a UUID") from None


def checked_reason(why: str) -> str:
    """What gives something up needs a reason."""
    if not why.strip():
        raise ConfigurationError('say why: --reason "…"')
    return why


async def known_sources(link: WorkerLink) -> list[str]:
    """Return every source that dead letters of this database can have, in order."""
    return [str(row[0]) for row in await link.query(letters.ROOM, "sources")]


async def checked_source(link: WorkerLink, source: str | None) -> str | None:
    """Return the source, or raise ConfigurationError with the known ones if it is unknown."""
    if source is None or source in (known := await known_sources(link)):
        return source
    name = source.partition(":")[2] or source
    near = difflib.get_close_matches(f"consumer:{name}", known, 1, 0.9)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigurationError(f"Unknown source {source!r}; {hint}known sources: {', '.join(known)}.")


def moment(text: str | None, option: str) -> int | None:
    """A time in microseconds: "2026-11-15", "2026-11-15T12:00+01:00", or "2h": so long ago."""
    if text is None:
        return None
    if match := _SPAN.fullmatch(text.strip()):
        seconds = float(match["number"]) * _UNITS[match["unit"]]
        return int((dt.datetime.now(dt.UTC).timestamp() - seconds) * 1e6)
    try:
        when = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"{option} must be a time such as 2026-11-15T12:00, or how long ago, such as 90s, 15m, "
            f"2h or 7d, not {text!r}."
        ) from None
    when = when if when.tzinfo else when.replace(tzinfo=dt.UTC)
    return int(when.timestamp() * 1e6)


def readable(fields: dict[str, Any]) -> dict[str, Any]:
    """Times as text, JSON as values, payload as what it is."""
    for name in ("created_at", "at", "died_at", "retried_at"):
        if fields.get(name) is not None:
            when = dt.datetime.fromtimestamp(fields[name] / 1e6, dt.UTC)
            fields[name] = when.isoformat(timespec="milliseconds")
    for name in ("headers", "history"):
        if fields.get(name):
            fields[name] = json.loads(fields[name])
    for name in ("holds_key", "blocked"):
        if name in fields:
            fields[name] = bool(fields[name])
    payload = fields.pop("payload", None)
    if payload is not None:
        try:
            fields["payload"] = json.loads(bytes(payload))
        except ValueError:
            fields["payload_base64"] = base64.b64encode(bytes(payload)).decode()
    return fields
