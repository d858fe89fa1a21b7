"""Applications that publish: transactions short and long, crossing, late, and rolled back."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any
from uuid import UUID

from postroom.messages import Message, lane_of

from .loop import Loop
from .server import Publisher, Server
from .size import TOPICS, Size
from .tables import Row


@dataclass(slots=True, eq=False)
class Fact:
    """A message somebody published: when, and when it was committed, if it was."""

    id: str
    number: int
    order: tuple[str, str] | None
    transaction: int
    published: int
    committed: int | None = None
    expires: bool = False


class Application:
    """Writers on a few keys, of which one is hot; `facts` is what they said and when."""

    def __init__(
        self, loop: Loop, server: Server, size: Size, random: Random, trace: Callable[..., Any]
    ) -> None:
        self.facts: list[Fact] = []
        self.poison: set[str] = set()
        self.dedup: dict[str, float] = {}  # when those with a dedup key were published
        self.events = count()  # moments, so that "before" has a meaning
        self._loop = loop
        self._server = server
        self._size = size
        self._trace = trace
        self._uuids = Random(random.getrandbits(32))
        self._poisons = random.random() < 0.3
        self._locks: dict[str, asyncio.Lock] = {}

    async def write(self, dice: Random) -> None:
        """An application: transactions that are short or long, cross each other, and may fail."""
        for _ in range(self._size.transactions):
            await asyncio.sleep(dice.expovariate(1 / self._size.gap_seconds))
            key = dice.choice(("a", "a", "a", "b", "c"))
            serialized = dice.random() < 0.6
            lock = self._locks.setdefault(key, asyncio.Lock())
            if serialized:
                await lock.acquire()
            try:
                await self._transaction(dice, key)
            except ConnectionError:
                await asyncio.sleep(0.5)
            finally:
                if serialized:
                    lock.release()

    async def _transaction(self, dice: Random, key: str) -> None:
        publisher = self._server.open_publisher()
        number, facts = next(self.events), list[Fact]()
        slow = dice.choice((0.01, 0.01, 0.1, 1.0))
        for _ in range(dice.choice((1, 1, 2, 4))):
            await asyncio.sleep(dice.expovariate(1 / slow))
            if publisher.over:
                raise ConnectionResetError("the server is gone")
            topic = dice.choice(TOPICS)
            facts.append(self._publish(dice, publisher, topic, key, number))
        await asyncio.sleep(dice.expovariate(1 / slow))
        if publisher.over:
            raise ConnectionResetError("the server is gone")
        if dice.random() < 0.1:
            self._server.roll_back(publisher)
            return
        self._server.commit(publisher)
        self.dedup.update(publisher.dedup)
        moment = next(self.events)
        for fact in facts:
            fact.committed = moment
        self._trace("committed", [fact.number for fact in facts])

    def _publish(
        self, dice: Random, publisher: Publisher, topic: str, key: str, transaction: int
    ) -> Fact:
        kind = dice.random()
        id = str(UUID(int=self._uuids.getrandbits(128)))
        own_key = None if kind < 0.1 else key
        fact = Fact(
            id,
            len(self.facts),
            None if own_key is None or kind < 0.15 else (topic, key),
            transaction,
            next(self.events),
            expires=0.15 <= kind < 0.17,
        )
        self.facts.append(fact)
        payload = str(fact.number).encode()
        message = Message(
            lane_of(topic, own_key, id), self._server.tables.next_position(), id, topic, own_key,
            "note", None, None, "application/json", None, payload, dice.randint(10, 60), 0,
            int(self._loop.now * 1e6), 0, 0, 0, None,
        )  # fmt: skip
        if self._poisons and dice.random() < 0.05:
            self.poison.add(id)
        late = self._loop.now + dice.random() * self._size.late_seconds
        if kind > 0.8:
            publisher.dedup[id] = self._loop.now
        publisher.rows.append(
            Row(
                message,
                deliver_at=late if 0.1 <= kind < 0.15 else None,
                expires_at=late if fact.expires else None,
            )
        )
        return fact
