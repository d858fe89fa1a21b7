"""What was published, as the test's own connection sees it, long before anything is committed.

Inside a test that pytest runs, only what the test's own body published counts: messages that
fixtures or earlier tests left behind are not its doing. `everything=True` shows those too.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from postroom.databases.kinds import bare, kind_of
from postroom.flow import Flow, Row, Statement
from postroom.messages import Encoded, Message
from postroom.outbox import writing
from postroom.testing.running import on_connection, on_connection_async

__all__ = ["Posted", "begin_test", "published", "published_async", "see"]

ROOM = "postroom.testing"
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class Posted:
    """A message as a test wants to see it; JSON payloads are decoded, others stay bytes."""

    type: str
    topic: str
    key: str | None
    payload: Any
    headers: dict[str, str]
    id: str
    content_type: str
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    deliver_at: dt.datetime | None = None
    expires_at: dt.datetime | None = None

    @classmethod
    def of_message(cls, message: Message) -> Posted:
        """A message that a broker received."""
        return cls(
            type=message.type,
            topic=message.topic,
            key=message.key,
            payload=_decoded(message.payload, message.content_type),
            headers=message.headers,
            id=message.id,
            content_type=message.content_type,
            aggregate_type=message.aggregate_type,
            aggregate_id=message.aggregate_id,
        )

    @classmethod
    def of_queued(cls, message: Encoded) -> Posted:
        """A message that a session has queued."""
        row = (
            message.id,
            message.topic,
            message.key,
            message.type,
            message.aggregate_type,
            message.aggregate_id,
            message.content_type,
            message.headers,
            message.payload,
            message.expires_us,
            message.deliver_us,
        )
        return cls.of_row(row)

    @classmethod
    def of_row(cls, row: Row) -> Posted:
        """A row of `outbox_seen` or `delayed_seen`."""
        id, topic, key, type, aggregate_type, aggregate_id, content_type, headers, payload = row[:9]
        return cls(
            type=type,
            topic=topic,
            key=key,
            payload=_decoded(payload, content_type),
            headers=json.loads(headers) if headers else {},
            id=str(id),
            content_type=content_type,
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            expires_at=_moment(row[9]),
            deliver_at=_moment(row[10]),
        )


def _decoded(payload: bytes, content_type: str) -> Any:
    kind = content_type.partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    return json.loads(payload) if is_json else bytes(payload)


def _moment(microseconds: int | None) -> dt.datetime | None:
    if microseconds is None:
        return None
    return _EPOCH + dt.timedelta(microseconds=int(microseconds))


def published(tx: Any, type: str | None = None, *, everything: bool = False) -> list[Posted]:
    """What was published and not delivered yet, as `tx` sees it: committed by anyone, or written on
    `tx` itself and not yet committed. `type` picks one type of message.

    First what waits for the relay, in its order, then what has a `deliver_at` in its order of time.
    """
    return _pick(on_connection(tx, see(), "published_async"), type, everything)


async def published_async(
    tx: Any, type: str | None = None, *, everything: bool = False
) -> list[Posted]:
    """`published` on any session or connection. What an `AsyncSession` has queued comes last."""
    rows = await on_connection_async(tx, see())
    # What is queued is on this very session, and so the test's own.
    queued = [each for each in _queued(tx) if type is None or each.type == type]
    return _pick(rows, type, everything) + queued


def see() -> Flow[list[Posted]]:
    """Every message that is not delivered, on whatever connection this runs."""
    rows = yield Statement(ROOM, "outbox_seen")
    later = yield Statement(ROOM, "delayed_seen")
    return [Posted.of_row(row) for row in [*rows, *later]]


def _queued(tx: Any) -> list[Posted]:
    tx = bare(tx)
    if not kind_of(tx).is_session:
        return []
    from postroom.outbox import sessions

    return [Posted.of_queued(message) for message in sessions.queued(sessions.unwrapped(tx))]


_own: set[str] | None = None


def begin_test() -> None:
    """From now on only what this process publishes counts as the test's own."""
    global _own
    if _own is None:
        writing.watch(lambda id: _own.add(id) if _own is not None else None)
    _own = set()


def _pick(found: Iterable[Posted], type: str | None, everything: bool) -> list[Posted]:
    own = None if everything else _own
    return [
        each
        for each in found
        if (type is None or each.type == type) and (own is None or each.id in own)
    ]
