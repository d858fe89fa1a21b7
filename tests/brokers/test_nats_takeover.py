"""Taking a stream of NATS over while its server is slow: the order does not depend on its speed.

A consumer that is paused at the server stands for a slow one: pulls end by their time, and nothing
is delivered, though everything that was refused waits for redelivery.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

from helpers import eventually_async
from helpers_messages import make_messages
from helpers_receiving import ids
from postroom.brokers import BrokerOptions, Delivered, Delivery, Subscription
from postroom.brokers.nats import NatsBroker
from postroom.errors import Unreachable
from postroom.messages import Message, new_id
from proxy import ChaosProxy, Direction, Link
from servers import NatsServer

ACK_WAIT_SECONDS = 12
OPTIONS = BrokerOptions(send_timeout_seconds=5.0, extra={"ack_wait_seconds": str(ACK_WAIT_SECONDS)})
STALL_SECONDS = 0.7


class Gate(ChaosProxy):
    """Holds back the first pull that follows a refusal: the one that collects what others left."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.refused = self.reached = False

    def _new_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        return _GateLink(self, self._target, self._flowing, self._losses, reader, writer)


class _GateLink(Link):
    def __init__(self, gate: Gate, *rest: Any) -> None:
        self._gate = gate
        super().__init__(*rest)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        while data := await reader.read(65536):
            if direction == "to_server" and not self._gate.reached:
                self._gate.refused |= b"-NAK" in data
                if self._gate.refused and b"MSG.NEXT" in data:
                    self._flowing[direction].clear()
                    self._gate.reached = True
            await self._flowing[direction].wait()
            writer.write(data)
            await writer.drain()


class Stage:
    """A stream whose first receiver has unacknowledged messages, and a second one behind a gate."""

    def __init__(self, server: NatsServer, gate: Gate, client: Any) -> None:
        self.topic = f"t{new_id()}"
        self.broker = NatsBroker(server.url, OPTIONS)
        self.gate, self._client = gate, client
        self._behind = NatsBroker(gate.url, OPTIONS)
        self._opened: list[Subscription] = []

    async def begin(self) -> None:
        config = StreamConfig(name=self.topic, subjects=[self.topic])
        await self._client.jetstream().add_stream(config)

    async def end(self) -> None:
        await asyncio.to_thread(self.gate.thaw)
        for subscription in self._opened:
            await subscription.close()
        await self._behind.close()
        await self.broker.close()
        await self._client.jetstream().delete_stream(self.topic)

    async def send(self, count: int) -> list[Message]:
        sent = make_messages(count, topic=self.topic, keys=1)
        assert set(await self.broker.send(sent)) == {Delivered()}
        return sent

    async def receive(self, *, behind: bool = False) -> Subscription:
        broker = self._behind if behind else self.broker
        opened = await broker.receive([self.topic], consumer="billing")
        self._opened.append(opened)
        return opened

    async def leave_to_the_next(self, first: Subscription, hand: list[Delivery]) -> None:
        """The first receiver dies, and its messages are up for redelivery, the latest first."""
        await first._link.close()  # type: ignore[attr-defined]
        first._closed = True  # type: ignore[attr-defined]
        for each in reversed(hand):
            await self.refuse(each)
        await self.ask("UNPIN", {"group": "postroom"})

    async def ask(self, what: str, body: object = None) -> dict[str, Any]:
        subject = f"$JS.API.CONSUMER.{what}.{self.topic}.postroom-billing"
        data = b"" if body is None else json.dumps(body).encode()
        answer = dict(json.loads((await self._client.request(subject, data, timeout=10)).data))
        assert "error" not in answer, answer
        return answer

    async def stall(self, seconds: float = STALL_SECONDS) -> None:
        until = datetime.now(UTC) + timedelta(seconds=seconds)
        await self.ask("PAUSE", {"pause_until": until.isoformat()})

    async def refuse(self, delivery: Delivery) -> None:
        await self._client.request(delivery.receipt.subject, b"-NAK")

    async def delete(self, delivery: Delivery) -> None:
        await self._client.jetstream().delete_msg(self.topic, delivery.receipt.sequence)

    async def acknowledge(self, delivery: Delivery) -> None:
        await self._client.request(delivery.receipt.subject, b"+ACK")


@pytest.fixture
async def stage(nats_server: NatsServer) -> AsyncIterator[Stage]:
    with Gate(nats_server.url) as gate:
        async with await nats.connect(nats_server.url) as client:
            made = Stage(nats_server, gate, client)
            await made.begin()
            yield made
            await made.end()


async def take(subscription: Subscription, count: int, *, most: int = 1) -> list[Delivery]:
    came: list[Delivery] = []

    async def enough() -> bool:
        came.extend(await subscription.take(min(most, count - len(came))))
        return len(came) >= count

    await eventually_async(enough, 60, interval=0)
    return came


