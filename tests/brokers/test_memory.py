"""What only the in-process broker does: names, limits, scripted outcomes, subscribers."""

import asyncio

import pytest

from helpers_messages import make_message, make_messages
from postroom.brokers import (
    BrokerOptions,
    Delivered,
    Permanent,
    Transient,
    Unknown,
    memory,
    open_broker,
)
from postroom.brokers.memory import MemoryBroker
from postroom.messages import Message


async def test_one_name_is_one_broker() -> None:
    shop = memory.broker("shop")
    shop.clear()
    assert open_broker("memory://shop") is open_broker("memory://shop") is shop
    assert open_broker("memory://other") is not shop
    assert open_broker("memory://") is memory.broker()
    message = make_message()
    assert await open_broker("memory://shop").send([message]) == [Delivered()]
    await open_broker("memory://shop").close()
    assert shop.messages == [message]


async def test_the_oldest_are_dropped() -> None:
    broker = MemoryBroker(limit=3)
    batch = make_messages(5)
    assert await broker.send(batch) == [Delivered()] * 5
    assert broker.messages == batch[2:]
    broker.limit = 2
    assert broker.messages == batch[3:]


async def test_scripted_outcomes() -> None:
    broker = MemoryBroker()
    first, second = make_message(), make_message(key="k")
    no, later = Permanent("no", "never"), Transient("later", "not now")
    broker.fail(first.id, no)
    broker.fail(lambda message: message.key == "k", later, times=2)
    assert await broker.send([first, second]) == [no, later]
    assert await broker.send([first, second]) == [Delivered(), later]
    assert await broker.send([first, second]) == [Delivered(), Delivered()]
    assert broker.messages == [first, first, second]


async def test_an_answer_that_was_lost() -> None:
    broker = MemoryBroker()
    message, lost = make_message(), Unknown("timeout", "no answer")
    broker.fail(message.id, lost, arrives=True)
    assert await broker.send([message]) == [lost]
    assert broker.messages == [message]


async def test_down_and_up() -> None:
    broker = MemoryBroker()
    broker.down = True
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.down == "broker"
    broker.clear()
    assert await broker.send([make_message()]) == [Delivered()]


async def test_subscribers_get_every_message_in_order() -> None:
    broker = MemoryBroker()
    plain: list[Message] = []
    later: list[Message] = []

    async def slowly(message: Message) -> None:
        await asyncio.sleep(0)
        later.append(message)

    stop = broker.subscribe(plain.append)
    broker.subscribe(slowly)
    batch = make_messages(10)
    await broker.send(batch)
    assert plain == later == broker.messages == batch
    stop()
    stop()
    await broker.send(batch)
    assert plain == batch
    assert later == batch * 2


async def test_a_subscriber_that_fails_refuses() -> None:
    broker = MemoryBroker()

    def refuse(message: Message) -> None:
        raise ValueError("password=canary")

    broker.subscribe(refuse)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.code == "ValueError"
    assert "canary" not in outcome.text
    assert broker.messages == []


async def test_a_subscriber_that_hangs_does_not_hold_up_for_ever() -> None:
    broker = open_broker("memory://hangs", BrokerOptions(send_timeout_seconds=0.1))
    assert isinstance(broker, MemoryBroker)

    async def hang(message: Message) -> None:
        await asyncio.sleep(60)

    broker.subscribe(hang)
    first, second = await asyncio.wait_for(broker.send(make_messages(2)), 5)
    assert isinstance(first, Unknown)
    assert isinstance(second, Transient)
    assert second.code == "not_sent"
    broker.clear()


@pytest.mark.parametrize("error", [TimeoutError("mine"), KeyError("x")])
async def test_a_timeout_of_its_own_is_an_error_like_any(error: Exception) -> None:
    broker = MemoryBroker()

    async def fail(message: Message) -> None:
        raise error

    broker.subscribe(fail)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
