"""What goes over the wire to RabbitMQ and what its answers mean. No I/O.

Promise: whatever a message holds, it is one persistent, mandatory message; every string is sent
with its length, so none can end early and speak to the server for us.

The frames of a publish are written in one go: pamqp, aio-pika's encoder, takes as long for the head
of a message as all the rest of its way does.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from postroom.brokers.base import Outcome, Permanent, Transient, Unknown
from postroom.brokers.invoke import describe
from postroom.brokers.mould import Shape, mould, own_values, shape_of
from postroom.errors import InvalidMessage
from postroom.messages import Message, check_topic, wire_headers
from postroom.signals import redact

__all__ = [
    "BLOCKED",
    "NACKED",
    "closed",
    "head_of",
    "largest",
    "no_queue",
    "publish",
    "too_large",
]

_END = b"\xce"
_PREFIX: Final = "cloudEvents_"
_CLASS_BASIC, _PUBLISH, _MANDATORY = 60, 40, 1
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3
# content-type, headers, delivery-mode, message-id, timestamp: in this order in a header frame.
_PROPERTIES = 0x8000 | 0x2000 | 0x1000 | 0x0080 | 0x0040
_PERSISTENT = b"\x02"
_FRAME_REST = 8  # of a frame, beside what it carries
_TOO_LARGE = re.compile(r"message size (\d+) is larger than configured max size (\d+)")
_BARRED_TOPIC = re.compile(r"access to topic '([^']+)'")

_frame = struct.Struct(">BHI").pack
_header = struct.Struct(">HHQH").pack
_long = struct.Struct(">I").pack
_time = struct.Struct(">Q").pack

BLOCKED = Transient(
    "blocked",
    "RabbitMQ takes no messages: it is short of memory or disk, see `rabbitmqctl list_alarms`",
    down="broker",
)
NACKED = Transient(
    "nacked",
    "RabbitMQ could not store it: a queue is full and rejects, or lacks its majority of nodes",
    down="topic",
)


def publish(
    message: Message, *, channel: int, exchange: str, source: str, epoch: int, frame_max: int
) -> bytes | Permanent:
    """The bytes that publish a message, or why it can never be sent."""
    try:
        method = _method(channel, exchange, message.topic)
    except InvalidMessage as error:
        return Permanent("bad_topic", str(error))
    payload = message.payload
    try:
        head = _head(message, source, epoch, len(payload))
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        return Permanent("bad_header", describe(error))
    room = frame_max - _FRAME_REST
    if len(head) > room:
        said = f"its headers are {len(head):,} bytes, and RabbitMQ takes {room:,}"
        return Permanent("bad_header", said)
    parts = [method, _frame(_HEADER_FRAME, channel, len(head)), head, _END]
    for start in range(0, len(payload), room):
        piece = payload if len(payload) <= room else payload[start : start + room]
        parts += [_frame(_BODY_FRAME, channel, len(piece)), piece, _END]
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)
def _method(channel: int, exchange: str, topic: str) -> bytes:
    name, key = _short(exchange), _short(check_topic(topic))
    body = struct.pack(">HHH", _CLASS_BASIC, _PUBLISH, 0) + name + key + bytes([_MANDATORY])
    return _frame(_METHOD_FRAME, channel, len(body)) + body + _END


def _head(message: Message, source: str, epoch: int, size: int) -> bytes:
    table = _table(message, source, epoch)
    return b"".join(
        (
            _header(_CLASS_BASIC, 0, size, _PROPERTIES),
            _short(message.content_type),
            _long(len(table)),
            table,
            _PERSISTENT,
            _short(message.broker_id),
            _time(message.created_us // 1_000_000),
        )
    )


def _table(message: Message, source: str, epoch: int) -> bytes:
    if message.headers_json:
        headers = wire_headers(message, source=source, epoch=epoch, prefix=_PREFIX)
        template = _named(tuple(headers))
        values = [value.encode() for value in headers.values()]
    else:
        template = _mould(shape_of(message), source, epoch)
        values = own_values(message, _PREFIX)
    return template % tuple([part for value in values for part in (_long(len(value)), value)])


@functools.lru_cache(maxsize=4096)
def _named(names: tuple[str, ...]) -> bytes:
    return _template([(name, None) for name in names])


@functools.lru_cache(maxsize=4096)
def _mould(shape: Shape, source: str, epoch: int) -> bytes:
    return _template(mould(shape, source=source, epoch=epoch, prefix=_PREFIX))


def _template(fields: Sequence[tuple[str, bytes | None]]) -> bytes:
    """A table of strings, with places for the length of each value that is left out, and for the
    value itself."""
    parts = []
    for name, value in fields:
        parts.append((_short(name) + b"S").replace(b"%", b"%%"))
        given = None if value is None else _long(len(value)) + value
        parts.append(b"%b%b" if given is None else given.replace(b"%", b"%%"))
    return b"".join(parts)


def _short(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"{text[:40]!r}… is longer than 255 bytes")
    return bytes([len(raw)]) + raw


def head_of(properties: Any) -> dict[str, str]:
    """The headers of a message that came, as text. Its own content type counts where none is."""
    table: Mapping[str, Any] = properties.headers or {}
    headers = {str(name): _text(value) for name, value in table.items()}
    if properties.content_type:
        headers.setdefault("content-type", _text(properties.content_type))
    return headers


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)


def no_queue(topic: str, exchange: str) -> Transient:
    """Nobody takes the topic: a missing queue is put right by a person, not by trying again."""
    if exchange:
        why = f"no queue is bound to exchange {exchange} for routing key {topic}"
        how = "start its consumer once, or bind a queue"
    else:
        why = f"there is no queue named {topic}"
        how = f"declare it, or add ?exchange=NAME to the URL: topic {topic} is then a routing key"
    return Transient("no_queue", f"{why}, so it would be lost; {how}", down="topic")


def largest(said: str) -> int | None:
    """The largest message the server takes, where it closed the channel because of one."""
    found = _TOO_LARGE.search(said)
    return int(found[2]) if found else None


def closed(said: str, message: Message) -> Outcome:
    """What it means for a message under way that the server closed the channel, saying this."""
    if (found := _TOO_LARGE.search(said)) and len(message.payload) == int(found[1]):
        return too_large(int(found[1]), int(found[2]))
    text = f"RabbitMQ closed the channel: {redact(said[:500])}"
    if (barred := _BARRED_TOPIC.search(said)) and barred[1] == message.topic:
        return Transient("not_permitted", text, down="topic")
    code = "not_permitted" if "ACCESS_REFUSED" in said else "channel_closed"
    return Unknown(code, text, down="broker")


def too_large(size: int, most: int) -> Permanent:
    """A message that the server would close the channel for."""
    said = f"the message is {size:,} bytes, the server takes {most:,}"
    return Permanent(
        "too_large", f"{said}: send a reference to the large part, or raise max_message_size"
    )
