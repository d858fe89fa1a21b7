"""Django: publish inside `transaction.atomic()`, and run everything else from `manage.py`.

    INSTALLED_APPS = [..., "postroom.django"]
    POSTROOM = {"broker_url": "nats://localhost:4222"}

`migrate` makes the tables, `manage.py postroom relay` delivers. The promise is that of `Outbox`: a
message exists if and only if your change does, savepoints of nested `atomic()` included.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing import Unpack

    from postroom.outbox.publish import Outbox, Published

__all__ = ["Wishes", "publish", "publish_many", "was_committed"]


class Wishes(TypedDict, total=False):
    """What `publish` takes besides the message: the arguments of `Outbox.publish`."""

    type: str | None
    topic: str | None
    key: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    sequence: int | None
    headers: Mapping[str, str] | None
    content_type: str | None
    deliver_at: dt.datetime | None
    expires_at: dt.datetime | None
    serialize_key: bool
    dedup_key: str | None
    id: str | uuid.UUID | None


def publish(payload: Any, using: str | None = None, **wishes: Unpack[Wishes]) -> Published:
    """Write a message in the present `transaction.atomic()` of a database, and return its id.

    `using` is an alias of DATABASES; without it, the one that POSTROOM names, else "default".
    """
    connection, outbox = _of(using)
    return outbox.publish(connection, payload, **wishes)


def publish_many(
    messages: Iterable[Any], using: str | None = None, *, serialize_key: bool = False
) -> list[Published]:
    """Write many messages in one statement, in their order."""
    connection, outbox = _of(using)
    return outbox.publish_many(connection, messages, serialize_key=serialize_key)


def was_committed(message: str | uuid.UUID | Published, using: str | None = None) -> bool:
    """Whether a message was committed, after a COMMIT whose answer was lost. Needs no block."""
    connection, outbox = _of(using)
    return outbox.was_committed(connection, message)


def _of(using: str | None) -> tuple[Any, Outbox]:
    # Here, so that Django can load the app before its settings are there.
    from postroom.django import settings

    return settings.connection(using), settings.outbox()
