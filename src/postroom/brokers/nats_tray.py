"""What a receiver of one stream has from the server, and in which order it hands it on. No I/O.

Promise: nothing is handed out while an earlier message of the stream is on its way back to us, and
nothing twice while it is in hand.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from postroom.brokers.receiving import Delivery
from postroom.errors import ConfigurationError

__all__ = ["Receipt", "Tray", "durable_name", "lost_ranges"]

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

    @classmethod
    def of(cls, subject: str) -> Receipt | None:
        """Read a subject; None if it is not one of JetStream's."""
        words = subject.split(".")
        at = 2 if len(words) == 9 else 4
        if not subject.startswith(ACK) or len(words) < at + 7 or not words[at + 5].isdigit():
            return None
        try:
            deliveries, sequence = int(words[at + 2]), int(words[at + 3])
        except ValueError:
            return None
        return cls(subject, words[at], words[at + 1], deliveries, sequence, words[at + 5])

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

    def up_to(self, last: int) -> int:
        """How many of ours are not later than `last`."""
        return sum(sequence <= last for sequence in self.sequences)

    def beyond(self, last: int) -> bool:
        """Whether one of ours is later than `last`."""
        return max(self.sequences, default=0) > last

    @property
    def returning(self) -> bool:
        """Whether something given back has not come yet: later messages wait for it."""
        return bool(self._returning)

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

    def expect_nothing(self) -> None:
        """Whatever was given back has come, or never will: the stream has it no more."""
        self._returning.clear()


def durable_name(consumer: str) -> str:
    """The name of a consumer's durable: its own where NATS takes it, else with a hash behind."""
    if not consumer:
        raise ConfigurationError("a consumer needs a name")
    plain = _ODD.sub("_", consumer)[:_LONGEST_NAME]
    if plain != consumer:
        plain = f"{plain}-{hashlib.sha256(consumer.encode()).hexdigest()[:8]}"
    return f"{PREFIX}{plain}"


def lost_ranges(floor: int, last: int, mine: Iterable[int], most: int) -> Iterator[list[int]]:
    """The sequences above `floor` up to `last` that others may hold, in pieces of `most`."""
    ours = set(mine)
    piece: list[int] = []
    for sequence in range(floor + 1, last + 1):
        if sequence not in ours:
            piece.append(sequence)
            if len(piece) == most:
                yield piece
                piece = []
    if piece:
        yield piece
