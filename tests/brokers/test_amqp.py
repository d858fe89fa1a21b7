"""What only RabbitMQ does: exchanges, queues, returns, confirms, alarms, secrets."""

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiormq
import pamqp.frame
import pytest

from certificates import make_certificate
from helpers import eventually_async
from helpers_messages import make_message, make_messages
from helpers_receiving import numbered, numbers, send, take, take_nothing
from postroom.brokers import (
    BrokerOptions,
    CanExamine,
    CanReceive,
    Delivered,
    Permanent,
    Transient,
    Unknown,
)
from postroom.brokers.amqp import AmqpBroker
from postroom.brokers.amqp_topology import faults, matches
from postroom.brokers.amqp_wire import closed, publish
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.messages import Message, new_id, wire_headers
from proxy import ChaosProxy
from servers import RabbitMQServer, Unavailable, free_port, leave_out

PATIENT = BrokerOptions(send_timeout_seconds=20.0)
QUICK = BrokerOptions(send_timeout_seconds=4.0)  # for tests of silence: they wait it out
SECRET = "canary:p@ss/w%rd"


class Shelf:
    """An exchange and a topic of our own, and a broker that sends to it."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.server = server
        self.exchange = f"e{new_id()}"
        self.topic = f"t{new_id()}"
        self.url = f"{server.url}?exchange={self.exchange}"
        self.broker = AmqpBroker(self.url, PATIENT)

    async def queue(self, topic: str | None = None, *, bind: bool = True, **arguments: Any) -> str:
        """Make a queue for a topic, of its name."""
        topic = topic or self.topic
        await self.broker.ping()  # makes the exchange
        async with aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            named = {name.replace("_", "-"): value for name, value in arguments.items()}
            await channel.queue_declare(topic, durable=True, arguments=named)
            if bind:
                await channel.queue_bind(topic, self.exchange, topic)
        return topic

    async def kept(self, topic: str | None = None) -> int:
        async with aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            found = await channel.queue_declare(topic or self.topic, passive=True)
            return found.message_count or 0

    async def clear(self) -> None:
        async with aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            for consumer in ("billing",):
                await channel.queue_delete(f"{self.exchange}.{consumer}")
            await channel.queue_delete(self.topic)
            await channel.exchange_delete(self.exchange)


@pytest.fixture
async def shelf(rabbitmq_server: RabbitMQServer) -> AsyncIterator[Shelf]:
    made = Shelf(rabbitmq_server)
    yield made
    await made.broker.close()
    await made.clear()


# ── The wire ───────────────────────────────────────────────────────────────────────────────────


def frames(data: bytes) -> list[Any]:
    found = []
    while data:
        size, channel, frame = pamqp.frame.unmarshal(data)
        assert channel == 7
        found.append(frame)
        data = data[size:]
    return found


def published(message: Message, frame_max: int = 131_072) -> Any:
    return publish(
        message, channel=7, exchange="events", source="shop", epoch=3, frame_max=frame_max
    )


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 8176, 100_000])
@pytest.mark.parametrize("redrives", [0, 2])
def test_our_frames_say_what_the_librarys_would(size: int, redrives: int) -> None:
    message = make_message(
        b"x" * size, key="ключ", aggregate_id="№ 7", headers={"a": "grüße 🌍"}, redrives=redrives
    )
    method, header, *bodies = frames(published(message, frame_max=4096))
    assert (method.name, method.exchange, method.routing_key) == (
        "Basic.Publish",
        "events",
        "orders",
    )
    assert (method.mandatory, method.immediate) == (True, False)
    properties = header.properties
    assert header.body_size == size
    said = wire_headers(message, source="shop", epoch=3, prefix="cloudEvents_")
    assert properties.headers == said
    assert (properties.delivery_mode, properties.content_type) == (2, "application/json")
    assert properties.message_id == message.broker_id
    assert properties.timestamp.timestamp() == message.created_us // 1_000_000
    assert b"".join(body.value for body in bodies) == message.payload
    assert all(0 < len(body.value) <= 4088 for body in bodies)


@pytest.mark.parametrize(
    "bad",
    [
        {"headers_json": "[1]"},
        {"headers_json": "{"},
        {"headers_json": '{"a": "\\ud800"}'},
        {"headers_json": '{"a": 1}'},
        {"headers": {"a": "x" * 200_000}},
        {"headers": {"a" * 256: "x"}},
        {"content_type": "ü" * 200},
        {"topic": "a b"},
        {"topic": "orders.#"},
        {"topic": ""},
    ],
)
def test_what_cannot_be_sent_is_refused_before(bad: dict[str, Any]) -> None:
    refused = published(make_message(**bad))
    assert isinstance(refused, Permanent)
    assert refused.code in ("bad_header", "bad_topic")


def test_what_a_closed_channel_means() -> None:
    message, other = make_message(b"x" * 300), make_message(b"y", topic="other")
    said = "PRECONDITION_FAILED - message size 300 is larger than configured max size 100"
    assert isinstance(closed(said, message), Permanent)
    assert isinstance(closed(said, other), Unknown)
    said = "ACCESS_REFUSED - access to topic 'orders' in exchange 'e' in vhost '/' refused"
    refused = closed(said, message)
    assert isinstance(refused, Transient)
    assert (refused.code, refused.down) == ("not_permitted", "topic")
    assert isinstance(closed(said, other), Unknown)


# ── Sending ────────────────────────────────────────────────────────────────────────────────────


async def test_what_no_queue_takes_comes_back(shelf: Shelf) -> None:
    await shelf.queue()
    batch = [make_message(topic=topic) for topic in (shelf.topic, "nowhere", shelf.topic)]
    first, lost, last = await shelf.broker.send(batch)
    assert first == last == Delivered()
    assert isinstance(lost, Transient)
    assert (lost.code, lost.down) == ("no_queue", "topic")
    assert f"no queue is bound to exchange {shelf.exchange} for routing key nowhere" in lost.text
    assert await shelf.kept() == 2


async def test_the_same_message_twice_at_once_comes_back_twice(shelf: Shelf) -> None:
    message = make_message(topic=shelf.topic)
    for outcome in await shelf.broker.send([message] * 300):
        assert isinstance(outcome, Transient)
        assert outcome.code == "no_queue"


async def test_a_binding_that_goes_away_under_load_loses_nothing(shelf: Shelf) -> None:
    await shelf.queue()
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        delivered: set[str] = set()
        ended = False

        async def sending() -> None:
            while not ended:
                batch = make_messages(200, topic=shelf.topic)
                for message, outcome in zip(batch, await shelf.broker.send(batch), strict=True):
                    if outcome == Delivered():
                        delivered.add(message.id)

        task = asyncio.create_task(sending())
        await eventually_async(lambda: len(delivered) > 1_000, interval=0.001)
        await channel.queue_unbind(shelf.topic, shelf.exchange, shelf.topic)
        unbound = len(delivered)
        ended = True
        await task
        assert unbound > 1_000
        assert await shelf.kept() == len(delivered)


async def test_without_an_exchange_a_topic_is_a_queue(rabbitmq_server: RabbitMQServer) -> None:
    broker = AmqpBroker(rabbitmq_server.url, PATIENT)
    shelf = Shelf(rabbitmq_server)
    (lost,) = await broker.send([make_message(topic=shelf.topic)])
    assert isinstance(lost, Transient)
    assert "?exchange=NAME" in lost.text
    await shelf.queue(bind=False)
    assert await broker.send(make_messages(3, topic=shelf.topic)) == [Delivered()] * 3
    assert await shelf.kept() == 3
    with pytest.raises(ConfigurationError, match=r"\?exchange=NAME"):
        await broker.receive([shelf.topic], consumer="billing")
    await broker.close()
    await shelf.broker.close()
    await shelf.clear()


async def test_a_queue_that_rejects_is_the_topics_fault(shelf: Shelf) -> None:
    await shelf.queue(x_max_length=5, x_overflow="reject-publish")
    outcomes = await shelf.broker.send(make_messages(200, topic=shelf.topic, keys=200))
    refused = [outcome for outcome in outcomes if outcome != Delivered()]
    assert refused
    assert {(type(o), getattr(o, "code", ""), getattr(o, "down", "")) for o in refused} == {
        (Transient, "nacked", "topic")
    }
    assert await shelf.kept() == 200 - len(refused)


async def test_a_deleted_exchange_is_made_again(shelf: Shelf) -> None:
    await shelf.queue()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        await channel.exchange_delete(shelf.exchange)
    for outcome in await shelf.broker.send(make_messages(5, topic=shelf.topic)):
        assert isinstance(outcome, Unknown)
        assert (outcome.code, outcome.down) == ("channel_closed", "broker")
        assert "NOT_FOUND" in outcome.text
    for outcome in await shelf.broker.send(make_messages(5, topic=shelf.topic)):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("no_queue", "topic")


async def test_blocked_publishers_wait_and_nothing_is_lost(shelf: Shelf) -> None:
    shelf.broker = AmqpBroker(shelf.url, QUICK)
    await shelf.queue()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    batch = make_messages(20, topic=shelf.topic)
    await asyncio.to_thread(shelf.server.control, "set_vm_memory_high_watermark", "0")
    try:
        # The first to come finds out: what it sent may be stored once the alarm is over.
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Unknown)
            assert (outcome.code, outcome.down) == ("blocked", "broker")
        link = shelf.broker._link
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Transient)
            assert (outcome.code, outcome.down) == ("blocked", "broker")
            assert "list_alarms" in outcome.text
        with pytest.raises(Unreachable, match="short of memory"):
            await shelf.broker.ping()
    finally:
        await asyncio.to_thread(
            shelf.server.control, "set_vm_memory_high_watermark", "absolute", "1GB"
        )

    async def sent() -> bool:
        return await shelf.broker.send(batch) == [Delivered()] * 20

    await eventually_async(sent)
    assert shelf.broker._link is link
    assert await shelf.kept() == 41


async def test_a_silent_server_leaves_the_outcome_unknown(shelf: Shelf) -> None:
    shelf.broker = AmqpBroker(shelf.url, QUICK)
    await shelf.queue()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    shelf.server.require_private()
    batch = make_messages(50, topic=shelf.topic)
    with shelf.server.paused():
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Unknown)
            assert (outcome.code, outcome.down) == ("timeout", "broker")
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Transient)
            assert (outcome.code, outcome.down) == ("unreachable", "broker")
        with pytest.raises(Unreachable, match="cannot connect to RabbitMQ at amqp://127"):
            await shelf.broker.ping()

    async def sent() -> bool:
        return await shelf.broker.send(batch) == [Delivered()] * 50

    await eventually_async(sent, 30)


async def test_a_lost_answer_is_unknown(shelf: Shelf) -> None:
    await shelf.queue()
    with ChaosProxy(shelf.server.url) as proxy:
        broker = AmqpBroker(proxy.through(shelf.url), PATIENT)
        await broker.ping()
        batch = make_messages(20, topic=shelf.topic)
        loss = proxy.lose_reply(to=batch[0].id.encode())
        outcomes = await broker.send(batch)
        assert loss.happened
        assert {(o.code, o.down) for o in outcomes if isinstance(o, Unknown)} == {
            ("connection_lost", "broker")
        }
        assert await broker.send(batch) == [Delivered()] * 20
        await broker.close()
    assert await shelf.kept() == 40


async def test_nobody_there(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    broker = AmqpBroker(f"amqp://127.0.0.1:{unused_tcp_port}?exchange=e", PATIENT)
    for outcome in await broker.send(make_messages(2)):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("unreachable", "broker")
    with pytest.raises(Unreachable):
        await broker.ping()
    with pytest.raises(Unreachable):
        await broker.receive(["orders"], consumer="billing")
    with pytest.raises(Unreachable):
        await broker.examine(["orders"])
    await broker.close()
    assert await broker.send([make_message()]) != [Delivered()]
    assert (caplog.text, capfd.readouterr().err) == ("", "")


async def test_a_killed_server_prints_nothing(
    shelf: Shelf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    await shelf.queue()
    shelf.server.require_private()
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    caplog.clear()
    assert await shelf.broker.send(make_messages(2, topic=shelf.topic)) == [Delivered()] * 2
    sending = asyncio.create_task(shelf.broker.send(make_messages(3_000, topic=shelf.topic)))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(shelf.server.kill)
    outcomes = await sending
    assert {o.down for o in outcomes if isinstance(o, Unknown | Transient)} <= {"broker"}
    await billing.close()
    del sending, billing
    await asyncio.sleep(0.1)
    gc.collect()
    assert (caplog.text, capfd.readouterr().err) == ("", "")
    await asyncio.to_thread(shelf.server.start)


async def test_the_window_is_bounded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    from postroom.brokers.amqp_link import AmqpLink

    await shelf.queue()
    seen: list[int] = []
    expect = AmqpLink.expect

    def watched(link: AmqpLink, *arguments: Any) -> None:
        expect(link, *arguments)
        seen.append(len(link.waiting))

    monkeypatch.setattr(AmqpLink, "expect", watched)
    broker = AmqpBroker(f"{shelf.url}&max_outstanding=16", BrokerOptions(send_timeout_seconds=30))
    batches = [make_messages(300, topic=shelf.topic) for _ in range(3)]
    for outcomes in await asyncio.gather(*(broker.send(batch) for batch in batches)):
        assert outcomes == [Delivered()] * 300
    assert 1 < max(seen) <= 16
    await broker.close()


async def test_a_cancelled_send_gives_its_place_back(shelf: Shelf) -> None:
    await shelf.queue()
    shelf.server.require_private()
    with shelf.server.paused():
        sending = asyncio.create_task(shelf.broker.send(make_messages(100, topic=shelf.topic)))
        await asyncio.sleep(0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    link = shelf.broker._link
    assert link is not None
    assert (len(link.waiting), link.bytes) == (0, 0)
    # Answers to those that nobody awaits any more are not taken for answers to others.
    batch = [make_message(topic=topic) for topic in (shelf.topic, "nowhere", shelf.topic)]
    outcomes = await shelf.broker.send(batch)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Transient)


# ── Receiving ──────────────────────────────────────────────────────────────────────────────────


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


# ── What would lose messages ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("pattern", "topic", "fits"),
    [
        ("orders", "orders", True),
        ("orders", "orders.created", False),
        ("*", "orders", True),
        ("*", "orders.created", False),
        ("orders.*", "orders.created", True),
        ("orders.*", "orders", False),
        ("#", "orders.created.v1", True),
        ("orders.#", "orders", True),
        ("#.v1", "orders.created.v1", True),
        ("#.v1", "orders.created.v2", False),
        ("*.#.v1", "v1", False),
        ("a.#.b.#.c", "a.x.b.c", True),
        ("", "orders", False),
    ],
)
def test_bindings_match_as_in_rabbitmq(pattern: str, topic: str, fits: bool) -> None:
    assert matches(pattern, topic) is fits


def test_faults_of_a_queue() -> None:
    sound = {"durable": True, "arguments": {"x-dead-letter-exchange": "dead"}}
    assert list(faults("q", sound)) == []
    by_policy = {"effective_policy_definition": {"dead-letter-exchange": "dead"}}
    assert list(faults("q", by_policy)) == []
    frail = {"durable": False, "arguments": {"x-message-ttl": 5, "x-max-length": 9}}
    said = " ".join(faults("q", frail))
    for word in ("not durable", "no dead-letter exchange", "message-ttl", "reject-publish"):
        assert word in said
    full = {"x-dead-letter-exchange": "d", "x-max-length": 9, "x-overflow": "reject-publish"}
    assert list(faults("q", {"arguments": full})) == []


async def test_what_amqp_alone_can_tell(shelf: Shelf) -> None:
    assert isinstance(shelf.broker, CanExamine)
    assert isinstance(shelf.broker, CanReceive)
    (blind,) = await shelf.broker.examine([shelf.topic])
    assert "?management=" in blind
    broker = AmqpBroker(shelf.server.url, PATIENT)
    missing, _ = await broker.examine([shelf.topic])
    assert f"there is no queue named {shelf.topic}" in missing
    await shelf.queue(bind=False)
    assert len(await broker.examine([shelf.topic])) == 1
    await broker.close()


class ManagedServer(RabbitMQServer):
    """With the management plugin, which takes its time to start."""

    def __init__(self) -> None:
        self.management = free_port()
        super().__init__(
            config=f"management.tcp.port = {self.management}\nmanagement.tcp.ip = 127.0.0.1",
            fsync=False,
        )

    def _prepare(self) -> None:
        super()._prepare()
        (self.directory / "plugins").write_text("[rabbitmq_management].\n")


@pytest.fixture
def managed(rabbitmq_server: RabbitMQServer) -> Iterator[ManagedServer]:
    rabbitmq_server.require_private()
    try:
        server = ManagedServer()
    except Unavailable as error:
        leave_out(str(error))
    with server:
        yield server


class Web(BaseHTTPRequestHandler):
    """Answers with nothing, or sends elsewhere, and keeps what it was told."""

    def do_GET(self) -> None:
        self.server.told.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        elsewhere = self.server.elsewhere  # type: ignore[attr-defined]
        self.send_response(302 if elsewhere else 200)
        if elsewhere:
            self.send_header("Location", elsewhere)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def web(elsewhere: str | None = None) -> Iterator[tuple[str, list[str | None]]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        server.elsewhere, server.told = elsewhere, []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.told  # type: ignore[attr-defined]
        server.shutdown()


@pytest.mark.parametrize("way", ["redirect", "proxy"])
async def test_rabbitmqs_password_goes_to_nobody_else(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("urllib.request._opener", None)  # it remembers the proxies of before
    with web() as (thief, stolen), web(thief if way == "redirect" else None) as (plugin, told):
        if way == "proxy":
            monkeypatch.setenv("http_proxy", thief)
            monkeypatch.delenv("no_proxy", raising=False)
        broker = AmqpBroker(f"{shelf.url}&management={plugin}", PATIENT)
        await shelf.queue()
        with contextlib.suppress(Unreachable):
            await broker.examine([shelf.topic])
        await broker.close()
    assert told
    assert stolen == []


async def test_dangers_are_named(managed: ManagedServer) -> None:
    management = f"http://127.0.0.1:{managed.management}"
    shelf = Shelf(managed)
    url = f"{shelf.url}&management={management}"
    broker = AmqpBroker(url, PATIENT)
    await broker.ping()
    (unbound,) = await broker.examine([shelf.topic])
    assert "no queue is bound" in unbound
    billing = await broker.receive([shelf.topic], consumer="billing")
    (no_exchange,) = await broker.examine([shelf.topic])
    assert "has no dead-letter exchange" in no_exchange
    await billing.close()
    sound = AmqpBroker(f"{url}&dead_letter_exchange=dead", PATIENT)
    shipping = await sound.receive([f"{shelf.topic}.shipped"], consumer="shipping")
    assert await sound.examine([f"{shelf.topic}.shipped"]) == []
    await shipping.close()
    for each in (broker, sound, shelf.broker):
        await each.close()


# ── Who may come in, and that no secret gets out ───────────────────────────────────────────────


@pytest.fixture(scope="module")
def users(rabbitmq_server: RabbitMQServer) -> Iterator[RabbitMQServer]:
    rabbitmq_server.require_private()
    control = rabbitmq_server.control
    control("add_user", "re:lay", SECRET)
    control("add_vhost", "its own/vhost")
    control("set_permissions", "-p", "its own/vhost", "re:lay", ".*", ".*", ".*")
    control("set_permissions", "-p", "/", "re:lay", ".*", "", ".*")
    yield rabbitmq_server
    control("delete_user", "re:lay")
    control("delete_vhost", "its own/vhost")


def as_user(server: RabbitMQServer, user: str, password: str, vhost: str = "") -> str:
    who = f"{quote(user, safe='')}:{quote(password, safe='')}"
    path = f"/{quote(vhost, safe='')}" if vhost else ""
    return f"amqp://{who}@127.0.0.1:{server.port}{path}?exchange=secret-events"


async def test_users_and_vhosts_with_odd_characters(users: RabbitMQServer) -> None:
    broker = AmqpBroker(as_user(users, "re:lay", SECRET, "its own/vhost"), PATIENT)
    billing = await broker.receive(["orders"], consumer="billing")
    assert await broker.send([make_message()]) == [Delivered()]
    assert len(await take(billing, 1)) == 1
    await billing.close()
    await broker.close()
    extra = {"user": "re:lay", "password": SECRET}
    broker = AmqpBroker(f"amqp://127.0.0.1:{users.port}", BrokerOptions(extra=extra))
    await broker.ping()
    await broker.close()


async def test_an_exchange_that_may_not_be_written_to(users: RabbitMQServer) -> None:
    broker = AmqpBroker(as_user(users, "re:lay", SECRET), PATIENT)
    for outcome in await broker.send(make_messages(3)):
        assert isinstance(outcome, Unknown)
        assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    await broker.close()


async def test_a_wrong_password_shows_no_password(
    users: RabbitMQServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    broker = AmqpBroker(as_user(users, "somebody", "canary-password"), PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    with pytest.raises(Unreachable) as pinged:
        await broker.ping()
    with pytest.raises(Unreachable) as received:
        await broker.receive(["orders"], consumer="billing")
    await broker.close()
    shown = capfd.readouterr()
    errors = f"{pinged.value!r}{received.value!r}{received.value.__cause__!r}"
    assert "canary" not in f"{outcome}{errors}{broker!r}{broker._address}{caplog.text}{shown}"


async def test_tls_with_a_certificate_of_our_own(rabbitmq_server: RabbitMQServer) -> None:
    rabbitmq_server.require_private()
    certificate, key = make_certificate()
    port = free_port()
    config = f"""