async def test_a_pull_that_ends_without_messages_is_no_end_of_what_others_left(
    stage: Stage,
) -> None:
    first = await stage.receive()
    sent = await stage.send(12)
    await stage.leave_to_the_next(first, await take(first, 10))
    second = await stage.receive(behind=True)
    taking = asyncio.create_task(take(second, 12))
    await eventually_async(lambda: stage.gate.reached, 30)
    await stage.stall()
    await asyncio.to_thread(stage.gate.thaw)
    assert ids(await taking) == ids(sent)


async def test_what_was_given_back_is_waited_for_while_the_server_is_slow(stage: Stage) -> None:
    """Longer than a receiver waits before it looks whether the stream still has them."""
    subscription = await stage.receive()
    sent = await stage.send(8)
    hand = await take(subscription, 6)
    await stage.stall(4.0)
    for each in reversed(hand[2:]):
        await stage.refuse(each)  # the latest is redelivered first
    await subscription.give_back(hand[2:])
    assert ids(await take(subscription, 6)) == ids(sent[2:])


async def test_acknowledgements_of_the_one_before_us_do_not_stand_for_what_is_missing(
    stage: Stage,
) -> None:
    first = await stage.receive()
    sent = await stage.send(12)
    hand = await take(first, 10)
    await stage.leave_to_the_next(first, hand)
    second = await stage.receive(behind=True)
    taking = asyncio.create_task(take(second, 9))
    await eventually_async(lambda: stage.gate.reached, 30)
    await stage.stall()
    for each in hand[3:6]:
        await stage.acknowledge(each)
    await asyncio.to_thread(stage.gate.thaw)
    assert ids(await taking) == ids(sent[:3] + sent[6:])


async def test_what_the_stream_removes_meanwhile_is_not_waited_for(stage: Stage) -> None:
    first = await stage.receive()
    sent = await stage.send(12)
    hand = await take(first, 10)
    await stage.leave_to_the_next(first, hand)
    second = await stage.receive(behind=True)
    loop = asyncio.get_running_loop()
    taking = asyncio.create_task(take(second, 9))
    await eventually_async(lambda: stage.gate.reached, 30)
    for each in hand[:3]:
        await stage.delete(each)
    began = loop.time()
    await asyncio.to_thread(stage.gate.thaw)
    assert ids(await taking) == ids(sent[3:])
    assert loop.time() - began < ACK_WAIT_SECONDS  # it did not wait until their time ran out


class Lingering(ChaosProxy):
    """Can drop its clients and leave their connections to the server open, as a load balancer may
    do for a while: the server goes on sending there."""

    def _new_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        return _LingeringLink(self._target, self._flowing, self._losses, reader, writer)

    def drop_clients(self) -> None:
        self._run(self._drop())

    async def _drop(self) -> None:
        for link in self._links:
            link.drop_client()  # type: ignore[attr-defined]


class _LingeringLink(Link):
    dropped = False

    def drop_client(self) -> None:
        self.dropped = True
        self._client[1].transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        try:
            while data := await reader.read(65536):
                if not self.dropped:
                    writer.write(data)
        except OSError:
            pass
        if self.dropped:
            await asyncio.Event().wait()  # until the proxy is closed


async def test_a_pull_of_an_earlier_connection_takes_nothing_away(
    nats_server: NatsServer,
) -> None:
    """It stands at the server for up to a second, when the receiver may have connected again."""
    loop = asyncio.get_running_loop()
    with Lingering(nats_server.url) as proxy, Gate(nats_server.url) as gate:
        async with await nats.connect(nats_server.url) as client:
            stage = Stage(nats_server, gate, client)
            await stage.begin()
            broker = NatsBroker(proxy.url, OPTIONS)
            subscription = await broker.receive([stage.topic], consumer="billing")
            for _ in range(3):
                (one,) = await stage.send(1)
                assert ids(await take(subscription, 1, most=20)) == [one.id]
                waiting = asyncio.create_task(subscription.take(20))
                await asyncio.sleep(0.2)  # its pull stands at the server
                await asyncio.to_thread(proxy.drop_clients)
                with pytest.raises(Unreachable):
                    await waiting
                sending = asyncio.create_task(_send_one_by_one(stage, 60))
                began = loop.time()
                came = await take(subscription, 61, most=20)
                assert ids(came) == [one.id, *ids(await sending)]
                assert loop.time() - began < ACK_WAIT_SECONDS
                await subscription.ack(came)
            await subscription.close()
            await broker.close()
            await stage.end()


async def _send_one_by_one(stage: Stage, count: int) -> list[Message]:
    """While the receiver connects, takes over, and receives."""
    sent: list[Message] = []
    for _ in range(count):
        sent += await stage.send(1)
        await asyncio.sleep(0.01)
    return sent
