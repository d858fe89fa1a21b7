"""What a receiver of one stream has from the server, and in which order it hands it on. No I/O.

Promise: nothing is handed out while an earlier message of the stream is on its way back to us, and
nothing twice while it is in hand.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from postroom.brokers.receiving import Delivery
from postroom.errors import ConfigurationError

__all__ = ["Receipt", "Recovery", "Tray", "durable_name", "pieces"]

ACK = "$JS.ACK."
PREFIX = "postroom-"
_LONGEST_NAME = 64
_ODD = re.compile(r"[^A-Za-z0-9_-]")


class Receipt(NamedTuple):
    """Where to say yes or no to a message: the subject its delivery came with, read apart.

    `$JS.ACK.stream.durable.deliveries.sequence.place.nanoseconds.pending`, or with a domain and
    the hash of an account behind the first two words.
    """

    subject: str
    stream: str
    durable: str
    deliveries: int
    sequence: int
    stored_ns: str
    place: int  # of this delivery among all of the consumer; a redelivery has a place of its own

    @classmethod
    def of(cls, subject: str) -> Receipt | None:
        """Read a subject; None if it is not one of JetStream's."""
        words = subject.split(".")
        at = 2 if len(words) == 9 else 4
        if not subject.startswith(ACK) or len(words) < at + 7 or not words[at + 5].isdigit():
            return None
        try:
            deliveries, sequence, place = int(words[at + 2]), int(words[at + 3]), int(words[at + 4])
        except ValueError:
            return None
        return cls(subject, words[at], words[at + 1], deliveries, sequence, words[at + 5], place)

    @property
    def unnamed(self) -> str:
        """An id for a message that has none: the same each time, and another in a new stream."""
        return f"{self.stream}:{self.sequence}:{self.stored_ns}"

    def of_another(self, sequence: int, place: int) -> str:
        """The subject for another message of this consumer, which was delivered to somebody."""
        words = self.subject.split(".")
        at = 2 if len(words) == 9 else 4
        words[at + 2 : at + 7] = ["1", str(sequence), str(place), "0", "0"]
        return ".".join(words)


class Tray:
    """The messages of one stream under one claim: arrived, in hand, and given back."""

    def __init__(self) -> None:
        self._arrived: dict[int, Delivery] = {}
        self._order: list[int] = []  # a heap of what has arrived, and of what was taken away
        self._hand: dict[int, Delivery] = {}
        self._returning: set[int] = set()

    def __len__(self) -> int:
        """How many messages the server counts as ours."""
        return len(self._arrived) + len(self._hand)

    def __iter__(self) -> Iterator[Delivery]:
        """All that is ours, in the order of the stream."""
        mine = self._arrived | self._hand
        return iter([mine[sequence] for sequence in sorted(mine)])

    @property
    def waiting(self) -> int:
        """How many have arrived and were not handed out."""
        return len(self._arrived)

    @property
    def in_hand(self) -> int:
        """How many were handed out and neither acknowledged nor given back."""
        return len(self._hand)

    @property
    def fresh(self) -> bool:
        """Whether all that is ours came for the first time."""
        return not any(each.seen for each in self)

    @property
    def ready(self) -> bool:
        """Whether something may be handed out."""
        barrier = min(self._returning, default=None)
        return bool(self._arrived) and (barrier is None or min(self._arrived) < barrier)

    @property
    def sequences(self) -> set[int]:
        """The numbers of all that is ours."""
        return self._arrived.keys() | self._hand.keys()

    def has_arrived(self, sequence: int) -> bool:
        return sequence in self._arrived

    def beyond(self, last: int) -> int:
        """How many of ours are later than `last`."""
        return sum(sequence > last for sequence in self.sequences)

    @property
    def returning(self) -> frozenset[int]:
        """Messages returned to the server and not redelivered yet: later messages wait for them."""
        return frozenset(self._returning)

    def arrive(self, sequence: int, delivery: Delivery) -> None:
        """A message came. A copy of one in hand is none: it is still being handled."""
        self._returning.discard(sequence)
        if sequence in self._hand:
            return
        if sequence not in self._arrived:
            heapq.heappush(self._order, sequence)
        self._arrived[sequence] = delivery

    def hand_out(self, most: int) -> list[Delivery]:
        """The next messages in the order of the stream, none past one that is on its way back."""
        barrier = min(self._returning, default=None)
        out: list[Delivery] = []
        while self._order and len(out) < most:
            sequence = self._order[0]
            if barrier is not None and sequence > barrier:
                break
            heapq.heappop(self._order)
            delivery = self._arrived.pop(sequence, None)
            if delivery is not None:  # else it was acknowledged before it was handed out again
                self._hand[sequence] = delivery
                out.append(delivery)
        return out

    def done(self, sequence: int) -> None:
        """It is acknowledged."""
        self._hand.pop(sequence, None)
        self._arrived.pop(sequence, None)
        self._returning.discard(sequence)

    def give_back(self, sequence: int) -> bool:
        """Let go of one in hand, to get it again; False if it is not in hand."""
        if self._hand.pop(sequence, None) is None:
            return False
        self._returning.add(sequence)
        return True

    def expect_no_more(self, returning: Set[int]) -> None:
        """Stop waiting for these: each has come, or the stream does not have it any more."""
        self._returning -= returning


@dataclass(slots=True)
class Recovery:
    """The unacknowledged messages that the server counted at one moment, and their redeliveries.

    The server had delivered `last` and `place` then. Each message up to `last` that it delivers
    afterwards was among those counted, because only later messages can join them. So the count is
    reached when every one has come, and not before, also while others acknowledge some of them.
    """

    last: int
    place: int
    expected: int
    returning: frozenset[int]
    came: set[int] = field(default_factory=set)
    _noted: int = 0

    def arrive(self, receipt: Receipt) -> None:
        """Count a delivery if it belongs to this recovery."""
        if receipt.sequence <= self.last and receipt.place > self.place:
            self.came.add(receipt.sequence)

    @property
    def missing(self) -> int:
        """How many counted messages have not come again."""
        return max(self.expected - len(self.came), 0)

    def progressed(self) -> bool:
        """Return whether more has come since the last call."""
        before, self._noted = self._noted, len(self.came)
        return self._noted > before


def durable_name(consumer: str) -> str:
    """The name of a consumer's durable: its own where NATS takes it, else with a hash behind."""
    if not consumer:
        raise ConfigurationError("a consumer needs a name")
    plain = _ODD.sub("_", consumer)[:_LONGEST_NAME]
    if plain != consumer:
        plain = f"{plain}-{hashlib.sha256(consumer.encode()).hexdigest()[:8]}"
    return f"{PREFIX}{plain}"


def pieces(floor: int, last: int, most: int) -> Iterator[range]:
    """The sequences above `floor` up to `last`, in pieces of `most`."""
    for first in range(floor + 1, last + 1, most):
        yield range(first, min(first + most, last + 1))