listeners.ssl.default = 127.0.0.1:{port}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.verify = verify_none
max_message_size = 1000000
"""
    with RabbitMQServer(config=config, fsync=False):
        url = f"amqps://guest:guest@127.0.0.1:{port}?exchange=events"
        broker = AmqpBroker(f"{url}&tls_ca={quote(certificate)}", PATIENT)

        async def reached() -> bool:
            await broker.ping()
            return True

        await eventually_async(reached, 30, retry=(Unreachable,))
        billing = await broker.receive(["orders"], consumer="billing")
        assert await broker.send([make_message()]) == [Delivered()]
        assert len(await take(billing, 1)) == 1
        stranger = AmqpBroker(url, PATIENT)
        (outcome,) = await stranger.send([make_message()])
        assert isinstance(outcome, Transient)
        assert outcome.code == "unreachable"
        assert "CERTIFICATE_VERIFY_FAILED" in outcome.text
        # The same server takes no more than a megabyte: what is larger is found out, and alone.
        batch = [make_message(), make_message(b"x" * 1_200_000), make_message()]
        assert isinstance((await broker.send(batch))[1], Permanent)
        fine, large, too = await broker.send(batch)
        assert fine == too == Delivered()
        assert isinstance(large, Permanent)
        assert large.code == "too_large"
        await billing.close()
        await broker.close()
        await stranger.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://localhost", "amqp://localhost:5672"),
        ("amqp://", "amqp://localhost:5672"),
        ("amqp://u:p%40ss@a:7000/v?exchange=x", "amqp://a:7000/v"),
        ("amqps://token@[::1]/", "amqps://[::1]:5671/"),
        ("amqp://a?password=canary", "amqp://a:5672"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert repr(AmqpBroker(url)) == shown


@pytest.mark.parametrize(
    "url",
    [
        "amqp://user:s3cr3t@host:port",
        "amqp://user:s3cr3t@host?exchnge=a",
        "amqp://user:s3cr3t@host?queue_type=stream",
        "amqp://user:s3cr3t@host?prefetch=0",
        "amqp://user:s3cr3t@host?max_outstanding=no",
        "amqp://user:s3cr3t@host?tls_ca=/a",
        "amqps://user:s3cr3t@host?tls_ca=/nowhere",
    ],
)
def test_bad_settings_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AmqpBroker(url)
    assert "s3cr3t" not in str(caught.value)


# ── Processes ──────────────────────────────────────────────────────────────────────────────────


def test_one_broker_on_two_loops_and_in_a_forked_child(rabbitmq_server: RabbitMQServer) -> None:
    script = """
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[2])
        from helpers_messages import make_messages
        from postroom.brokers import BrokerOptions, Delivered
        from postroom.brokers.amqp import open_broker

        broker = open_broker(sys.argv[1] + "?exchange=forked", BrokerOptions())

        async def first():
            await (await broker.receive(["forked"], consumer="billing")).close()
            await send()

        async def send():
            assert await broker.send(make_messages(50, topic="forked")) == [Delivered()] * 50

        asyncio.run(first())
        asyncio.run(send())
        child = os.fork()
        asyncio.run(send())
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        asyncio.run(send())
        print("ok")
    """
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), rabbitmq_server.url, tests],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiormq", None)
    with pytest.raises(MissingDriver, match=r"pip install 'postroom\[amqp\]'"):
        AmqpBroker("amqp://localhost")


def test_importing_the_broker_imports_no_client() -> None:
    check = "import sys, postroom.brokers.amqp; print('aiormq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
