"""What a broker must do for the relay: its verbs, one outcome a message, and its abilities."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from postroom.errors import ConfigurationError
from postroom.messages import Message

__all__ = [
    "BEHIND",
    "CROWDED",
    "Broker",
    "BrokerOptions",
    "CanExamine",
    "CanLookUp",
    "CanTellHowLong",
    "Capabilities",
    "Delivered",
    "Outcome",
    "Permanent",
    "Scope",
    "Transient",
    "Unknown",
    "is_request",
    "known_schemes",
    "open_broker",
    "scheme_of",
]

Scope: TypeAlias = Literal["broker", "topic"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """The broker said yes. `answer` is what else it said, kept for requests of the ledger."""

    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Transient:
    """Not delivered; another try may succeed.

    `down` says that it is not this message's fault: the whole broker, or this topic, cannot take
    messages now. No attempts are spent then.
    """

    code: str
    text: str
    down: Scope | None = None
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Permanent:
    """Refused for ever: another try would end the same."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Sent, but no answer came: it may or may not have arrived."""

    code: str
    text: str
    down: Scope | None = None


Outcome: TypeAlias = Delivered | Transient | Permanent | Unknown
DELIVERED = Delivered()
# Not sent, because an earlier message of its key failed in the same `send`.
BEHIND = Transient("behind", "an earlier message of its key failed")
# Not sent, because as many as may be under way at a time were. It is tried again at once, and says
# nothing of the broker: this one is slow perhaps, but it answers.
CROWDED = Transient("crowded", "as many as may be under way at a time were, and it was not sent")
NOT_ARRIVED = "not_arrived"
# A message with this header has a row in the ledger under its own id; its value is the row's key.
# It is looked for in the headers' text, so that other messages cost next to nothing.
REQUEST_HEADER = "postroom-ledger"
REQUEST_MARK = f'"{REQUEST_HEADER}"'


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a broker can do.

    `ordered_pipeline`: within one `send` later messages of a key are delivered only if the earlier
    ones were (else they are `BEHIND`), so a batch need not go out in waves. `max_batch`: most
    messages for one `send`, where they would otherwise queue inside and outlast the send timeout.
    `max_bytes`: of one message.
    """

    ordered_pipeline: bool = False
    max_batch: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What a broker is told when it is opened. `extra` holds its own options, and secrets."""

    source: str = "postroom"
    send_timeout_seconds: float = 10.0
    concurrency: int = 4
    extra: dict[str, str] = field(default_factory=dict, repr=False)


@runtime_checkable
class Broker(Protocol):
    """A place messages go to. `send` answers for each message in order and raises only for bugs."""

    capabilities: Capabilities

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]: ...

    async def ping(self) -> None:
        """Return if the broker can be reached, else raise `Unreachable`."""

    async def close(self) -> None: ...


@runtime_checkable
class CanLookUp(Protocol):
    """A broker that can be asked whether a message of unknown outcome arrived."""

    async def lookup(self, message: Message) -> Outcome:
        """Delivered: it arrived. Permanent: it arrived and was refused. `Transient("not_arrived",
        …)`: it did not, and this word alone means so. All else: nothing was learnt; with `down`
        nobody could be asked, and no attempt is spent."""
        ...


@runtime_checkable
class CanExamine(Protocol):
    """A broker that can look at its own topology for what would lose messages."""

    async def examine(self, topics: Sequence[str]) -> list[str]:
        """A sentence for each danger, with what to do about it; raises `Unreachable`."""


@runtime_checkable
class CanTellHowLong(Protocol):
    """A broker that knows how long it keeps messages, whether they were received or not."""

    async def keeps(self, topics: Sequence[str]) -> dict[str, float | None]:
        """For how many seconds each topic's messages may still come, None: for ever. A topic it
        cannot tell of is left out; raises `Unreachable`."""


def is_request(message: Message) -> bool:
    """Whether it is a request of the ledger, of which nothing may be said that is not known."""
    return message.headers_json is not None and REQUEST_MARK in message.headers_json


def scheme_of(url: str) -> str:
    """The scheme of a broker URL: what stands before the first colon."""
    scheme, colon, _ = url.partition(":")
    if not colon or not scheme:
        raise ConfigurationError(
            f"{url!r} is not a broker URL: write scheme://host, as in nats://localhost:4222"
        )
    return scheme


def known_schemes() -> dict[str, str]:
    """Every scheme that has a broker, and where the function is that opens it."""
    return {point.name: point.value for point in metadata.entry_points(group="postroom.brokers")}


def open_broker(url: str, options: BrokerOptions | None = None) -> Broker:
    """The broker for a URL, found by its scheme through the entry points `postroom.brokers`."""
    scheme = scheme_of(url)
    known = known_schemes()
    if scheme not in known:
        raise ConfigurationError(_no_broker(url, scheme, known))
    module, _, name = known[scheme].partition(":")
    factory: Callable[[str, BrokerOptions], Broker] = getattr(importlib.import_module(module), name)
    return factory(url, options or BrokerOptions())


def _no_broker(url: str, scheme: str, known: Iterable[str]) -> str:
    names = sorted(known)
    if re.fullmatch(r"[\w.-]+:\d+", url):
        return f"{url} has no scheme: write it before the host, as in kafka://{url}"
    near = difflib.get_close_matches(scheme, names, 1)
    hint = f"did you mean {near[0]}://? " if near else ""
    return f"no broker for {scheme}://: {hint}known are {', '.join(names) or 'none'}"
