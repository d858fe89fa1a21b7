"""All an operator can see or do, for the command line and everything else that shows it.

Every action opens a connection, does one thing, and answers with plain values. What changes
anything is written to the audit table: who, when, what, why.
"""

from __future__ import annotations

import base64
import datetime as dt
import getpass
import json
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.dead_letters import store as letters
from postroom.errors import ConfigurationError, Refused

__all__ = ["dead_list", "dead_show", "discard", "message", "operator", "retry", "status"]

ROOM = __package__ or "postroom.ops"
COUNT_LIMIT = 10_000

_MESSAGE_FIELDS = (
    *("place", "lane", "position", "topic", "key", "type", "aggregate_type", "aggregate_id"),
    *("content_type", "headers", "payload", "redrives", "attempts", "error_code", "error"),
    *("created_at", "at", "history"),
)
_LETTER_FIELDS = (
    *("id", "topic", "key", "type", "state", "error_code", "error", "attempts", "redrives"),
    *("holds_key", "died_at"),
)
_LETTER_MORE = (
    *("aggregate_type", "aggregate_id", "content_type", "headers", "payload", "history", "note"),
    *("lane", "position", "created_at"),
)
# The observable state of a message by the table it is in.
_STATES = {
    "outbox": "pending",
    "delayed": "pending",
    "held": "pending",
    "blocked": "aborted",
    "archive": "succeeded",
    "dead": "aborted",
    "queued": "pending",
    "resolved": "aborted",
    "discarded": "aborted",
}
# Where a message is in two tables, the first of these tells its state.
_TELLING = ("archive", "outbox", "delayed", "held", "blocked", "dead", "queued", "discarded")


def operator() -> str:
    """Who acts, for the audit table."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:255]


@asynccontextmanager
async def _desk(url: str) -> AsyncIterator[WorkerLink]:
    database = Database(url)
    link = await database.connect()
    try:
        yield link
    except DatabaseLost as lost:
        cause = lost.__cause__
        if isinstance(cause, Refused):
            raise cause from None
        raise database.explain(lost) from lost
    finally:
        await link.close()


async def status(url: str) -> dict[str, Any]:
    """How the outbox stands: depth, age, lanes and their owners. Costs the same at any size."""
    async with _desk(url) as link:
        ((pending, held, delayed, dead),) = await link.query(ROOM, "depth", most=COUNT_LIMIT)
        ((oldest_ms,),) = await link.query(ROOM, "oldest")
        lanes = await link.query(ROOM, "lanes")
        workers = await link.query(ROOM, "workers")
        meta = {str(row[0]): str(row[1]) for row in await link.query(ROOM, "meta")}
    return {
        "pending": pending,
        "held": held,
        "delayed": delayed,
        "dead": dead,
        "count_limit": COUNT_LIMIT,
        "oldest_pending_seconds": None if oldest_ms is None else max(0, oldest_ms) / 1000,
        "schema_version": int(meta.get("schema_version", 0)),
        "routes": meta.get("routes"),
        "lanes": [
            {
                "lane": lane,
                "owner": owner,
                "owner_name": name,
                "epoch": epoch,
                "paused": bool(paused),
                "lease_seconds": None if lease_ms is None else lease_ms / 1000,
            }
            for lane, owner, name, epoch, paused, lease_ms in lanes
        ],
        "workers": [
            {"incarnation": who, "kind": kind, "name": name, "seen_seconds_ago": seen_ms / 1000}
            for who, kind, name, seen_ms in workers
        ],
    }


async def message(url: str, id: str) -> dict[str, Any]:
    """One message, wherever it is."""
    id = _checked(id)
    async with _desk(url) as link:
        rows = await link.query(ROOM, "find", id=id)
        found = [dict(zip(_MESSAGE_FIELDS, row, strict=True)) for row in rows]
        found.sort(key=lambda one: _TELLING.index(one["place"]) if one["place"] in _TELLING else 99)
        if not found:
            raise Refused(f"there is no message {id}: never committed, or delivered and pruned.")
        told = found[0]
        told["state"] = _STATES[told["place"]]
        if told["place"] == "held" and told["attempts"]:
            told["state"] = "failed"
        if told["place"] == "resolved" and told["error_code"] != "expired":
            told["state"] = "succeeded"
        if told["place"] in ("outbox", "held") and await link.query(
            ROOM, "sending", lane=told["lane"], position=told["position"]
        ):
            told["state"] = "sending"
    return {"id": id, **_readable(told)}


async def dead_list(url: str, *, state: str = "dead", rows: int = 100) -> list[dict[str, Any]]:
    """Dead letters, newest first."""
    async with _desk(url) as link:
        found = await link.query(letters.ROOM, "list", state=state, rows=rows)
    return [_readable(dict(zip(_LETTER_FIELDS, row, strict=True))) for row in found]


async def dead_show(url: str, id: str) -> dict[str, Any]:
    """One dead letter with its payload and all its attempts."""
    id = _checked(id)
    async with _desk(url) as link:
        found = await link.query(letters.ROOM, "show", id=id)
    if not found:
        raise Refused(f"there is no dead letter {id}; `postroom dead list` shows them.")
    return _readable(dict(zip(_LETTER_FIELDS + _LETTER_MORE, found[0], strict=True)))


async def retry(url: str, id: str, *, why: str | None = None) -> letters.Decided:
    """Send a dead letter again."""
    id = _checked(id)
    async with _desk(url) as link:
        return await link.transact(letters.retry(id, who=operator(), why=why))


async def discard(url: str, id: str, *, why: str) -> letters.Decided:
    """Give a dead letter up."""
    if not why.strip():
        raise ConfigurationError('say why: --reason "…"')
    id = _checked(id)
    async with _desk(url) as link:
        return await link.transact(letters.discard(id, who=operator(), why=why))


def _checked(id: str) -> str:
    try:
        return str(uuid.UUID(id))
    except ValueError:
        raise ConfigurationError(f"{id!r} is not a message id: an id is a UUID") from None


def _readable(fields: dict[str, Any]) -> dict[str, Any]:
    """Times as text, JSON as values, payload as what it is."""
    for name in ("created_at", "at", "died_at"):
        if fields.get(name) is not None:
            moment = dt.datetime.fromtimestamp(fields[name] / 1e6, dt.UTC)
            fields[name] = moment.isoformat(timespec="milliseconds")
    for name in ("headers", "history"):
        if fields.get(name):
            fields[name] = json.loads(fields[name])
    if "holds_key" in fields:
        fields["holds_key"] = bool(fields["holds_key"])
    payload = fields.pop("payload", None)
    if payload is not None:
        try:
            fields["payload"] = json.loads(bytes(payload))
        except ValueError:
            fields["payload_base64"] = base64.b64encode(bytes(payload)).decode()
    return fields
