"""Between the thread that fetches from Kafka and the event loop that handles: a shelf with a lock.

Promise: whatever is taken from it stands under the partition's present claim, in the order of the
partition, and acknowledgements under an older claim change nothing.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from postroom.brokers.kafka_ledger import Ledger
from postroom.brokers.receiving import Delivery

__all__ = ["Partition", "Shelf"]

MAX_ROWS = 1000
MAX_BYTES = 8 * 1024 * 1024
Partition: TypeAlias = tuple[str, int]
Wanted: TypeAlias = dict[Partition, tuple[int, int]]  # claim and position


class Shelf:
    """What was fetched and nobody has taken yet, and the ledger of each partition that is ours.

    The lock is held for moments only, never while anybody waits for the network.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self._wake = wake  # tells the event loop to look again
        self._claims = 0
        self._ledgers: dict[Partition, Ledger] = {}
        self._fresh: deque[Delivery] = deque()
        self._returned: list[tuple[Partition, int, Delivery]] = []
        self._bytes = 0

    # What the thread does.

    def assigned(self, partitions: Iterable[Partition]) -> None:
        """These are ours from now on, under a claim that never was before."""
        with self.changed:
            for partition in partitions:
                self._claims += 1
                self._ledgers[partition] = Ledger(self._claims)

    def revoked(self, partitions: Iterable[Partition]) -> None:
        """These are no longer ours: what is here or in hand of them is void."""
        with self.changed:
            gone = set(partitions)
            for partition in gone:
                self._ledgers.pop(partition, None)
            self._fresh = deque(d for d in self._fresh if d.receipt[:2] not in gone)
            self._returned = [each for each in self._returned if each[0] not in gone]
            heapq.heapify(self._returned)
            self._bytes = sum(len(d.payload) for d in self._fresh)

    @property
    def partitions(self) -> list[Partition]:
        with self.changed:
            return list(self._ledgers)

    def claim_of(self, partition: Partition) -> int | None:
        ledger = self._ledgers.get(partition)
        return ledger.claim if ledger else None

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Lay them out, in order; what is not ours, or was here before, is left away."""
        with self.changed:
            for delivery in deliveries:
                topic, partition, offset = delivery.receipt
                ledger = self._ledgers.get((topic, partition))
                if ledger and ledger.claim == delivery.claim and ledger.hand_out(offset):
                    self._fresh.append(delivery)
                    self._bytes += len(delivery.payload)
        self._wake()

    @property
    def in_hand(self) -> bool:
        """Whether an acknowledgement may come at any moment."""
        with self.changed:
            return any(ledger.in_hand for ledger in self._ledgers.values())

    @property
    def waiting(self) -> int:
        """How many it holds that were not taken yet."""
        with self.changed:
            return len(self._fresh) + len(self._returned)

    @property
    def room(self) -> int:
        """How many more it may hold."""
        return 0 if self._bytes >= MAX_BYTES else max(MAX_ROWS - len(self._fresh), 0)

    def to_commit(self, only: Iterable[Partition] | None = None) -> dict[Partition, int]:
        """How far each partition is done, where that is news to the broker."""
        with self.changed:
            wanted = self._ledgers if only is None else set(only) & set(self._ledgers)
            return {
                partition: position
                for partition in wanted
                if (ledger := self._ledgers[partition]).dirty
                and (position := ledger.position) is not None
            }

    def committed(self, positions: dict[Partition, int]) -> None:
        with self.changed:
            for partition, position in positions.items():
                if (ledger := self._ledgers.get(partition)) is not None:
                    ledger.committed = position

    # What the event loop does.

    def take(self, most: int) -> list[Delivery]:
        """The next, at most so many: what was given back first, in its order."""
        taken: list[Delivery] = []
        with self.changed:
            while self._returned and len(taken) < most:
                taken.append(heapq.heappop(self._returned)[2])
            while self._fresh and len(taken) < most:
                delivery = self._fresh.popleft()
                self._bytes -= len(delivery.payload)
                taken.append(delivery)
            if taken:
                self.changed.notify_all()  # there is room
        return taken

    def ack(self, deliveries: Iterable[Delivery]) -> Wanted:
        """They are done; gives what the broker must be told before they are so for good."""
        with self.changed:
            wanted: Wanted = {}
            for delivery in deliveries:
                if (ledger := self._ledger_of(delivery)) is not None:
                    ledger.ack(delivery.receipt[2])
                    if ledger.dirty and ledger.position is not None:
                        wanted[delivery.receipt[:2]] = (ledger.claim, ledger.position)
            if wanted:
                self.changed.notify_all()
            return wanted

    def is_told(self, wanted: Wanted) -> bool:
        """Whether the broker knows, or these partitions are no longer ours to speak of."""
        with self.changed:
            for partition, (claim, position) in wanted.items():
                ledger = self._ledgers.get(partition)
                if ledger and ledger.claim == claim and (ledger.committed or 0) < position:
                    return False
            return True

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """They come again, before anything newer."""
        with self.changed:
            here = {each[:2] for each in self._returned}
            for delivery in deliveries:
                topic, partition, offset = delivery.receipt
                place = ((topic, partition), offset)
                ledger = self._ledger_of(delivery)
                if ledger is not None and ledger.is_open(offset) and place not in here:
                    here.add(place)
                    again = delivery._replace(seen=delivery.seen + 1)
                    heapq.heappush(self._returned, (*place, again))

    def _ledger_of(self, delivery: Delivery) -> Ledger | None:
        ledger = self._ledgers.get(delivery.receipt[:2])
        return ledger if ledger is not None and ledger.claim == delivery.claim else None
