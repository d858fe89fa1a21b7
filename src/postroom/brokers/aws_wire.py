"""What a message looks like in SQS and SNS, and what their errors mean. No I/O.

The body is the payload: as text where it is text that SQS takes, else in base64, and then the
attribute `encoding` says so. SQS allows ten attributes and our headers may be more, so all of them
go as one JSON object in the attribute `headers`; the four names of ours stand beside it, because
filter policies of SNS read attributes. CloudEvents has no binding for SQS, and its structured mode
would put every payload into an envelope that consumers of other brokers do not have.

Promise: whatever is received is, byte for byte, what was sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from postroom.brokers.base import Outcome, Permanent, Scope, Transient, Unknown
from postroom.messages import Message, wire_headers
from postroom.signals import redact

__all__ = ["Entry", "Taken", "entry_of", "failure_of", "group_of", "refusal_of", "taken_of"]

HEADERS, ENCODING, TOPIC = "headers", "encoding", "postroom-topic"
_EMPTY = "-"
_UNFIT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_GROUP = re.compile(r"[!-~]{1,128}")
_OURS = ("event_id", "event_type", "aggregate_type", "aggregate_id")
_GROUP_OF_MINE = "postroom:"

_MISSING = {
    *("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "NotFound"),
    *("NotFoundException", "InvalidAddress"),
}
_THROTTLED = {
    *("RequestThrottled", "ThrottlingException", "Throttling", "Throttled", "KmsThrottled"),
    *("KMSThrottling", "KMSThrottlingException", "OverLimit", "TooManyRequestsException"),
}
_NOT_US = {
    *("InvalidClientTokenId", "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException"),
    *("UnrecognizedClientException", "InvalidSecurity", "AuthFailure", "OptInRequired"),
    *("MissingAuthenticationToken", "IncompleteSignature", "RequestExpired"),
    *("InvalidSignatureException", "InvalidAccessKeyId"),
}
_DENIED = {"AccessDenied", "AccessDeniedException", "AuthorizationError", "KmsAccessDenied"}


class Entry(NamedTuple):
    """A message ready for a batch: its body, its attributes, and the bytes that AWS counts."""

    body: str
    attributes: dict[str, dict[str, str]]
    group: str
    dedup: str
    size: int


class Taken(NamedTuple):
    """What came back: headers and payload, and the topic if it is known."""

    headers: dict[str, str]
    payload: bytes
    topic: str | None


def entry_of(message: Message, *, source: str, epoch: int, max_bytes: int) -> Entry | Permanent:
    """The entry of a message, or why it can never be sent."""
    try:
        headers = wire_headers(message, source=source, epoch=epoch) | {TOPIC: message.topic}
        body, encoding = _text_of(message.payload)
        values = {HEADERS: json.dumps(headers, separators=(",", ":"))}
    except (ValueError, TypeError) as error:
        return Permanent("bad_header", f"its headers cannot be read: {redact(str(error))[:200]}")
    for name in _OURS:
        value = headers.get(name, "")
        if value and not _UNFIT.search(value):
            values[name] = value
    if encoding is not None:
        values[ENCODING] = encoding
    size = len(body.encode()) + sum(
        len(name) + len("String") + len(value.encode()) for name, value in values.items()
    )
    if size > max_bytes:
        grown = " (it is no text, so it grows by a third)" if encoding == "base64" else ""
        return Permanent(
            "too_large",
            f"the message is {size:,} bytes with its attributes{grown}, AWS takes {max_bytes:,}: "
            "send a reference to the large part",
        )
    attributes = {
        name: {"DataType": "String", "StringValue": value} for name, value in values.items()
    }
    return Entry(body, attributes, group_of(message), message.broker_id, size)


def _text_of(payload: bytes) -> tuple[str, str | None]:
    if not payload:
        return _EMPTY, "empty"  # SQS refuses a body without a character
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = "\x00"
    if _UNFIT.search(text):
        return base64.b64encode(payload).decode(), "base64"
    return text, None


def group_of(message: Message) -> str:
    """The message group: the key, or a digest of one that AWS would not take; else the id."""
    key = message.key
    if key is None:
        return message.id
    if _GROUP.fullmatch(key) and not key.startswith(_GROUP_OF_MINE):
        return key
    return _GROUP_OF_MINE + hashlib.sha256(key.encode()).hexdigest()


# ── Receiving ──────────────────────────────────────────────────────────────────────────────────


def taken_of(body: str, attributes: Mapping[str, Any]) -> Taken:
    """What a message of SQS holds; one of somebody else's is its body and its text attributes."""
    values = {
        name: str(value["StringValue"])
        for name, value in attributes.items()
        if "StringValue" in value
    }
    if HEADERS not in values and (inner := _notification(body)) is not None:
        body, values = inner
    try:
        headers = json.loads(values[HEADERS])
        if not isinstance(headers, dict):
            raise ValueError
    except (KeyError, ValueError, RecursionError):
        headers = {name: value for name, value in values.items() if name != ENCODING}
    headers = {str(name): str(value) for name, value in headers.items()}
    topic = headers.pop(TOPIC, None)
    return Taken(headers, _bytes_of(body, values.get(ENCODING)), topic)


