"""For tests of receiving: sending as a relay does, and a subscription with all that came by it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from helpers import eventually_async
from helpers_messages import make_message
from postroom.brokers import BrokerOptions, Delivered, Delivery, Subscription
from postroom.errors import Unreachable
from postroom.messages import Message

PATIENCE_SECONDS = 60.0
OPTIONS = BrokerOptions(source="the-shop", send_timeout_seconds=5.0)


def numbered(
    topic: str, numbers: Sequence[int], *, keys: int = 5, payload: bytes = b""
) -> list[Message]:
    """Messages whose payloads begin with their numbers; a number always has the same key."""
    return [
        make_message(b"%d " % number + payload, topic=topic, key=f"k{number % keys}")
        for number in numbers
    ]


async def send(broker: Any, messages: Sequence[Message]) -> None:
    """As a relay does: never two of a key under way at once."""
    wave: list[Message] = []
    for message in [*messages, None]:
        if message is None or message.order in {each.order for each in wave}:
            outcomes = await broker.send(wave)
            assert outcomes == [Delivered()] * len(wave), outcomes
            wave = []
        if message is not None:
            wave.append(message)


def number(delivery: Delivery) -> int:
    return int(delivery.payload.split(b" ", 1)[0])


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    return [number(delivery) for delivery in deliveries]


def ids(messages: Sequence[Message | Delivery]) -> list[str]:
    return [each.id for each in messages]


def in_order(came: Sequence[Delivery], sent: Sequence[Message]) -> bool:
    """Whether the messages of each key first came in the order in which they were sent."""
    place = {id: n for n, id in enumerate(dict.fromkeys(ids(came)))}
    for key in {message.order for message in sent}:
        places = [place[m.id] for m in sent if m.order == key and m.id in place]
        if places != sorted(places):
            return False
    return True


async def take(subscription: Subscription, count: int, *, seconds: float = 30) -> list[Delivery]:
    """So many deliveries, not one more."""
    found: list[Delivery] = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            found += await subscription.take(count - len(found))
    assert len(found) == count
    return found


async def take_nothing(subscription: Subscription, times: int = 1) -> None:
    for _ in range(times):
        assert await subscription.take(100) == []


class Receiver:
    """A subscription together with all that came through it."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.came: list[Delivery] = []

    async def get(self, count: int, *, most: int = 100, ack: bool = False) -> list[Delivery]:
        """The next so many messages; those that are in hand stay in hand."""
        got: list[Delivery] = []

        async def enough() -> bool:
            wanted = min(most, count - len(got))
            taken = await self.subscription.take(wanted)
            assert len(taken) <= wanted
            got.extend(taken)
            self.came.extend(taken)
            if ack and taken:
                await self.subscription.ack(taken)
            if in_hand := [] if ack else got:
                await self.subscription.extend(in_hand)
            return len(got) >= count

        await eventually_async(enough, PATIENCE_SECONDS, interval=0)
        return got

    @contextlib.asynccontextmanager
    async def holding(self, hand: list[Delivery]) -> AsyncIterator[None]:
        """Extend what is in hand as often as the subscription wants it."""

        async def extend() -> None:
            while True:
                await self.subscription.extend(hand)
                await asyncio.sleep(self.subscription.extend_seconds or 1.0)

        extending = asyncio.create_task(extend())
        try:
            yield
        finally:
            extending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await extending

    async def until_came(self, ids: set[str]) -> None:
        """Take and acknowledge until all these have come; outlives the broker."""

        async def all_here() -> bool:
            try:
                taken = await self.subscription.take(100)
                self.came.extend(taken)
                await self.subscription.ack(taken)
            except Unreachable:
                await asyncio.sleep(0.05)
            return ids <= {each.id for each in self.came}

        await eventually_async(all_here, PATIENCE_SECONDS, interval=0)

    async def until_lost(self) -> None:
        """Take until the broker is said to be lost."""

        async def lost() -> bool:
            try:
                self.came.extend(await self.subscription.take(100))
            except Unreachable:
                return True
            return False

        await eventually_async(lost, PATIENCE_SECONDS, interval=0)
