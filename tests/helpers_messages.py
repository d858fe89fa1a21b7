"""Messages as a relay would have read them, for tests of what comes after."""

import json
from collections.abc import Mapping

from postroom.messages import Message, lane_of, new_id


def make_message(
    payload: bytes = b'{"total":42}',
    *,
    id: str | None = None,
    topic: str = "orders",
    key: str | None = None,
    type: str = "order.placed.v1",
    aggregate_type: str | None = None,
    aggregate_id: str | None = None,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    headers_json: str | None = None,
    redrives: int = 0,
    position: int = 1,
) -> Message:
    """A message with sensible values for all that a test does not care about."""
    id = id or new_id()
    if headers:
        headers_json = json.dumps(headers, ensure_ascii=False)
    return Message(
        lane=lane_of(topic, key, id),
        position=position,
        id=id,
        topic=topic,
        key=key,
        type=type,
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        content_type=content_type,
        headers_json=headers_json,
        payload=payload,
        size=len(payload) + len(headers_json or ""),
        redrives=redrives,
        created_us=1_760_000_000_000_000 + position,
        expired=0,
        held=0,
        attempts=0,
        history=None,
    )


def make_messages(count: int, *, topic: str = "orders", keys: int = 7) -> list[Message]:
    """Messages whose payloads are their numbers."""
    return [
        make_message(b"%d" % number, topic=topic, key=f"key-{number % keys}", position=number + 1)
        for number in range(count)
    ]