def _bytes_of(body: str, encoding: str | None) -> bytes:
    if encoding == "empty":
        return b""
    if encoding == "base64":
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            pass  # somebody else's word: leave it to the handler
    return body.encode("utf-8", "surrogatepass")


def _notification(body: str) -> tuple[str, dict[str, str]] | None:
    """Body and attributes from the envelope of SNS, for a subscription that is not raw."""
    if not body.startswith("{") or '"Notification"' not in body:
        return None
    try:
        letter = json.loads(body)
        if letter["Type"] != "Notification" or "TopicArn" not in letter:
            return None
        attributes = letter.get("MessageAttributes") or {}
        values = {name: str(each["Value"]) for name, each in attributes.items()}
        return str(letter["Message"]), values
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# ── Errors ─────────────────────────────────────────────────────────────────────────────────────


def refusal_of(code: str, said: str, status: int, *, name: str, service: str) -> Outcome | None:
    """What an error about a whole request means; None: it is about one of its messages."""
    text = f"{service.upper()} refused it: {redact(said[:500])} ({code})"
    if code in _MISSING:
        return Transient("no_queue" if service == "sqs" else "no_topic", _missing(service, name),
                         down="topic")  # fmt: skip
    if code in _NOT_US:
        return Transient("not_permitted", text, down="broker")
    if code in _DENIED or code.lower().startswith("kms"):
        return Transient("not_permitted", f"{text}; it is about {name}", down="topic")
    if code in _THROTTLED or status == 429:
        return Transient("throttled", text, down="topic")
    if status >= 500:
        # It may have stored them before it failed.
        scope: Scope = "broker"
        return Transient(code, text, down=scope) if status == 503 else Unknown(code, text, scope)
    return None


def failure_of(failed: Mapping[str, Any], *, name: str, service: str) -> Outcome:
    """What the failure of one entry of a batch means."""
    code = str(failed.get("Code") or "unknown")
    said = str(failed.get("Message") or "no reason given")
    known = refusal_of(code, said, 400, name=name, service=service)
    if known is not None:
        return known
    text = f"{service.upper()} refused it: {redact(said[:500])} ({code})"
    return Permanent(code, text) if failed.get("SenderFault") else Transient(code, text)


def _missing(service: str, name: str) -> str:
    if service == "sqs":
        fifo = " --attributes FifoQueue=true" if name.endswith(".fifo") else ""
        made = f"aws sqs create-queue --queue-name {name}{fifo}"
        return f"there is no queue {name}; create one, e.g. `{made}`"
    fifo = " --attributes FifoTopic=true" if name.endswith(".fifo") else ""
    made = f"aws sns create-topic --name {name}{fifo}"
    return f"there is no SNS topic {name}; create one, e.g. `{made}`"
