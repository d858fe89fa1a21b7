"""What goes over the wire to NATS JetStream and what its answers mean. No I/O.

Promise: no topic, header or payload can end its own line and speak to the server for us.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from postroom.brokers.base import DELIVERED, Outcome, Permanent, Transient
from postroom.brokers.invoke import describe
from postroom.brokers.receiving import decoded, plain_headers, spelling
from postroom.errors import InvalidMessage
from postroom.messages import Message, attribute_text, check_topic, wire_headers, wire_time
from postroom.signals import redact

__all__ = [
    "PIN",
    "Arrived",
    "answer_of",
    "message_headers",
    "no_stream",
    "parsed_headers",
    "publish_command",
]

PIN = "Nats-Pin-Id"  # the server's own; in another spelling it is a header of the publisher's

_NO_RESPONDERS = "503"
_BLANKS = " \t\n\r\x0b\x0c"  # of bytes; text knows more
_NOT_YOURS = ("nats-msg-id", "nats-pin-id")  # ours, and the server's: a publisher's are left out
_TOO_LARGE = {10054, 10097}  # the message, its headers
_NEVER = {10165, 10166}  # a Nats-TTL header that is wrong, or that the stream does not allow
# Not this message's fault: no resources, no leader, no quorum, JetStream off, store full or failed.
_STREAM_DOWN = {10004, 10005, 10008, 10009, 10023, 10028, 10039, 10047, 10076, 10077, 10118, 10167}


def publish_command(
    message: Message, reply: bytes, *, source: str, epoch: int, max_payload: int
) -> bytes | Permanent:
    """The bytes that publish a message, or why it can never be sent."""
    try:
        subject = _subject(message.topic)
    except InvalidMessage as error:
        return Permanent("bad_topic", str(error))
    try:
        head = _head(message, source, epoch)
    except (ValueError, TypeError) as error:
        return Permanent("bad_header", describe(error))
    payload = message.payload
    size = len(head) + len(payload)
    if size > max_payload:
        return Permanent(
            "too_large",
            f"the message is {size:,} bytes with its headers, the server takes {max_payload:,}: "
            "send a reference to the large part, or raise max_payload on the server",
        )
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, len(head), size, head, payload)


class Arrived(NamedTuple):
    """A message of a stream, its headers plain."""

    subject: str
    reply: str
    headers: dict[str, str]
    data: bytes


def message_headers(raw: bytes) -> dict[str, str]:
    """The headers of a message: read by nats-py's rules, and plain, in one go."""
    found: dict[str, str] = {}
    text = raw.decode("utf-8", "replace")
    odd = "%" in text or '"' in text  # else there is nothing to decode
    for line in text.split("\r\n"):
        wire_name, colon, value = line.partition(":")
        if colon and (known := _header_name(wire_name)) is not None:
            name, encoded = known
            value = value.strip(_BLANKS)
            found[name] = decoded(value) if odd and encoded else value
    return found


