"""What a broker must do for a consumer: hand messages over in order, and take a yes for each.

A subscription hands out what was sent to its topics, to one consumer by name, however many
processes bear it. Whatever is not acknowledged comes again, to this process or another: at least
once is all that is asked of a broker, the inbox makes it once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import unquote

from postroom.brokers.cloudevents import MEDIA_TYPE, unfolded

__all__ = [
    "CanReceive",
    "CanTellLag",
    "Delivery",
    "Subscription",
    "decoded",
    "delivery",
    "delivery_of",
    "plain_headers",
    "spelling",
]

DEFAULT_CONTENT_TYPE = "application/octet-stream"
_PREFIX = "ce-"
_PREFIXES = (_PREFIX, "ce_", "cloudevents_", "cloudevents:")
_ESCAPED = re.compile(r"\\(.)")


class Delivery(NamedTuple):
    """A message as a broker hands it to a consumer.

    `source` is what the broker keeps in order and gives to one receiver at a time: a partition, a
    queue, a stream. `claim` grows each time this subscription gets a source anew: what came under
    an older claim may have gone to somebody else meanwhile. `seen` is how often it came before, as
    far as the broker knows. `receipt` is the broker's own, for `ack`.
    """

    id: str
    type: str
    topic: str
    key: str | None
    content_type: str
    headers: dict[str, str]
    payload: bytes
    source: str
    claim: int
    seen: int
    receipt: Any


@runtime_checkable
class Subscription(Protocol):
    """One process's way of receiving for a consumer. Its methods raise `Unreachable` when the
    broker is lost, and may be called again: it connects anew by itself.

    `exclusive`: a source has one receiver at a time, as far as the broker can see to it; else the
    broker itself keeps the messages of one key apart. `extend_seconds`: how often `extend` must be
    called for what is in hand, lest it be given to others; None: never.
    """

    exclusive: bool
    extend_seconds: float | None

    async def take(self, most: int) -> list[Delivery]:
        """The next messages, at most so many; waits for the first about a second."""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """They are handled: never hand them out again. Later ones may be acknowledged first."""

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """They were not handled: hand them out again, in their order, soon."""

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """They are still being handled."""

    async def close(self) -> None:
        """Give back what is in hand and leave. Never raises."""


@runtime_checkable
class CanTellLag(Protocol):
    """A subscription whose broker knows how far behind it is."""

    async def lag(self) -> int | None:
        """Return how many messages of its sources were not handed out yet; None: unknown."""


@runtime_checkable
class CanReceive(Protocol):
    """A broker that messages can be received from."""

    async def receive(self, topics: Sequence[str], *, consumer: str) -> Subscription:
        """Receive for `consumer` from now on, from the oldest message it has not acknowledged."""


def delivery(
    headers: Mapping[str, str],
    payload: bytes,
    *,
    topic: str,
    source: str,
    claim: int,
    receipt: Any,
    unnamed: str,
    key: str | None = None,
    seen: int = 0,
) -> Delivery:
    """A delivery from what came over the wire, whoever sent it.

    `unnamed` is its id should nobody have given it one: the broker's own name for this message,
    the same each time it comes.
    """
    known = plain_headers(headers.items())
    id = known.get("ce-id") or known.get("event_id") or unnamed
    return delivery_of(id, known, payload, topic, key, source, claim, seen, receipt)


def delivery_of(
    id: str,
    known: dict[str, str],
    payload: bytes,
    topic: str,
    key: str | None,
    source: str,
    claim: int,
    seen: int,
    receipt: Any,
) -> Delivery:
    """The same from headers that are plain already. An event in CloudEvents' structured mode has
    its own attributes in place of the headers."""
    get = known.get
    content_type = get("content-type") or get("ce-datacontenttype") or DEFAULT_CONTENT_TYPE
    if content_type[: len(MEDIA_TYPE)].lower() == MEDIA_TYPE:
        known, payload = unfolded(known, payload, content_type)
        get = known.get
        id = get("ce-id") or id
        content_type = get("content-type") or content_type
    return Delivery(
        id,
        get("ce-type") or get("event_type") or "",
        topic,
        get("ce-partitionkey", key),
        content_type,
        known,
        payload,
        source,
        claim,
        seen,
        receipt,
    )


def plain_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers with names in lower case, and CloudEvents attributes as plain text under `ce-`,
    whatever the binding they came by."""
    known: dict[str, str] = {}
    for wire_name, value in headers:
        name, encoded = spelling(wire_name)
        known[name] = decoded(value) if encoded else value
    return known


@lru_cache(maxsize=4096)
def spelling(wire_name: str) -> tuple[str, bool]:
    """How a header is called here, and whether its value may be encoded. Names are few: each is
    looked at once."""
    name = wire_name.lower()
    if name.startswith(_PREFIX):
        return name, True
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return _PREFIX + name.removeprefix(prefix), False
    return name, False


def decoded(value: str) -> str:
    """The text of an attribute from HTTP or NATS: there it may be quoted, and percent-encoded."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = _ESCAPED.sub(r"\1", value[1:-1])
    if "%" in value:
        try:
            return unquote(value, errors="strict")
        except UnicodeDecodeError:
            pass  # somebody's own text: better as it is than not at all
    return value
