"""What a consumer has in hand: received, not yet acknowledged, and bounded by number and bytes.

Whatever leaves the hand was acknowledged after its commit, or is given back, or is dropped because
it is another's: in each case the broker decides when it comes again, if ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from postroom import failpoints, signals
from postroom.brokers.receiving import Delivery, Subscription
from postroom.errors import Unreachable
from postroom.worker.waiting import pause

__all__ = ["Hand"]

LONGEST_PAUSE_SECONDS = 5.0


class Hand:
    """The deliveries of one subscription that a consumer is at."""

    def __init__(self, name: str, subscription: Subscription, *, rows: int, size: int) -> None:
        self._name = name
        self._subscription = subscription
        self._rows, self._size = rows, size
        self._held: dict[int, Delivery] = {}
        self._bytes = 0
        self._freed = asyncio.Event()
        self._acks: list[Delivery] = []
        self._acked = asyncio.Event()
        self._loose: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def room(self) -> int:
        """Wait until there is room for more, and say for how many."""
        while len(self._held) >= self._rows or self._bytes >= self._size:
            self._freed.clear()
            await self._freed.wait()
        return self._rows - len(self._held)

    def take(self, each: Delivery) -> None:
        """It is in hand from now on."""
        self._held[id(each)] = each
        self._bytes += len(each.payload)

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """They are not in hand any more."""
        for each in deliveries:
            if self._held.pop(id(each), None) is not None:
                self._bytes -= len(each.payload)
        self._freed.set()

    def let_go(self, are_meant: Callable[[Delivery], bool]) -> None:
        """Drop those that are another's, and offer them to the broker, which knows better."""
        dropped = [each for each in self._held.values() if are_meant(each)]
        self.drop(dropped)
        task = asyncio.ensure_future(self.give_back(dropped))
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """They were not handled: the broker may hand them out again."""
        if deliveries:
            with contextlib.suppress(Unreachable):
                await self._subscription.give_back(deliveries)

    # ── saying yes ─────────────────────────────────────────────────────────────────────────────

    def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """They are handled and committed."""
        self._acks += deliveries
        self._acked.set()

    async def keep_acknowledging(self, ending: asyncio.Event) -> None:
        """Tell the broker, of all that has come together at once; to the last when it must end."""
        while True:
            await self._acked.wait()
            self._acked.clear()
            batch, self._acks = self._acks, []
            if batch:
                await self._say_yes(batch)
                self.drop(batch)
            elif ending.is_set():
                return

    def wake(self) -> None:
        """Look whether it must end."""
        self._acked.set()

    async def _say_yes(self, batch: Sequence[Delivery]) -> None:
        try:
            failpoints.hit("consumer.ack.before")
            await self._subscription.ack(batch)
            failpoints.hit("consumer.ack.after")
        except Unreachable as error:
            # They will come again, and be duplicates.
            signals.emit(
                "consumer.unacknowledged", consumer=self._name, count=len(batch), error=str(error)
            )

    async def keep_extending(self, ending: asyncio.Event) -> None:
        """Tell the broker that the rest is still being handled, as often as it wants to hear it."""
        seconds = self._subscription.extend_seconds
        while not ending.is_set():
            await pause(ending, seconds or LONGEST_PAUSE_SECONDS)
            if self._held and seconds is not None:
                with contextlib.suppress(Unreachable):
                    await self._subscription.extend(list(self._held.values()))
