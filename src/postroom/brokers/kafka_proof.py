"""Which partitions know our producer. No I/O.

Promise: until a partition has taken a message of this producer, one message at a time goes there.

Kafka refuses a request whose numbers do not follow on from the one before. But where it has never
seen the producer it takes any number: a second request passes a first one that was refused, and
librdkafka then takes the first for delivered (KAFKA-15591, confluent-kafka-go#921). One message
that was taken puts an end to it. Kafka forgets a producer that is idle for long, so that what was
known is asked again now and then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence

from postroom.brokers.base import Outcome
from postroom.messages import Message

__all__ = ["Proof", "partition_of"]

FRESH_SECONDS = 600.0  # far less than producer.id.expiration.ms, which is a day


class _Topic:
    __slots__ = ("count", "proven", "until")

    def __init__(self, count: int, until: float) -> None:
        self.count = count
        self.proven: set[int] = set()
        self.until = until

    @property
    def whole(self) -> bool:
        return len(self.proven) >= self.count


class Proof:
    """The topics that exist, with what is known of their partitions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._topics: dict[str, _Topic] = {}

    def missing(self, topics: set[str]) -> set[str]:
        """Those of which nothing is known, or nothing new enough."""
        now, known = self._clock(), self._topics
        return {topic for topic in topics if topic not in known or known[topic].until < now}

    def exists(self, topic: str, partitions: int) -> None:
        """The topic has so many partitions, none of them proven."""
        self._topics[topic] = _Topic(partitions, self._clock() + FRESH_SECONDS)

    def forget(self, topic: str | None = None) -> None:
        """Ask again whether it exists, or whether all of them do."""
        for name in self._topics if topic is None else {topic} & self._topics.keys():
            self._topics[name].until = -math.inf

    def took(self, topic: str, partition: int) -> None:
        """The partition has taken a message."""
        if (known := self._topics.get(topic)) is not None:
            known.proven.add(partition)

    def is_whole(self, topics: Collection[str]) -> bool:
        """Whether every partition of these topics is proven."""
        known = self._topics
        return all(topic in known and known[topic].whole for topic in topics)

    def probes(
        self, batch: Sequence[Message], outcomes: Sequence[Outcome | None], most: int
    ) -> dict[int, int]:
        """The first message for every partition that is not proven, and its partition."""
        found: dict[int, int] = {}
        taken: set[tuple[str, int]] = set()
        for index, message in enumerate(batch):
            known = self._topics.get(message.topic)
            if known is None or known.whole or outcomes[index] is not None:
                continue
            place = self._place(known, message, taken)
            if place is not None and (message.topic, place) not in taken:
                taken.add((message.topic, place))
                found[index] = place
                if len(found) >= most:
                    break
        return found

    def _place(self, known: _Topic, message: Message, taken: set[tuple[str, int]]) -> int | None:
        """The partition that is not proven where this message goes, or could go."""
        if message.key is not None:
            place = partition_of(message.key, known.count)
            return None if place in known.proven else place
        free = (p for p in range(known.count) if p not in known.proven)
        return next((p for p in free if (message.topic, p) not in taken), None)

    def somewhere(self, topic: str) -> int:
        """A partition for a message without a key: a proven one, or any (-1) if all are."""
        known = self._topics.get(topic)
        return -1 if known is None or known.whole else next(iter(known.proven), -1)


@functools.lru_cache(maxsize=65_536)
def partition_of(key: str, count: int) -> int:
    """Where librdkafka and Java clients put a key: murmur2 of it."""
    try:
        data = key.encode()
    except UnicodeEncodeError:
        return 0  # no such message is ever sent
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    whole = len(data) - len(data) % 4
    for start in range(0, whole, 4):
        k = int.from_bytes(data[start : start + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return ((h ^ h >> 15) & 0x7FFFFFFF) % count
