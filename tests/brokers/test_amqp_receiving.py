"""What only RabbitMQ does when receiving: queues, prefetching, messages of others."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiormq
import pamqp.frame
import pytest

from helpers import eventually_async
from helpers_amqp import PATIENT, Shelf, opened
from helpers_receiving import numbered, numbers, send, take, take_nothing
from postroom.brokers import BrokerOptions
from postroom.brokers.amqp import AmqpBroker
from postroom.errors import ConfigurationError, Unreachable
from proxy import ChaosProxy
from servers import RabbitMQServer


@pytest.fixture
async def shelf(rabbitmq_server: RabbitMQServer) -> AsyncIterator[Shelf]:
    async with opened(rabbitmq_server) as made:
        yield made


async def test_acknowledgements_reach_the_server(shelf: Shelf) -> None:
    """Many in one frame where that says no more than was asked for."""
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    await send(shelf.broker, numbered(shelf.topic, range(30)))
    found = await take(billing, 30)
    await billing.ack(found[10:20])
    await billing.ack([found[0], found[25]])
    await billing.ack(found[1:10])
    session = billing._session
    assert session is not None
    assert len(session.open) == 9
    await billing.close()
    assert await shelf.kept(f"{shelf.exchange}.billing") == 9
    again = await shelf.broker.receive([shelf.topic], consumer="billing")
    left = [20, 21, 22, 23, 24, 26, 27, 28, 29]
    assert numbers(await take(again, 9)) == left
    await again.close()


async def test_no_more_in_hand_than_prefetched(shelf: Shelf) -> None:
    broker = AmqpBroker(f"{shelf.url}&prefetch=5", PATIENT)
    billing = await broker.receive([shelf.topic], consumer="billing")
    await send(broker, numbered(shelf.topic, range(12)))
    first = await take(billing, 5)
    await take_nothing(billing)
    await billing.ack(first[:2])
    assert numbers(await take(billing, 2)) == [5, 6]
    await billing.close()
    await broker.close()


async def test_a_queue_of_another_make_is_refused(shelf: Shelf) -> None:
    await shelf.queue(f"{shelf.exchange}.billing")
    with pytest.raises(ConfigurationError, match=r"queue .*billing is there, but not as it should"):
        await shelf.broker.receive([shelf.topic], consumer="billing")


async def test_a_deleted_queue_is_made_again(shelf: Shelf) -> None:
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    await take_nothing(billing)
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        await channel.queue_delete(f"{shelf.exchange}.billing")

    async def begun_anew() -> bool:
        await billing.take(1)
        return billing._claim == 2

    await eventually_async(begun_anew, retry=(Unreachable,))
    await send(shelf.broker, numbered(shelf.topic, range(3)))
    assert numbers(await take(billing, 3)) == [0, 1, 2]
    await billing.close()


async def test_closed_while_it_connects_it_leaves_nobody_at_the_queue(shelf: Shelf) -> None:
    with ChaosProxy(shelf.server.url) as proxy:
        broker = AmqpBroker(proxy.through(shelf.url), BrokerOptions(send_timeout_seconds=20.0))
        first = await broker.receive([shelf.topic], consumer="billing")
        await asyncio.to_thread(proxy.cut)
        await eventually_async(lambda: proxy.connections == 0)
        await asyncio.to_thread(proxy.freeze, "to_client")
        await eventually_async(lambda: first._session is None or first._session.lost is not None)
        taking = asyncio.create_task(first.take(1))
        await eventually_async(lambda: proxy.connections == 1)
        await first.close()
        await asyncio.to_thread(proxy.thaw)
        with pytest.raises(Unreachable, match="closed"):
            await taking
        second = await shelf.broker.receive([shelf.topic], consumer="billing")
        await send(shelf.broker, numbered(shelf.topic, range(3)))
        assert numbers(await take(second, 3)) == [0, 1, 2]
        await second.close()
        await broker.close()


async def test_messages_of_others_are_taken_too(shelf: Shelf) -> None:
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        head = aiormq.spec.Basic.Properties(
            content_type="text/plain", message_id="m-1", headers={"n": 1, "X": [1], "t": None}
        )
        await channel.basic_publish(
            b"hello", exchange=shelf.exchange, routing_key=shelf.topic, properties=head
        )
        await channel.basic_publish(b"again", exchange=shelf.exchange, routing_key=shelf.topic)
    first, second = await take(billing, 2)
    assert (first.id, first.content_type, first.payload) == ("m-1", "text/plain", b"hello")
    assert first.headers == {"n": "1", "x": "[1]", "t": "None", "content-type": "text/plain"}
    assert (first.type, first.key, first.topic) == ("", None, shelf.topic)
    assert second.id
    await billing.close()


@pytest.mark.parametrize("count", ["abc", -1, True, None, [1], {"n": 1}, 1.5, "7"])
async def test_a_count_that_is_not_rabbitmqs_is_not_believed(shelf: Shelf, count: Any) -> None:
    broker = AmqpBroker(f"{shelf.url}&queue_type=classic", PATIENT)  # it sets no count of its own
    billing = await broker.receive([shelf.topic], consumer="billing")
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        head = aiormq.spec.Basic.Properties(headers={"event_id": "e-1", "x-delivery-count": count})
        await channel.basic_publish(
            b"hello", exchange=shelf.exchange, routing_key=shelf.topic, properties=head
        )
    (found,) = await take(billing, 1)
    assert (found.id, found.seen) == ("e-1", 0)
    await billing.close()
    again = await broker.receive([shelf.topic], consumer="billing")
    (found,) = await take(again, 1)
    assert (found.id, found.seen) == ("e-1", 1)
    await again.close()
    await broker.close()


def nested(deep: int) -> bytes:
    """A table in a table in a table."""
    table = b""
    for _ in range(deep):
        table = b"\x01tF" + len(table).to_bytes(4, "big") + table
    return table


@pytest.mark.parametrize(
    "properties",
    [
        pytest.param(b"\x20\x00" + b"\x00\x00\x00\x0b\x04x-\xff\xfeS\x00\x00\x00\x01v", id="name"),
        pytest.param(b"\x00\x40" + b"\xff" * 8, id="time"),
        pytest.param(b"\x20\x00" + len(nested(5000)).to_bytes(4, "big") + nested(5000), id="deep"),
    ],
)
async def test_what_no_library_can_read_holds_nothing_up(shelf: Shelf, properties: bytes) -> None:
    """It comes without its properties, for the consumer to refuse, and over one connection."""
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        for body in (b"one", b"two", b"three"):
            way = aiormq.spec.Basic.Publish(exchange=shelf.exchange, routing_key=shelf.topic)
            head = b"\x00\x3c\x00\x00" + len(body).to_bytes(8, "big")
            head += properties if body == b"two" else b"\x00\x00"
            frames = [
                pamqp.frame.marshal(way, channel.number),
                pamqp.frame._marshal(2, channel.number, head),
                pamqp.frame.marshal(aiormq.abc.ContentBody(body), channel.number),
            ]
            wire = aiormq.abc.ChannelFrame(payload=b"".join(frames), should_close=False)
            await channel.write_queue.put(wire)
        found = await take(billing, 3)
    assert [each.payload for each in found] == [b"one", b"two", b"three"]
    assert (found[1].type, found[1].headers) == ("", {})
    assert {each.claim for each in found} == {1}
    await billing.ack(found)
    await billing.close()
    assert await shelf.kept(f"{shelf.exchange}.billing") == 0
