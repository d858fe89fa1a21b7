"""`memory://name`: a broker inside this process, for tests, demos and embedded use.

Promise: what it answers `Delivered` for was handed to every subscriber and is kept in `messages`
until newer ones push it out. One name is one broker in the whole process, however often it is
opened, and it lives as long as the process does. A consumer that has once received from it finds
all it has not acknowledged, however often it comes back.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from postroom.brokers.base import (
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Outcome,
    Transient,
    Unknown,
)
from postroom.brokers.invoke import describe
from postroom.brokers.memory_receiving import MemorySubscription, Shelves
from postroom.brokers.options import split_url
from postroom.errors import Unreachable
from postroom.messages import Message

__all__ = ["DEFAULT_LIMIT", "MemoryBroker", "broker", "open_broker"]

DEFAULT_LIMIT = 10_000
Subscriber: TypeAlias = Callable[[Message], Awaitable[None] | None]

_brokers: dict[str, MemoryBroker] = {}
_guard = threading.RLock()  # a function that picks messages may ask for a broker


@dataclass(slots=True)
class _Script:
    """An order to answer matching messages with an outcome, `times` times (None: always)."""

    match: Callable[[Message], bool]
    outcome: Outcome
    times: int | None
    arrives: bool


class MemoryBroker:
    """Keeps the last `limit` delivered messages and hands each to its subscribers.

    `down = True` makes it unreachable until it is set back.
    """

    def __init__(self, name: str = "", *, limit: int = DEFAULT_LIMIT) -> None:
        self.name = name
        self.capabilities = Capabilities()
        self.down = False
        self.source = BrokerOptions().source
        self.send_timeout_seconds = BrokerOptions().send_timeout_seconds
        self._kept: deque[Message] = deque(maxlen=limit)
        self._scripts: list[_Script] = []
        self._subscribers: list[Subscriber] = []
        self._shelves = Shelves()

    @property
    def messages(self) -> list[Message]:
        """The delivered messages, oldest first; at most `limit` of them."""
        return list(self._kept)

    @property
    def limit(self) -> int:
        return self._kept.maxlen or 0

    @limit.setter
    def limit(self, limit: int) -> None:
        self._kept = deque(self._kept, maxlen=limit)

    def fail(
        self,
        match: Callable[[Message], bool] | str,
        outcome: Outcome,
        *,
        times: int | None = 1,
        arrives: bool = False,
    ) -> None:
        """Answer `outcome` for a message id, or for messages a function picks, `times` times.

        `arrives=True` keeps the message all the same, as when only the answer to it was lost.
        Orders are tried in the order they were given; `times=None` means always.
        """
        picks = match if callable(match) else _has_id(match)
        with _guard:
            self._scripts.append(_Script(picks, outcome, times, arrives))

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(message)`, sync or async, for every message; returns how to end it.

        A subscriber that raises refuses the message: it is not delivered and will be sent again,
        to the other subscribers too. A sync one runs on the event loop and must be quick.
        """
        self._subscribers.append(subscriber)
        return lambda: (
            self._subscribers.remove(subscriber) if subscriber in self._subscribers else None
        )

    async def receive(self, topics: Sequence[str], *, consumer: str) -> MemorySubscription:
        """Receive for a consumer, first what is kept of its topics. Of several receivers one has a
        topic at a time."""
        await self.ping()
        with _guard:
            for topic in topics:
                self._shelves.open(consumer, topic, self._kept)
        return MemorySubscription(
            self._shelves, consumer, topics, lambda: self.down, source=self.source
        )

    def unacknowledged(self, consumer: str) -> int:
        """How many messages this consumer has not acknowledged."""
        return self._shelves.left(consumer)

    def rebalance(self, consumer: str) -> None:
        """Take every topic of a consumer from its receiver, as if that were thought dead."""
        self._shelves.rebalance(consumer)

    def clear(self) -> None:
        """Forget messages, scripted outcomes, subscribers and consumers, and be up again."""
        with _guard:
            self._kept.clear()
            self._scripts.clear()
            self._shelves.clear()
        self._subscribers.clear()
        self.down = False

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        await asyncio.sleep(0)  # like any broker, it lets others run
        deadline = asyncio.get_running_loop().time() + self.send_timeout_seconds
        return [await self._take(message, deadline) for message in batch]

    async def ping(self) -> None:
        if self.down:
            raise Unreachable(f"{self!r} is down: it was told so by `down = True`")

    async def close(self) -> None:
        """Nothing: others may have opened the same name."""

    def __repr__(self) -> str:
        return f"memory://{self.name}"

    async def _take(self, message: Message, deadline: float) -> Outcome:
        if self.down:
            return Transient("down", f"{self!r} is down", down="broker")
        script = self._scripted(message) if self._scripts else None
        if script is None or script.arrives:
            if self._shelves.full(message.topic):
                return Transient("full", "a consumer does not keep up with it", down="topic")
            refused = await self._hand_over(message, deadline) if self._subscribers else None
            if refused is not None:
                return refused
            with _guard:  # a consumer that comes now finds it here or on its shelf, not on both
                self._kept.append(message)
                self._shelves.add(message)
        return DELIVERED if script is None else script.outcome

    def _scripted(self, message: Message) -> _Script | None:
        with _guard:
            for script in self._scripts:
                if script.times != 0 and script.match(message):
                    if script.times is not None:
                        script.times -= 1
                    return script
        return None

    async def _hand_over(self, message: Message, deadline: float) -> Outcome | None:
        if asyncio.get_running_loop().time() >= deadline:
            return Transient("not_sent", "earlier messages took all the time", down="broker")
        expiry = asyncio.timeout_at(deadline)
        try:
            async with expiry:
                for subscriber in list(self._subscribers):
                    answer = subscriber(message)
                    if inspect.isawaitable(answer):
                        await answer
        except Exception as error:
            if expiry.expired():
                return Unknown("timeout", "a subscriber did not return in time")
            return Transient(type(error).__name__, f"a subscriber failed: {describe(error)}")
        return None


def _has_id(id: str) -> Callable[[Message], bool]:
    return lambda message: message.id == id


def broker(name: str = "", *, limit: int | None = None) -> MemoryBroker:
    """The broker of this name, made when first asked for. `limit` changes how many it keeps."""
    with _guard:
        found = _brokers.setdefault(name, MemoryBroker(name))
        if limit is not None:
            found.limit = limit
        return found


def open_broker(url: str, options: BrokerOptions) -> MemoryBroker:
    """The broker for `memory://name`."""
    url, _ = split_url(url, options, ())
    found = broker(url.partition(":")[2].strip("/"))
    found.source = options.source
    found.send_timeout_seconds = options.send_timeout_seconds
    return found
