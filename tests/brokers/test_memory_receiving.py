"""What only the broker in memory does when receiving: what it kept, full shelves, `rebalance`."""

import asyncio

import pytest

from helpers_messages import make_message, make_messages
from postroom.brokers import memory_receiving
from postroom.brokers.base import DELIVERED, Transient
from postroom.brokers.memory import MemoryBroker
from postroom.brokers.receiving import CanReceive, Delivery, Subscription


def numbers(deliveries: list[Delivery]) -> list[int]:
    return [int(each.payload) for each in deliveries]


async def test_what_was_kept_before_and_what_comes_after() -> None:
    broker = MemoryBroker()
    assert isinstance(broker, CanReceive)
    await broker.send([*make_messages(3), make_message(topic="other")])
    first = await broker.receive(["orders"], consumer="billing")
    assert isinstance(first, Subscription)
    found = await first.take(10)
    assert numbers(found) == [0, 1, 2]
    assert found[0].key == "key-0"
    assert found[0].headers["event_type"] == found[0].type == "order.placed.v1"
    asyncio.get_running_loop().call_later(
        0.05, lambda: asyncio.ensure_future(broker.send(make_messages(4)[3:]))
    )
    assert numbers(await first.take(10)) == [3]
    assert await broker.send(make_messages(1)) == [DELIVERED]
    assert broker.unacknowledged("billing") == 5
    assert broker.unacknowledged("nobody") == 0


async def test_one_receiver_has_a_topic_at_a_time() -> None:
    broker = MemoryBroker()
    await broker.send(make_messages(2))
    first = await broker.receive(["orders"], consumer="billing")
    second = await broker.receive(["orders"], consumer="billing")
    (one,) = await first.take(1)
    waiting = asyncio.create_task(second.take(1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    broker.rebalance("billing")
    (other,) = await waiting
    assert other.id == one.id
    assert other.claim > one.claim
    await first.ack([one])  # a yes of an older claim counts for nothing
    assert broker.unacknowledged("billing") == 2
    await second.ack([other])
    assert broker.unacknowledged("billing") == 1


async def test_a_consumer_that_does_not_keep_up_holds_the_senders_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_receiving, "SHELF_LIMIT", 3)
    broker = MemoryBroker()
    subscription = await broker.receive(["orders"], consumer="billing")
    outcomes = await broker.send(make_messages(4))
    assert outcomes[:3] == [DELIVERED] * 3
    assert isinstance(outcomes[3], Transient)
    assert outcomes[3].down == "topic"
    await subscription.ack(await subscription.take(1))
    assert await broker.send(make_messages(1)) == [DELIVERED]
