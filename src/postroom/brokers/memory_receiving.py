"""How consumers receive from `memory://`: a shelf for each consumer and topic, kept by the process.

Promise: what lies on a shelf stays there until it is acknowledged by whoever has the shelf at that
time. One subscription has a shelf at a time and gets its messages in order; what it gives back, or
still has when it leaves, comes first again.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from postroom.brokers.receiving import Delivery, delivery
from postroom.errors import Unreachable
from postroom.messages import Message, wire_headers

__all__ = ["MemorySubscription", "Shelves"]

SHELF_LIMIT = 100_000
TAKE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Item:
    number: int
    message: Message
    seen: int = 0


@dataclass(slots=True, eq=False)
class _Shelf:
    """What one consumer has not acknowledged of one topic."""

    topic: str
    waiting: deque[_Item] = field(default_factory=deque)
    again: list[_Item] = field(default_factory=list)  # given back, by number
    out: dict[int, _Item] = field(default_factory=dict)
    owner: MemorySubscription | None = None
    claim: int = 0
    last: int = 0

    def add(self, message: Message) -> None:
        self.last += 1
        self.waiting.append(_Item(self.last, message))

    @property
    def ready(self) -> int:
        return len(self.again) + len(self.waiting)

    def next(self) -> _Item:
        """Hand out the next one, first of those that were given back."""
        item = self.again.pop(0) if self.again else self.waiting.popleft()
        self.out[item.number] = item
        return item

    def give_back(self, number: int) -> None:
        if (item := self.out.pop(number, None)) is not None:
            item.seen += 1
            bisect.insort(self.again, item, key=lambda each: each.number)

    def release(self) -> None:
        self.owner = None
        for number in list(self.out):
            self.give_back(number)


class Shelves:
    """Every shelf of a broker; may be used from several threads and loops."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, str], _Shelf] = {}
        self._guard = threading.RLock()
        self._wakers: set[Callable[[], None]] = set()

    @property
    def guard(self) -> threading.RLock:
        return self._guard

    def full(self, topic: str) -> bool:
        """Whether a consumer has left so much of a topic that no more can be kept for it."""
        with self._guard:
            return any(
                shelf.ready + len(shelf.out) >= SHELF_LIMIT
                for (_, name), shelf in self._shelves.items()
                if name == topic
            )

    def add(self, message: Message) -> None:
        """Put a message onto the shelf of every consumer of its topic."""
        with self._guard:
            found = [s for (_, topic), s in self._shelves.items() if topic == message.topic]
            for shelf in found:
                shelf.add(message)
        if found:
            self.wake()

    def open(self, consumer: str, topic: str, earlier: Iterable[Message]) -> None:
        """Make a shelf, if there is none, of what the broker still has."""
        with self._guard:
            if (consumer, topic) not in self._shelves:
                shelf = self._shelves[consumer, topic] = _Shelf(topic)
                for message in earlier:
                    if message.topic == topic:
                        shelf.add(message)

    def of(self, consumer: str, topics: Sequence[str]) -> list[_Shelf]:
        return [self._shelves[consumer, t] for t in topics if (consumer, t) in self._shelves]

    def rebalance(self, consumer: str) -> None:
        """Take every shelf from its receiver, as a broker does that thinks it dead: whoever asks
        next has it."""
        with self._guard:
            for (name, _), shelf in self._shelves.items():
                if name == consumer:
                    shelf.release()
        self.wake()

    def left(self, consumer: str) -> int:
        """How many messages a consumer has not acknowledged."""
        with self._guard:
            return sum(
                shelf.ready + len(shelf.out)
                for (name, _), shelf in self._shelves.items()
                if name == consumer
            )

    def clear(self) -> None:
        with self._guard:
            self._shelves.clear()

    def wake(self) -> None:
        for waker in list(self._wakers):
            waker()

    @contextlib.contextmanager
    def woken(self, event: asyncio.Event) -> Iterator[None]:
        """Set the event whenever there may be something new."""
        loop = asyncio.get_running_loop()

        def waker() -> None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

        self._wakers.add(waker)
        try:
            yield
        finally:
            self._wakers.discard(waker)


class MemorySubscription:
    """One receiver of a consumer."""

    exclusive = True
    extend_seconds: float | None = None

    def __init__(
        self,
        shelves: Shelves,
        consumer: str,
        topics: Sequence[str],
        down: Callable[[], bool],
        *,
        source: str,
    ) -> None:
        self._shelves = shelves
        self._consumer = consumer
        self._topics = tuple(topics)
        self._down = down
        self._source = source
        self._closed = False
        self._turn = 0

    async def take(self, most: int) -> list[Delivery]:
        event = asyncio.Event()
        deadline = asyncio.get_running_loop().time() + TAKE_SECONDS
        with self._shelves.woken(event):
            while True:
                self._check()
                event.clear()
                if found := self._some(most):
                    return found
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    return []
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), left)

    async def lag(self) -> int:
        """Count the messages of its topics that wait to be handed out."""
        with self._shelves.guard:
            shelves = self._shelves.of(self._consumer, self._topics)
            return sum(shelf.ready for shelf in shelves if shelf.owner is self)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._check()
        with self._shelves.guard:
            for each in deliveries:
                for shelf in self._mine(each):
                    shelf.out.pop(each.receipt, None)

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        self._check()
        with self._shelves.guard:
            for each in deliveries:
                for shelf in self._mine(each):
                    shelf.give_back(each.receipt)
        self._shelves.wake()

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self._check()

    async def close(self) -> None:
        self._closed = True
        with self._shelves.guard:
            for shelf in self._shelves.of(self._consumer, self._topics):
                if shelf.owner is self:
                    shelf.release()
        self._shelves.wake()

    def _check(self) -> None:
        if self._closed:
            raise Unreachable("the subscription was closed")
        if self._down():
            raise Unreachable("the broker in memory is down: it was told so by `down = True`")

    def _mine(self, each: Delivery) -> list[_Shelf]:
        found = self._shelves.of(self._consumer, [each.topic])
        return [shelf for shelf in found if shelf.owner is self and shelf.claim == each.claim]

    def _some(self, most: int) -> list[Delivery]:
        with self._shelves.guard:
            shelves = self._shelves.of(self._consumer, self._topics)
            for shelf in shelves:
                if shelf.owner is None:
                    shelf.owner, shelf.claim = self, shelf.claim + 1
            mine = [shelf for shelf in shelves if shelf.owner is self and shelf.ready]
            self._turn += 1  # another topic is first each time, so that a busy one starves none
            found: list[Delivery] = []
            for place in range(len(mine)):
                shelf = mine[(place + self._turn) % len(mine)]
                while shelf.ready and len(found) < most:
                    found.append(_delivery(shelf, shelf.next(), self._source))
            return found


def _delivery(shelf: _Shelf, item: _Item, source: str) -> Delivery:
    message = item.message
    return delivery(
        wire_headers(message, source=source),
        message.payload,
        topic=message.topic,
        key=message.key,
        source=shelf.topic,
        claim=shelf.claim,
        receipt=item.number,
        unnamed=f"{shelf.topic}:{item.number}",
        seen=item.seen,
    )
