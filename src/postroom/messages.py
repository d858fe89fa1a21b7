"""Messages: what crosses the border. Types, encoding, checks, and the lane of a key.

Promise: what passes `encode` can be stored on every database and sent by every broker, byte for
byte; what cannot is refused here, where the bug is, and never becomes poison later.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import uuid
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import uuid_utils

from postroom.errors import ConfigurationError, InvalidMessage, MessageTooLarge, with_article
from postroom.payloads import dump_json, encode_payload
from postroom.trace_context import with_trace_context

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_TOPIC",
    "LANES",
    "SEQUENCE",
    "Draft",
    "Encoded",
    "Message",
    "MessageType",
    "Prefix",
    "attribute_text",
    "declared_type",
    "declared_types",
    "encode",
    "lane_of",
    "message",
    "message_type_of",
    "new_id",
    "wire_headers",
    "wire_time",
]

LANES = 16
DEFAULT_TOPIC = "events.default"
DEFAULT_MAX_BYTES = 1_000_000
SEQUENCE = "ce-sequence"

_TOPIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_ALL_PLAIN = re.compile(r"[!#$&-~]*")
_NAME_LIMIT = 255
# What stands before the name of a CloudEvents attribute: "ce-" for HTTP and NATS, "ce_" for Kafka,
# "cloudEvents_" or "cloudEvents:" for AMQP.
Prefix: TypeAlias = Literal["ce-", "ce_", "cloudEvents_", "cloudEvents:"]
C = TypeVar("C", bound=type)


class Message(NamedTuple):
    """A message as it stands in the outbox: what a relay reads and a broker sends.

    The fields stand in the order of the columns that `read_lanes` and `read_held` return.
    """

    lane: int
    position: int
    id: str
    topic: str
    key: str | None
    type: str
    aggregate_type: str | None
    aggregate_id: str | None
    content_type: str
    headers_json: str | None
    payload: bytes
    size: int
    redrives: int
    created_us: int
    expired: int
    held: int
    attempts: int
    history: str | None

    @property
    def headers(self) -> dict[str, str]:
        """The headers the publisher gave."""
        return json.loads(self.headers_json) if self.headers_json else {}

    @property
    def order(self) -> tuple[str, str]:
        """What keeps its order: topic and key. A message without a key is ordered with no other."""
        return (self.topic, self.key if self.key is not None else f"\x00{self.id}")

    @property
    def broker_id(self) -> str:
        """The id a broker may deduplicate on: a redriven message must not be swallowed as old."""
        return f"{self.id}:r{self.redrives}" if self.redrives else self.id


@dataclass(frozen=True, slots=True)
class MessageType:
    """What `@message` knows of a class."""

    name: str
    topic: str | None
    key_field: str | None
    aggregate_type: str | None
    aggregate_field: str | None


# Not frozen: to set a frozen one's fields takes as long as to check all of them.
@dataclass(slots=True, kw_only=True)
class Draft:
    """A message before it is encoded: content and wishes, for `publish_many`."""

    payload: Any
    type: str | None = None
    topic: str | None = None
    key: str | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    sequence: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None
    deliver_at: dt.datetime | None = None
    expires_at: dt.datetime | None = None
    dedup_key: str | None = None
    id: str | uuid.UUID | None = None


class Encoded(NamedTuple):
    """A message ready to be written: values as the database takes them."""

    lane: int
    id: str
    topic: str
    key: str | None
    type: str
    aggregate_type: str | None
    aggregate_id: str | None
    content_type: str
    headers: str | None
    payload: bytes
    size: int
    expires_us: int | None
    deliver_us: int | None
    dedup_key: str | None


_types: dict[type, MessageType] = {}


def message(
    name: str,
    *,
    topic: str | None = None,
    key_field: str | None = None,
    aggregate_type: str | None = None,
    aggregate_field: str | None = None,
) -> Callable[[C], C]:
    """Declare a dataclass, pydantic model or msgspec struct as a message type.

    `key_field` names the field that keeps the order, `aggregate_field` the one that holds the
    aggregate's id; without a key the aggregate's id is the key.
    """
    check_name("type", name)
    if topic is not None:
        check_topic(topic)

    def declare(cls: C) -> C:
        known = _fields_of(cls)
        for wanted in (key_field, aggregate_field):
            if wanted is not None and wanted not in known:
                raise ConfigurationError(
                    f"@message({name!r}): {cls.__name__} has no field {wanted!r}; "
                    f"it has {', '.join(sorted(known)) or 'none'}"
                )
        _warn_of_namesake(name, cls)
        _types[cls] = MessageType(name, topic, key_field, aggregate_type, aggregate_field)
        return cls

    return declare


def _warn_of_namesake(name: str, cls: type) -> None:
    """Warn of another class with this type name; a class that is imported again is the same."""
    this = (cls.__module__, cls.__qualname__)
    for other, known in _types.items():
        if known.name == name and (other.__module__, other.__qualname__) != this:
            warnings.warn(
                f"@message({name!r}) declares {cls.__module__}.{cls.__qualname__}, and "
                f"{other.__module__}.{other.__qualname__} has the same type name: consumers "
                "decode into the class that is declared last",
                stacklevel=3,
            )


def message_type_of(payload: object) -> MessageType | None:
    """The declared type of an object, its own class or the nearest base class."""
    return declared_type(type(payload))


def declared_type(cls: type) -> MessageType | None:
    """What `@message` knows of a class or its nearest base class."""
    for each in cls.__mro__:
        if (found := _types.get(each)) is not None:
            return found
    return None


def declared_types() -> dict[str, type]:
    """Every declared class by the name of its message type."""
    return {found.name: cls for cls, found in _types.items()}


def _fields_of(cls: type) -> set[str]:
    if dataclasses.is_dataclass(cls):
        return {item.name for item in dataclasses.fields(cls)}
    if isinstance(fields := getattr(cls, "model_fields", None), dict):
        return set(fields)
    if isinstance(struct := getattr(cls, "__struct_fields__", None), tuple):
        return set(struct)
    raise ConfigurationError(
        f"@message: {cls.__name__} is neither a dataclass, a pydantic model nor a msgspec struct; "
        "put @message above the decorator that makes it one"
    )


def new_id() -> str:
    """A fresh id: a UUIDv7, so ids made later sort later."""
    return str(uuid_utils.uuid7())


def lane_of(topic: str, key: str | None, id: str) -> int:
    """The lane of a message: CRC-32 of topic and key, so one key always has one lane."""
    name = f"{topic}\x00{key}" if key is not None else id
    return zlib.crc32(name.encode()) % LANES


def encode(
    draft: Draft,
    *,
    route: Callable[[str], str | None] = lambda _: None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Encoded:
    """Check a draft and turn it into what is stored, or say what is wrong with it.

    The topic is the draft's own, else its type's, else `route(type)`, else `events.default`.
    """
    payload = draft.payload
    declared = message_type_of(payload)
    type_name = draft.type
    if type_name is None and declared:
        type_name = declared.name
    if type_name is None:
        raise InvalidMessage(
            f"{with_article(type(payload).__name__)} has no message type: pass type=..., "
            "or declare its class with @message"
        )
    check_name("type", type_name)
    topic = draft.topic
    if topic is None:
        topic = (declared.topic if declared else None) or route(type_name) or DEFAULT_TOPIC
    check_topic(topic)
    key, aggregate_type, aggregate_id = _identity(draft, declared)
    if draft.content_type is not None:
        check_name("content_type", draft.content_type)
    content, content_type = encode_payload(payload, draft.content_type)
    headers = _encode_headers(
        with_trace_context(_with_sequence(draft, aggregate_type, aggregate_id))
    )
    size = len(content) + (len(headers.encode()) if headers else 0)
    if size > max_bytes:
        raise MessageTooLarge(
            f"{type_name} is {size:,} bytes, the limit is {max_bytes:,}: store the large part "
            "elsewhere and send a reference, or raise Outbox(max_bytes=...) if the broker takes it"
        )
    id = _checked_id(draft.id)
    return Encoded(
        lane_of(topic, key, id),
        id,
        topic,
        key,
        type_name,
        aggregate_type,
        aggregate_id,
        content_type,
        headers,
        content,
        size,
        _microseconds("expires_at", draft.expires_at),
        _microseconds("deliver_at", draft.deliver_at),
        None if draft.dedup_key is None else check_name("dedup_key", draft.dedup_key),
    )


def _identity(
    draft: Draft, declared: MessageType | None
) -> tuple[str | None, str | None, str | None]:
    aggregate_type, aggregate_id, key = draft.aggregate_type, draft.aggregate_id, draft.key
    if declared:
        if aggregate_type is None:
            aggregate_type = declared.aggregate_type
        if aggregate_id is None and declared.aggregate_field:
            aggregate_id = _text_of(getattr(draft.payload, declared.aggregate_field))
        if key is None and declared.key_field:
            key = _text_of(getattr(draft.payload, declared.key_field))
    if key is None:
        key = aggregate_id
    if key is not None:
        check_name("key", key)
    if aggregate_type is not None:
        check_name("aggregate_type", aggregate_type)
    if aggregate_id is not None:
        check_name("aggregate_id", aggregate_id)
    return key, aggregate_type, aggregate_id


def _with_sequence(
    draft: Draft, aggregate_type: str | None, aggregate_id: str | None
) -> Mapping[str, str]:
    """The headers with the sequence, which CloudEvents carries as an extension of this name."""
    sequence = draft.sequence
    if sequence is None:
        return draft.headers
    if aggregate_type is None or aggregate_id is None:
        raise InvalidMessage(
            "sequence needs aggregate_type and aggregate_id: it counts within them"
        )
    if type(sequence) is not int or not 0 <= sequence < 2**63:
        raise InvalidMessage(f"sequence must be an int from 0 to 2**63 - 1, not {sequence!r}")
    if any(name.lower() == SEQUENCE for name in draft.headers):
        raise InvalidMessage(f"pass either sequence or the header {SEQUENCE!r}, not both")
    return {**draft.headers, SEQUENCE: str(sequence)}


def _text_of(value: object) -> str | None:
    return None if value is None else str(value)


def check_name(what: str, value: object) -> str:
    """A type, key or other name: 1 to 255 printable characters."""
    # Plain ASCII, as nearly every name is, needs no closer look.
    if type(value) is str and 0 < len(value) <= _NAME_LIMIT:  # noqa: SIM102
        if value.isascii() and value.isprintable():
            return value
    if not isinstance(value, str):
        raise InvalidMessage(f"{what} must be a str, not {type(value).__name__}: pass str(...)")
    if not value or len(value) > _NAME_LIMIT:
        raise InvalidMessage(
            f"{what} must have 1 to {_NAME_LIMIT} characters, not {len(value)}"
            + ("; leave it out for none" if not value else "")
        )
    if _CONTROL.search(value):
        raise InvalidMessage(f"{what} {value!r} holds a control character: remove it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{what} {value!r} holds a lone surrogate: it is not text") from None
    return value


def check_topic(topic: object) -> str:
    """A topic: words of letters, digits, _ and - joined by dots, so that every broker takes it."""
    if not isinstance(topic, str) or len(topic) > _NAME_LIMIT or not _is_topic(topic):
        raise InvalidMessage(
            f"bad topic {topic!r}: use letters, digits, '_' and '-', joined by dots, "
            f"at most {_NAME_LIMIT} characters, as in 'orders.created'"
        )
    return topic


@lru_cache(maxsize=4096)
def _is_topic(topic: str) -> bool:
    return _TOPIC.fullmatch(topic) is not None


def _checked_id(value: str | uuid.UUID | None) -> str:
    if value is None:
        return new_id()
    try:
        return str(uuid.UUID(str(value)))
    except ValueError:
        raise InvalidMessage(f"id must be a UUID, not {value!r}") from None


def _microseconds(what: str, moment: dt.datetime | None) -> int | None:
    if moment is None:
        return None
    if not isinstance(moment, dt.datetime) or moment.utcoffset() is None:
        raise InvalidMessage(
            f"{what} must be a datetime with a time zone, not {moment!r}: "
            "use datetime.now(timezone.utc) + timedelta(...)"
        )
    return (moment - _EPOCH) // dt.timedelta(microseconds=1)


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _encode_headers(headers: Mapping[str, str]) -> str | None:
    if not headers:
        return None
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidMessage(f"bad header name {name!r}: use letters, digits and '-' or '_'")
        if not isinstance(value, str) or _CONTROL.search(value):
            raise InvalidMessage(f"header {name!r} must be a str without control characters")
    return dump_json(dict(headers), "headers").decode()


def wire_headers(
    message: Message, *, source: str, epoch: int = 0, prefix: Prefix = "ce-"
) -> dict[str, str]:
    """The headers a broker sends: CloudEvents in binary mode, our four names, and the user's own.

    Each broker chooses the prefix of its CloudEvents binding; attributes of the user's own, written
    with `ce-`, get it too. Position and epoch are for diagnosis only: a consumer drops by id and by
    nothing else.
    """
    text = attribute_text if prefix == "ce-" else str
    headers, own = {}, message.headers
    if not isinstance(own, dict):
        raise TypeError(f"its headers are a {type(own).__name__}, not names with values")
    for name, value in own.items():
        if name[:3].lower() == "ce-":
            name, value = prefix + name[3:].lower(), text(value)
        headers[name] = value
    headers |= {
        f"{prefix}specversion": "1.0",
        f"{prefix}id": message.id,
        f"{prefix}type": text(message.type),
        f"{prefix}source": text(source),
        f"{prefix}time": wire_time(message.created_us),
        "content-type": message.content_type,
        "event_id": message.id,
        "event_type": message.type,
        "postroom-position": f"{message.lane}:{message.position}",
        "postroom-epoch": str(epoch),
    }
    if message.key is not None:
        headers[f"{prefix}partitionkey"] = text(message.key)
    if message.aggregate_type is not None:
        headers["aggregate_type"] = message.aggregate_type
    if message.aggregate_id is not None:
        headers["aggregate_id"] = message.aggregate_id
    return headers


def attribute_text(value: str) -> str:
    """A CloudEvents attribute as the bindings of HTTP and NATS want it: percent-encoded where it is
    not plain ASCII. Kafka and AMQP carry text as it is."""
    return value if _ALL_PLAIN.fullmatch(value) else quote(value, safe=_PLAIN)


def wire_time(microseconds: int) -> str:
    """Microseconds since 1970 as CloudEvents and `datetime.isoformat` write them, in UTC."""
    seconds, rest = divmod(microseconds, 1_000_000)
    return (
        f"{_to_the_second(seconds)}.{rest:06d}+00:00"
        if rest
        else f"{_to_the_second(seconds)}+00:00"
    )


# Messages of one second come together, and a relay sends tens of thousands of them.
@lru_cache(maxsize=1024)
def _to_the_second(seconds: int) -> str:
    return (_EPOCH + dt.timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
