"""`once`: the first to write (consumer, message id) handles the message; everybody else skips it.

The row is inserted first, in the caller's transaction, and never looked for before: two copies that
arrive at once meet at the primary key, where the second waits for the first. If the first commits,
the second is a duplicate; if it rolls back, the second is the first. Effect and row share one
commit, so a crash leaves both or neither.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

from postroom.databases.caller import carry_out, carry_out_async
from postroom.errors import ContentChanged, InvalidMessage
from postroom.flow import Flow, Statement, Value

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    Bind = Engine | Connection | None

__all__ = ["once", "once_async"]

ROOM = __package__ or "postroom.inbox"
MOST_CHARACTERS = 255
_WHAT = "record of this message"


def once(
    tx: Any,
    consumer: str,
    message_id: str | uuid.UUID,
    *,
    content: bytes | None = None,
    bind: Bind = None,
) -> bool:
    """Whether `consumer` sees this message for the first time: then handle it, on the same `tx`.

    False is a duplicate: acknowledge it and do nothing. With `content`, the message's payload, a
    message that comes again under the same id with other content is an error, not a duplicate.
    `bind` says which database of a session with several holds the inbox.
    """
    flow = _once(consumer, message_id, content)
    return carry_out(tx, flow, what=_WHAT, instead="inbox.once_async", bind=bind)


async def once_async(
    tx: Any,
    consumer: str,
    message_id: str | uuid.UUID,
    *,
    content: bytes | None = None,
    bind: Bind = None,
) -> bool:
    """`once` on a session or connection of any kind."""
    flow = _once(consumer, message_id, content)
    return await carry_out_async(tx, flow, what=_WHAT, bind=bind)


def _once(consumer: str, message_id: str | uuid.UUID, content: bytes | None) -> Flow[bool]:
    digest = None if content is None else hashlib.sha256(content).hexdigest()
    return _insert(_checked("consumer", consumer), _checked("message_id", str(message_id)), digest)


def _insert(consumer: str, message_id: str, digest: str | None) -> Flow[bool]:
    values: dict[str, Value] = {"consumer": consumer, "message_id": message_id, "digest": digest}
    rows = yield Statement(ROOM, "insert", values)
    if rows and rows[0][0]:
        return True
    if digest is not None:
        known = yield Statement(ROOM, "digest", values)
        if known and known[0][0] not in (None, digest):
            raise ContentChanged(
                f"message {message_id} came to {consumer} again with other content: its publisher "
                "used the id twice, or it was changed on its way"
            )
    return False


def _checked(name: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MOST_CHARACTERS:
        raise InvalidMessage(f"{name} must be text of 1 to {MOST_CHARACTERS} characters")
    if "\x00" in value:
        raise InvalidMessage(f"{name} must not hold a NUL character")
    return value
