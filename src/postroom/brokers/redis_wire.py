"""What goes over the wire to Redis and what its answers mean. No I/O.

Promise: whatever a message holds, it is one entry of one stream; every string is sent with its
length, so none can end early and speak to the server for us.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from postroom.brokers.base import DELIVERED, Outcome, Permanent, Scope, Transient
from postroom.brokers.invoke import describe
from postroom.brokers.mould import Shape, mould, own_values, shape_of
from postroom.errors import InvalidMessage
from postroom.messages import Message, check_topic, wire_headers
from postroom.signals import redact

__all__ = ["PAYLOAD", "answer_of", "command", "entry", "judge", "replies", "too_large", "xadd"]

PAYLOAD = "payload"  # the last field of an entry; all before it are headers
_PLACE = b"$%d\r\n%b\r\n"

# Not the messages' fault and not one stream's: memory, disk, a replica, start-up, a script, a
# cluster that is broken.
_BROKER_DOWN = {
    *("OOM", "READONLY", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY"),
    *("CLUSTERDOWN", "TRYAGAIN", "NOAUTH", "UNKILLABLE"),
}
_REMEDIES = {
    "OOM": "Redis is out of memory: raise maxmemory, or let consumers read so that streams shrink",
    "READONLY": "this Redis is a replica and takes no writes: give the address of the master",
    "MISCONF": "Redis cannot write to its disk: see its log",
    "NOREPLICAS": "too few replicas follow: see min-replicas-to-write",
}


def command(*words: str | bytes | int) -> bytes:
    """A command and its words, as Redis reads them."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


def xadd(message: Message, prefix: str, *, source: str, epoch: int) -> bytes | Permanent:
    """The command that adds a message to its stream, or why it can never be sent."""
    try:
        head = _head(prefix, message.topic)
    except InvalidMessage as error:
        return Permanent("bad_topic", str(error))
    try:
        if message.headers_json:
            headers = wire_headers(message, source=source, epoch=epoch)
            template = _named(head, tuple(headers))
            values = [value.encode() for value in headers.values()]
        else:
            template = _mould(head, shape_of(message), source, epoch)
            values = own_values(message, "ce-")
    except (ValueError, TypeError, AttributeError) as error:
        return Permanent("bad_header", describe(error))
    values.append(message.payload)
    return template % tuple([part for value in values for part in (len(value), value)])


@functools.lru_cache(maxsize=4096)
def _head(prefix: str, topic: str) -> bytes:
    key = (prefix + check_topic(topic)).encode()
    return b"$4\r\nXADD\r\n$%d\r\n%b\r\n$1\r\n*\r\n" % (len(key), key)


@functools.lru_cache(maxsize=4096)
def _named(head: bytes, names: tuple[str, ...]) -> bytes:
    return _template(head, [(name, None) for name in names])


@functools.lru_cache(maxsize=4096)
def _mould(head: bytes, shape: Shape, source: str, epoch: int) -> bytes:
    return _template(head, mould(shape, source=source, epoch=epoch, prefix="ce-"))


def _template(head: bytes, fields: Sequence[tuple[str, bytes | None]]) -> bytes:
    """The whole command, with places for the length of each value that is left out, and for the
    value itself; the payload is the last of them."""
    # The command, the stream, the asterisk, and two words a field.
    parts = [b"*%d\r\n" % (5 + 2 * len(fields)), head.replace(b"%", b"%%")]
    for name, value in fields:
        parts.append(_string(name.encode()))
        parts.append(_PLACE if value is None else _string(value))
    return b"".join([*parts, _string(PAYLOAD.encode()), _PLACE])


def _string(raw: bytes) -> bytes:
    """A string inside a template."""
    return b"$%d\r\n%b\r\n" % (len(raw), raw.replace(b"%", b"%%"))


def entry(fields: Sequence[bytes]) -> tuple[dict[str, str], bytes]:
    """Headers and payload of an entry: names and values in turn, the payload last.

    An entry of somebody else's may lack a payload; its fields are headers all the same.
    """
    pairs = list(zip(fields[::2], fields[1::2], strict=False))
    payload = b""
    if pairs and pairs[-1][0] == PAYLOAD.encode():
        payload = pairs.pop()[1]
    headers = {
        name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in pairs
    }
    return headers, payload


def replies(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole replies in `data`, each with its mark, and what is left of one that is not whole.

    Only what XADD, WAIT and PING are answered with: a line, or one string by its length. Raises
    `ValueError` for what is no reply.
    """
    found: list[bytes] = []
    start = 0
    while (end := data.find(b"\r\n", start)) >= 0:
        if data[start] == 36:  # a dollar: the length of what follows
            after = end + 2 + int(data[start + 1 : end]) + 2
            if after > len(data):
                break
            found.append(b"$" + data[end + 2 : after - 2])
            start = after
        else:
            found.append(data[start:end])
            start = end + 2
    return found, data[start:]


def answer_of(reply: bytes, message: Message | None) -> Outcome:
    """What the answer to one XADD means, or to a PING where there is no message."""
    if reply[:1] in b"$+":
        return DELIVERED
    if reply[:1] == b"-":
        return judge(reply[1:].decode("utf-8", "replace"), message.topic if message else None)
    text = "the answer is not one of Redis: does something else listen there?"
    return Transient("bad_answer", text, down="broker")


def judge(said: str, topic: str | None) -> Outcome:
    """What an error of Redis means for the message it answers."""
    code = said.partition(" ")[0].rstrip(":")
    text = f"Redis refused it: {redact(said[:500])}"
    if remedy := _REMEDIES.get(code):
        text = f"{text} ({remedy})"
    if code in _BROKER_DOWN:
        return Transient(code.lower(), text, down="broker")
    if code == "WRONGTYPE":
        why = f"the key of topic {topic} holds something else than a stream"
        remedy = "move it, or set ?prefix= so that streams have keys of their own"
        return Transient("wrong_type", f"{why}: {remedy}", down="topic")
    if code == "NOPERM":
        # A key that may not be touched is one topic's trouble, a command is everybody's.
        down: Scope = "topic" if " key" in said else "broker"
        return Transient("not_permitted", text, down=down)
    if code in ("MOVED", "ASK", "CROSSSLOT"):
        why = "this is a Redis Cluster, which keeps the stream elsewhere"
        return Transient("cluster", f"{why}: {redact(said[:200])}", down="topic")
    if "exhausted the last possible ID" in said:
        return Transient("ids_exhausted", text, down="topic")
    return Transient("refused", text)


def too_large(size: int, most: int) -> Permanent:
    """A message that the server would hang up for."""
    said = f"the message is {size:,} bytes, the server takes {most:,}"
    return Permanent(
        "too_large", f"{said}: send a reference to the large part, or raise proto-max-bulk-len"
    )
