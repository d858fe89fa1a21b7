"""Whose turn it is to receive from a source: a seat in the database beside the broker's own claim.

Promise: what was received under a seat is applied only while the seat is the same. A process that
was frozen while its source went to another finds its seat taken, in the very transaction in which
it would have applied something. A seat is taken when the broker gives a source anew, and at no
other time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from postroom import signals
from postroom.brokers.receiving import Delivery
from postroom.inbox.rules import Letter
from postroom.inbox.store import Seat

__all__ = ["Resubscribe", "Seats"]

RECLAIM_SECONDS = 5.0


class Resubscribe(Exception):
    """The broker hands out what another process has the seat of: ask it anew whose it is."""


@dataclass(slots=True)
class _Sitting:
    """A seat of ours; `lost_at`: since when it is another's."""

    claim: int
    epoch: int
    lost_at: float | None = None


class Seats:
    """The seats of one subscription. One that keeps keys apart by itself needs none."""

    def __init__(
        self, name: str, take: Callable[[str], Awaitable[int]], *, exclusive: bool
    ) -> None:
        self._name = name
        self._take = take
        self._exclusive = exclusive
        self._sittings: dict[str, _Sitting] = {}

    async def epoch_of(self, each: Delivery) -> int | None:
        """The epoch under which a delivery is received; None: its source is another's.

        If the broker has given us the source anew, the seat is taken from whoever has it.
        """
        if not self._exclusive:
            return 0
        sitting = self._sittings.get(each.source)
        if sitting is None or each.claim > sitting.claim:
            epoch = await self._take(each.source)
            self._sittings[each.source] = _Sitting(each.claim, epoch)
            signals.emit("seat.taken", consumer=self._name, source=each.source, epoch=epoch)
            return epoch
        if each.claim < sitting.claim:
            return None
        if sitting.lost_at is None:
            return sitting.epoch
        if time.monotonic() - sitting.lost_at > RECLAIM_SECONDS:
            raise Resubscribe
        return None

    def of(self, letters: Iterable[Letter]) -> list[Seat]:
        """The seats these were received under, for their transaction to look at."""
        if not self._exclusive:
            return []
        return sorted({Seat(one.delivery.source, one.epoch) for one in letters if one.delivery})

    def current(self, letter: Letter) -> bool:
        """Whether a message is still ours, as far as is known here."""
        if letter.delivery is None or not self._exclusive:
            return True
        sitting = self._sittings.get(letter.delivery.source)
        known = sitting is not None and sitting.epoch == letter.epoch
        return known and sitting is not None and sitting.lost_at is None

    def lose(self, seat: Seat) -> int | None:
        """A seat was found to be another's; the claim that is void, unless it was taken anew."""
        sitting = self._sittings[seat.source]
        if sitting.epoch != seat.epoch:
            return None
        if sitting.lost_at is None:
            sitting.lost_at = time.monotonic()
            signals.emit("seat.lost", consumer=self._name, source=seat.source, epoch=seat.epoch)
        return sitting.claim
