"""Delivering in a test: by a real relay from a database, or out of an open transaction.

Given a URL, a relay takes the lanes, sends to a broker in memory and settles, as in production.
Given a session or connection, whose messages nobody else can see yet, they are read and removed on
it, in the order a relay would send them; there is then no relay, so nothing is retried or held.
"""

from __future__ import annotations

import uuid
from typing import Any

from postroom.brokers.memory import MemoryBroker
from postroom.databases.kinds import bare, kind_of
from postroom.errors import Refused
from postroom.flow import Flow, Row, Rows, Statement
from postroom.outbox.relay import Relay
from postroom.testing.looking import ROOM, Posted
from postroom.testing.running import on_connection, on_connection_async, on_database, wait_for

__all__ = ["drain", "drain_async"]

OUTBOX = "postroom.outbox"
# What a relay writes down about itself, and a test's relay must not leave behind.
_ON_RECORD = ("routes", "keep_delivered_seconds")


def drain(where: Any, broker: MemoryBroker | None = None, **settings: Any) -> list[Posted]:
    """Deliver what is due and return what arrived, in the order of arrival.

    `where` is the database's URL, or a session or connection with an open transaction. A `broker`
    of your own may refuse messages (`broker.fail(…)`); `settings` are those of the relay.
    """
    if isinstance(where, str):
        return wait_for(_drain(where, broker, settings))
    _refuse_settings(broker, settings)
    return on_connection(where, _take_all(), "drain_async")


async def drain_async(
    where: Any, broker: MemoryBroker | None = None, **settings: Any
) -> list[Posted]:
    """`drain` in an event loop, and on an asynchronous session or connection."""
    if isinstance(where, str):
        return await _drain(where, broker, settings)
    _refuse_settings(broker, settings)
    where = bare(where)
    kind = kind_of(where)
    if kind.is_session and kind.is_async:
        from postroom.outbox import sessions

        await sessions.unscoped(where).run_sync(sessions.write_now, [], None)  # type: ignore[union-attr]
    return await on_connection_async(where, _take_all())


async def _drain(url: str, broker: MemoryBroker | None, settings: dict[str, Any]) -> list[Posted]:
    broker = broker or MemoryBroker(f"drain-{uuid.uuid4().hex[:12]}")
    before = len(broker.messages)
    address = f"memory://{broker.name}"
    relay = Relay(url, address, brokers={address: broker}, rebind=True, listen=False, **settings)
    record = await on_database(url, _read_record())
    try:
        drained = await relay.drain_once()
    finally:
        await relay.close()
        await on_database(url, _restore_record(record))
    if drained.elsewhere:
        raise Refused(
            f"{drained.elsewhere} of the lanes belong to a relay that is running, or was killed a "
            "moment ago: stop it first, or let its lease pass with clock.advance(lease_seconds)."
        )
    return [Posted.of_message(message) for message in broker.messages[before:]]


def _read_record() -> Flow[dict[str, str | None]]:
    record: dict[str, str | None] = {}
    for item in _ON_RECORD:
        rows = yield Statement(OUTBOX, "meta_read", {"item": item})
        record[item] = rows[0][0] if rows else None
    return record


def _restore_record(record: dict[str, str | None]) -> Flow[None]:
    for item, value in record.items():
        if value is None:
            yield Statement(ROOM, "meta_forget", {"item": item})
        else:
            yield Statement(OUTBOX, "meta_write", {"item": item, "value": value})


def _take_all() -> Flow[list[Posted]]:
    """Read and remove what is due; what has expired is removed and not delivered."""
    rows: Rows = yield Statement(ROOM, "outbox_seen")
    later: Rows = yield Statement(ROOM, "delayed_seen")
    due = [row for row in [*rows, *later] if row[12]]
    for row in due:
        yield Statement(ROOM, "take", {"id": str(row[0])})
    return [Posted.of_row(row) for row in due if not _expired(row)]


def _expired(row: Row) -> bool:
    return bool(row[11])


def _refuse_settings(broker: MemoryBroker | None, settings: dict[str, Any]) -> None:
    if broker is not None or settings:
        raise Refused(
            "an open transaction is drained without a relay, so there is no broker and no setting: "
            "commit and give drain the database's URL to have one."
        )
