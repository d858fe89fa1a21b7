"""What goes over the wire to Kafka, what comes back, and what its errors mean. No I/O.

Promise: a message is refused for ever only when it alone is to blame, and counts as not arrived
only when that is certain.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

from postroom.brokers.base import Outcome, Permanent, Transient, Unknown
from postroom.brokers.invoke import describe
from postroom.brokers.receiving import Delivery, delivery
from postroom.messages import Message, check_topic, wire_headers, wire_time
from postroom.signals import redact

__all__ = [
    "NOT_SENT",
    "Headers",
    "Stamp",
    "as_delivery",
    "judge",
    "no_topic",
    "topic_fault",
    "unreadable",
]

Headers: TypeAlias = "list[tuple[str, bytes]]"

_TOPIC_LIMIT = 249  # Kafka makes file names of them
_TEXT_LIMIT = 500

# Error codes of librdkafka (negative) and of Kafka's protocol, by their names there.
PURGE_QUEUE, PURGE_INFLIGHT = -152, -151
TIMED_OUT_IN_QUEUE, TIMED_OUT, FATAL = -192, -185, -150
UNKNOWN_TOPIC, UNKNOWN_PARTITION = -188, -190
ALL_BROKERS_DOWN, AUTHENTICATION = -187, -169
PURGED, GAPLESS = {PURGE_QUEUE, PURGE_INFLIGHT}, -148
TOO_LARGE = {10, 18}
TOPIC_OR_PARTITION_UNKNOWN, LEADER_NOT_AVAILABLE = 3, 5
_NO_TOPIC = {UNKNOWN_TOPIC, UNKNOWN_PARTITION, TOPIC_OR_PARTITION_UNKNOWN}
# The record, its timestamp, its batch, or the name of its topic can never be taken.
_NEVER = {17: "bad_topic", 32: "bad_timestamp", 43: "unsupported_format", 87: "invalid_record"}
_NEVER |= {-138: "invalid_batch"}  # another record of the batch: nothing is so when it is alone
_TOPIC_BARRED, _GROUP_BARRED = {29}, 30
_BROKER_BARRED = {AUTHENTICATION, 31, 53, 58}
# It was not written, and not because of this message: too few replicas, disk, quota, policy.
_TOPIC_DOWN = {19: "not_enough_replicas", 56: "storage_error", 44: "policy_violation"}
NOT_SENT = Transient("not_sent", "time or connection ended before it", down="topic")
# Even what librdkafka calls queued may have been on its way before, and queued again.
# So may what was with a server that is no longer spoken to (-197), as after its topic was deleted.
_TIMED_OUT = {TIMED_OUT_IN_QUEUE, TIMED_OUT, PURGE_QUEUE, PURGE_INFLIGHT, 7, 20, -197}
# The producer has lost its thread, or the servers: no message is to blame.
_PRODUCER_DOWN = {FATAL: "fatal", -172: "fatal", 45: "fatal", 47: "fatal", 59: "fatal"}
_PRODUCER_DOWN |= {-195: "connection_lost", -148: "fatal"}


def topic_fault(topic: str) -> Permanent | None:
    """Why Kafka can never take this topic, or None."""
    try:
        _check_topic(topic)
    except ValueError as error:
        return Permanent("bad_topic", str(error))
    return None


@functools.lru_cache(maxsize=4096)
def _check_topic(topic: str) -> None:
    try:
        check_topic(topic)
    except Exception as error:
        raise ValueError(str(error)) from None
    if len(topic) > _TOPIC_LIMIT:
        raise ValueError(f"topic {topic!r} is too long: Kafka takes {_TOPIC_LIMIT} characters")


class Stamp:
    """Writes the headers of one send's records, as `wire_headers` says them.

    What is the same for many messages is made once: it is a third of the work of a send.
    """

    def __init__(self, source: str, epoch: int) -> None:
        self._source, self._epoch = source, epoch
        self._fixed: dict[tuple[str, str], Headers] = {}
        self._second, self._time = -1, b""

    def headers(self, message: Message) -> Headers | Permanent:
        """The headers of a record, or why there can be none.

        Everything is checked here: a name that is no text kills the process inside confluent-kafka,
        and a value is cut short there at a NUL unless it is given as bytes.
        """
        try:
            return self._own(message) if message.headers_json else self._plain(message)
        except (ValueError, TypeError, AttributeError) as error:
            return Permanent("bad_header", describe(error))

    def _own(self, message: Message) -> Headers:
        headers: Headers = []
        said = wire_headers(message, source=self._source, epoch=self._epoch, prefix="ce_")
        for name, value in said.items():
            if "\x00" in name or not isinstance(value, str):
                raise ValueError("a header is no text")
            name.encode()
            headers.append((name, value.encode()))
        return headers

    def _plain(self, message: Message) -> Headers:
        """The headers of a message whose publisher gave none."""
        fixed = self._fixed.get((message.type, message.content_type))
        if fixed is None:
            fixed = self._fix(message.type, message.content_type)
        id = message.id.encode()
        second, rest = divmod(message.created_us, 1_000_000)
        if second != self._second:
            self._second = second
            self._time = wire_time(1_000_000 * second).removesuffix("+00:00").encode()
        time = b"%b.%06d+00:00" % (self._time, rest) if rest else self._time + b"+00:00"
        headers = [
            *fixed,
            ("ce_id", id),
            ("event_id", id),
            ("ce_time", time),
            ("postroom-position", b"%d:%d" % (message.lane, message.position)),
        ]
        if message.key is not None:
            headers.append(("ce_partitionkey", message.key.encode()))
        if message.aggregate_type is not None:
            headers.append(("aggregate_type", message.aggregate_type.encode()))
        if message.aggregate_id is not None:
            headers.append(("aggregate_id", message.aggregate_id.encode()))
        return headers

    def _fix(self, type: str, content_type: str) -> Headers:
        kind = type.encode()
        fixed = [
            ("ce_specversion", b"1.0"),
            ("ce_type", kind),
            ("ce_source", self._source.encode()),
            ("content-type", content_type.encode()),
            ("event_type", kind),
            ("postroom-epoch", str(self._epoch).encode()),
        ]
        self._fixed[type, content_type] = fixed
        return fixed


def judge(code: int, said: str, topic: str) -> Outcome:
    """What the report of one message that failed means.

    What is not known here is `Unknown`: the message goes out again with its id, and nothing is
    buried for an error that nobody has thought about.
    """
    text = f"Kafka on {topic}: {redact(said[: 4 * _TEXT_LIMIT])[:_TEXT_LIMIT]} ({code})"
    if code in TOO_LARGE:
        return Permanent(
            "too_large",
            f"{text}: send a reference to the large part, or raise max.message.bytes of the topic",
        )
    if code in _NEVER:
        return Permanent(_NEVER[code], text)
    if code in _NO_TOPIC:
        return no_topic(topic)
    if code in _TOPIC_BARRED:
        return Transient(
            "not_permitted",
            f"not allowed to write to topic {topic}: give this user the right, e.g. "
            f"`kafka-acls.sh --add --producer --topic {topic} --allow-principal User:NAME`",
            down="topic",
        )
    if code in _BROKER_BARRED:
        return Transient("not_permitted", text, down="broker")
    if code in _TOPIC_DOWN:
        return Transient(_TOPIC_DOWN[code], text, down="topic")
    if code in _TIMED_OUT:
        # One partition may be without a leader while others are well: never the message's fault.
        return Unknown("timeout", f"no answer in time about {topic}: {text}", down="topic")
    if code in _PRODUCER_DOWN:
        return Unknown(_PRODUCER_DOWN[code], text, down="broker")
    return Unknown(f"kafka_{code}", text)


def no_topic(topic: str) -> Transient:
    """A missing topic is put right by a person, not by trying again."""
    return Transient(
        "no_topic",
        f"topic {topic} does not exist and the broker does not create it: "
        f"e.g. `kafka-topics.sh --create --topic {topic} --replication-factor 3`",
        down="topic",
    )


def unreadable(code: int, said: str, topic: str | None) -> str:
    """Why nothing can be received, for those who take."""
    text = redact(said[: 4 * _TEXT_LIMIT])[:_TEXT_LIMIT]
    if topic and code in _NO_TOPIC:
        return f"topic {topic} does not exist; it is read from its beginning once it does"
    if topic and code in _TOPIC_BARRED:
        return f"not allowed to read topic {topic}: give this user the right (kafka-acls.sh)"
    if code == _GROUP_BARRED:
        return f"not allowed to be in this group: give this user the right (kafka-acls.sh): {text}"
    return text


def as_delivery(
    message: Any, topic: str, partition: int, offset: int, *, source: str, claim: int
) -> Delivery:
    """A delivery from a record. A key that is no text is told apart by its bytes."""
    key = message.key()
    if isinstance(key, bytes):
        key = key.decode("utf-8", "backslashreplace")
    return delivery(
        _headers_of(message),
        message.value() or b"",
        topic=topic,
        source=source,
        claim=claim,
        receipt=(topic, partition, offset),
        unnamed=f"{source}/{offset}",
        key=key,
    )


# Not `message.headers()`: of a name that is no text the library returns a list with a hole in it,
# and an error beside it that Python no longer looks for once it has run that call often.
_read_headers = operator.methodcaller("headers")


def _headers_of(message: Any) -> dict[str, str]:
    try:
        return _texts(_read_headers(message) or ())
    except (UnicodeDecodeError, SystemError):  # the latter is how the library says it
        # A name is no text, and the library gives no header of it at all. Without a type the
        # consumer refuses it and goes on; raised here, it would come again for ever.
        return {}


def _texts(headers: Iterable[tuple[str, bytes | str | None]]) -> dict[str, str]:
    return {
        name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
        for name, value in headers
    }