def parsed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The same from headers that nats-py has read."""
    found = plain_headers((name, headers[name]) for name in headers if name != PIN)
    return found | ({PIN: headers[PIN]} if PIN in headers else {})


@functools.lru_cache(maxsize=4096)
def _header_name(name: str) -> tuple[str, bool] | None:
    name = name.strip(_BLANKS)
    if name == PIN:
        return name, False
    return None if not name.isascii() or any(map(str.isspace, name)) else spelling(name)


@functools.lru_cache(maxsize=4096)
def _subject(topic: str) -> bytes:
    return check_topic(topic).encode()


def _head(message: Message, source: str, epoch: int) -> bytes:
    text, ends = (
        _head_with_own(message, source, epoch)
        if message.headers_json
        else _plain_head(message, source, epoch)
    )
    # Every line end must be one of ours: counting them is cheaper than looking at each value.
    key = message.key or ""  # encoded it would do no harm, but no attribute may hold one
    if text.count("\n") != ends or text.count("\r") != ends or "\n" in key or "\r" in key:
        raise ValueError("a header holds a line end")
    return text.encode()


def _plain_head(message: Message, source: str, epoch: int) -> tuple[str, int]:
    """The head of a message whose publisher gave no headers, and how many lines it has.

    It says what `wire_headers` says, in half of the time.
    """
    id = message.id
    text = (
        f"NATS/1.0\r\nNats-Msg-Id: {message.broker_id}\r\nce-id: {id}\r\nevent_id: {id}\r\n"
        f"ce-time: {wire_time(message.created_us)}\r\n"
        f"postroom-position: {message.lane}:{message.position}\r\n"
        f"{_shared_lines(message.type, message.content_type, source, epoch)}"
    )
    ends = 14
    if message.key is not None:
        text, ends = f"{text}ce-partitionkey: {attribute_text(message.key)}\r\n", ends + 1
    if message.aggregate_type is not None:
        text, ends = f"{text}aggregate_type: {message.aggregate_type}\r\n", ends + 1
    if message.aggregate_id is not None:
        text, ends = f"{text}aggregate_id: {message.aggregate_id}\r\n", ends + 1
    return f"{text}\r\n", ends


# Thousands of messages follow each other that differ in none of these.
@functools.lru_cache(maxsize=256)
def _shared_lines(kind: str, content_type: str, source: str, epoch: int) -> str:
    return (
        f"ce-specversion: 1.0\r\nce-type: {attribute_text(kind)}\r\n"
        f"ce-source: {attribute_text(source)}\r\n"
        f"ce-datacontenttype: {attribute_text(content_type)}\r\ncontent-type: {content_type}\r\n"
        f"event_type: {kind}\r\npostroom-epoch: {epoch}\r\n"
    )


def _head_with_own(message: Message, source: str, epoch: int) -> tuple[str, int]:
    headers = wire_headers(message, source=source, epoch=epoch)
    # The binding of NATS has no other place for it, unlike that of HTTP.
    headers["ce-datacontenttype"] = attribute_text(message.content_type)
    given = (message.headers_json or "").lower()
    if any(name in given for name in _NOT_YOURS):
        headers = {name: headers[name] for name in headers if name.lower() not in _NOT_YOURS}
    lines = [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join(["NATS/1.0", f"Nats-Msg-Id: {message.broker_id}", *lines, "", ""])
    return text, len(lines) + 3


def answer_of(data: bytes, headers: Mapping[str, str] | None, topic: str) -> Outcome:
    """What the server's answer to one message means. A duplicate was delivered before."""
    if b'"seq"' in data and b'"error"' not in data:
        return DELIVERED
    if headers and headers.get("Status") == _NO_RESPONDERS:
        return no_stream(topic)
    try:
        answer = json.loads(data)
        error = answer.get("error")
        if error:
            return _refusal(error)
        if answer.get("seq"):
            return DELIVERED
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return Transient(
        "bad_answer",
        f"the answer on {topic} is not JetStream's: does a subscriber reply on this subject?",
    )


def no_stream(topic: str) -> Transient:
    """Nobody takes the topic: a missing stream is put right by a person, not by trying again."""
    text = (
        f"no JetStream stream captures subject {topic}; create one, "
        f"e.g. `nats stream add --subjects {topic}`"
    )
    return Transient("no_stream", text, down="topic")


def _refusal(error: Mapping[str, Any]) -> Outcome:
    number = error.get("err_code", 0)
    said = redact(str(error.get("description") or "no reason given")[:500])
    text = f"JetStream refused it: {said} ({number})"
    if number in _TOO_LARGE or "size exceed" in said or "message size" in said:
        return Permanent("too_large", text)
    if number in _NEVER:
        return Permanent(f"nats_{number}", text)
    if number in _STREAM_DOWN or error.get("code") == 503:
        return Transient(f"nats_{number}", text, down="topic")
    return Transient(f"nats_{number}", text)
