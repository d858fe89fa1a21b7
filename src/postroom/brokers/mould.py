"""The headers of many messages, of which most is the same: that is made once. No I/O.

Promise: they are those of `wire_headers`, in the same order. Only messages whose publisher gave no
headers of his own have a mould; they are most of them, and making each header of each of them anew
takes longer than all the rest that a broker does with a message.
"""

from __future__ import annotations

from typing import TypeAlias

from postroom.messages import Message, Prefix, attribute_text, wire_headers, wire_time

__all__ = ["Shape", "mould", "own_values", "shape_of"]

# Type, content type, and whether there are a key, an aggregate's type and an aggregate's id.
Shape: TypeAlias = tuple[str, str, bool, bool, bool]


def shape_of(message: Message) -> Shape:
    """What messages of one mould have in common."""
    return (
        message.type,
        message.content_type,
        message.key is not None,
        message.aggregate_type is not None,
        message.aggregate_id is not None,
    )


def mould(
    shape: Shape, *, source: str, epoch: int, prefix: Prefix
) -> list[tuple[str, bytes | None]]:
    """Names and values of the headers in their order; None where each message has its own."""
    type, content_type, keyed, typed, identified = shape
    example = Message(
        0, 0, "", "", "" if keyed else None, type, "" if typed else None,
        "" if identified else None, content_type, None, b"", 0, 0, 0, 0, 0, 0, None,
    )  # fmt: skip
    own = {f"{prefix}{name}" for name in ("id", "time", "partitionkey")}
    own |= {"event_id", "postroom-position", "aggregate_type", "aggregate_id"}
    said = wire_headers(example, source=source, epoch=epoch, prefix=prefix)
    return [(name, None if name in own else value.encode()) for name, value in said.items()]


def own_values(message: Message, prefix: Prefix) -> list[bytes]:
    """The values that are this message's own, in the order of its mould."""
    id = message.id.encode()
    values = [
        id,
        wire_time(message.created_us).encode(),
        id,
        b"%d:%d" % (message.lane, message.position),
    ]
    if message.key is not None:
        key = attribute_text(message.key) if prefix == "ce-" else message.key
        values.append(key.encode())
    if message.aggregate_type is not None:
        values.append(message.aggregate_type.encode())
    if message.aggregate_id is not None:
        values.append(message.aggregate_id.encode())
    return values
