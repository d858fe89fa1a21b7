"""What only NATS does when receiving: streams, pins, servers that stand still, durables that go."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from helpers import eventually_async
from helpers_messages import make_message, make_messages
from postroom.brokers import (
    BrokerOptions,
    CanExamine,
    CanReceive,
    Delivered,
    Delivery,
    Subscription,
    nats_durable,
    nats_source,
)
from postroom.brokers.nats import NatsBroker
from postroom.brokers.nats_examine import dangers
from postroom.brokers.nats_tray import Receipt, Recovery, Tray, durable_name, pieces
from postroom.brokers.receiving import delivery
from postroom.errors import ConfigurationError, InvalidMessage, Unreachable
from postroom.messages import Message, new_id
from proxy import ChaosProxy
from servers import NatsServer

QUICK = BrokerOptions(send_timeout_seconds=5.0, extra={"ack_wait_seconds": "3"})


class Shelf:
    """Streams of our own, a broker, and the subscriptions that a test opens."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.topic = f"t{new_id()}"
        self.broker = NatsBroker(server.url, QUICK)
        self.opened: list[Subscription] = []
        self._streams: list[str] = []

    async def make(self, topic: str | None = None, **how: Any) -> str:
        topic = topic or self.topic
        async with await nats.connect(self.server.url) as client:
            how = {"subjects": [topic]} | how
            await client.jetstream().add_stream(StreamConfig(name=topic, **how))
        self._streams.append(topic)
        return topic

    async def send(self, messages: list[Message]) -> None:
        assert set(await self.broker.send(messages)) == {Delivered()}

    async def receive(self, *topics: str, consumer: str = "billing") -> Subscription:
        subscription = await self.broker.receive(topics or (self.topic,), consumer=consumer)
        self.opened.append(subscription)
        return subscription

    async def consumer(self, name: str = "billing") -> dict[str, Any]:
        async with await nats.connect(self.server.url) as client:
            subject = f"$JS.API.CONSUMER.INFO.{self.topic}.postroom-{name}"
            return dict(json.loads((await client.request(subject)).data))

    async def end(self) -> None:
        for subscription in self.opened:
            await subscription.close()
        await self.broker.close()
        async with await nats.connect(self.server.url) as client:
            for stream in self._streams:
                await client.jetstream().delete_stream(stream)


@pytest.fixture
async def shelf(nats_server: NatsServer) -> AsyncIterator[Shelf]:
    made = Shelf(nats_server)
    yield made
    await made.end()


async def get(subscription: Subscription, count: int, *, most: int = 100) -> list[Delivery]:
    got: list[Delivery] = []

    async def enough() -> bool:
        got.extend(await subscription.take(min(most, count - len(got))))
        return len(got) >= count

    await eventually_async(enough, 60, interval=0)
    return got


def ids(messages: Any) -> list[str]:
    return [each.id for each in messages]


# ── Streams ────────────────────────────────────────────────────────────────────────────────────


async def test_a_missing_stream_says_how_to_make_one(shelf: Shelf) -> None:
    await shelf.make()
    with pytest.raises(ConfigurationError) as caught:
        await shelf.receive(shelf.topic, "nowhere.to-be-found")
    text = str(caught.value)
    assert "no JetStream stream captures subject nowhere.to-be-found" in text
    assert "nats stream add --subjects nowhere.to-be-found" in text
    assert isinstance(shelf.broker, CanReceive)


async def test_a_server_that_is_not_there(unused_tcp_port: int) -> None:
    broker = NatsBroker(f"nats://me:canary@127.0.0.1:{unused_tcp_port}", QUICK)
    with pytest.raises(Unreachable, match="cannot connect to NATS") as caught:
        await broker.receive(["orders"], consumer="billing")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("topic", ["a b", "orders.>", "", "a\r\nPUB x 0\r\n"])
async def test_a_topic_is_a_name(shelf: Shelf, topic: str) -> None:
    with pytest.raises(InvalidMessage, match="bad topic"):
        await shelf.receive(topic)


async def test_several_topics_in_several_streams(shelf: Shelf) -> None:
    base = shelf.topic
    both = await shelf.make(f"{base}-a", subjects=[f"{base}.a.*"])
    alone = await shelf.make(f"{base}-b", subjects=[f"{base}.b"])
    topics = [f"{base}.a.1", f"{base}.a.2", f"{base}.b"]
    subscription = await shelf.receive(*topics)
    sent = [make_message(topic=topics[n % 3], key="k") for n in range(30)]
    await shelf.send([*sent, make_message(topic=f"{base}.a.3")])
    came = await get(subscription, 30, most=4)
    assert sorted(ids(came)) == sorted(ids(sent))
    assert {(each.source, each.topic) for each in came} == {
        (both, topics[0]),
        (both, topics[1]),
        (alone, topics[2]),
    }
    for source in (both, alone):
        mine = [each.id for each in came if each.source == source]
        assert mine == [m.id for m in sent if m.id in mine]
    await subscription.ack(came)
    assert await subscription.take(10) == []


async def test_topics_of_a_consumer_may_change(shelf: Shelf) -> None:
    base = shelf.topic
    await shelf.make(base, subjects=[f"{base}.*"])
    first = await shelf.receive(f"{base}.a")
    await shelf.send([make_message(topic=f"{base}.{name}") for name in "ab"])
    await first.ack(await get(first, 1))
    await first.close()
    second = await shelf.receive(f"{base}.a", f"{base}.b")
    await shelf.send([make_message(topic=f"{base}.{name}") for name in "ba"])
    assert [each.topic[-1] for each in await get(second, 3)] == ["b", "b", "a"]


async def test_a_workqueue_has_one_consumer(shelf: Shelf) -> None:
    await shelf.make(retention=RetentionPolicy.WORK_QUEUE)
    await shelf.receive()
    with pytest.raises(ConfigurationError, match="does not let postroom-other receive") as caught:
        await shelf.receive(consumer="other")
    assert "retention" in str(caught.value)


async def test_a_deleted_durable_is_made_again(shelf: Shelf) -> None:
    await shelf.make()
    subscription = await shelf.receive()
    sent = make_messages(3, topic=shelf.topic)
    await shelf.send(sent)
    (before, *_) = await get(subscription, 3)
    async with await nats.connect(shelf.server.url) as client:
        await client.jetstream().delete_consumer(shelf.topic, "postroom-billing")
    again = await get(subscription, 3)
    assert ids(again) == ids(sent)
    assert again[0].claim > before.claim


async def test_a_deleted_stream_is_a_broker_that_is_lost(shelf: Shelf) -> None:
    await shelf.make()
    subscription = await shelf.receive()
    async with await nats.connect(shelf.server.url) as client:
        await client.jetstream().delete_stream(shelf.topic)

    async def told() -> bool:
        with pytest.raises(Unreachable, match=shelf.topic):
            await subscription.take(1)
        return True

    await eventually_async(told, 30, retry=(pytest.fail.Exception,))
    async with await nats.connect(shelf.server.url) as client:
        await client.jetstream().add_stream(name=shelf.topic, subjects=[shelf.topic])
    await shelf.send(make_messages(2, topic=shelf.topic))
    got: list[Delivery] = []

    async def here() -> bool:
        got.extend(await subscription.take(2))
        return len(got) == 2

    await eventually_async(here, 30, retry=(Unreachable,))


# ── Order ──────────────────────────────────────────────────────────────────────────────────────


async def test_what_was_given_back_and_deleted_holds_nothing_up(shelf: Shelf) -> None:
    await shelf.make()
    subscription = await shelf.receive()
    sent = make_messages(6, topic=shelf.topic)
    await shelf.send(sent)
    hand = await get(subscription, 3)
    async with await nats.connect(shelf.server.url) as client:
        await client.jetstream().delete_msg(shelf.topic, hand[1].receipt.sequence)
    await subscription.give_back(hand)
    again = await get(subscription, 5)
    assert ids(again) == [id for id in ids(sent) if id != hand[1].id]


async def test_a_copy_of_what_is_in_hand_is_not_handed_out(shelf: Shelf) -> None:
    """The time of three messages runs out while the pin is kept: they are still being handled."""
    await shelf.make()
    subscription = await shelf.receive()
    sent = make_messages(5, topic=shelf.topic)
    await shelf.send(sent[:3])
    hand = await get(subscription, 3)
    later: list[Delivery] = []

    async def redelivered() -> bool:
        later.extend(await subscription.take(10))
        return bool((await shelf.consumer())["num_redelivered"])

    await eventually_async(redelivered, 30)
    await shelf.send(sent[3:])
    later += await get(subscription, 2)
    assert ids(later) == ids(sent[3:])
    await subscription.ack(hand + later)
    assert await subscription.take(1) == []
    info = await shelf.consumer()
    assert (info["num_ack_pending"], info["num_pending"]) == (0, 0)


async def test_what_was_acknowledged_out_of_order_is_not_asked_back(shelf: Shelf) -> None:
    await shelf.make()
    first = await shelf.receive()
    sent = make_messages(400, topic=shelf.topic, keys=1)
    await shelf.send(sent)
    hand = await get(first, 300)
    left = [hand[0], hand[77], hand[150]]
    await first.ack([each for each in hand if each not in left])
    await first.close()
    second = await shelf.receive()
    came = await get(second, 103)
    assert ids(came) == ids(left) + ids(sent[300:])


async def test_most_is_kept_and_nothing_piles_up(shelf: Shelf) -> None:
    await shelf.make()
    sent = make_messages(300, topic=shelf.topic, keys=300)
    await shelf.send(sent)
    subscription = await shelf.receive()
    hand: list[Delivery] = []
    for _ in range(5):
        hand += await get(subscription, 10, most=10)
    assert len(set(ids(hand))) == 50
    assert (await shelf.consumer())["num_ack_pending"] <= 60
    await subscription.ack(hand)
    assert ids(await get(subscription, 250)) == ids(sent)[50:]


async def test_a_gap_too_wide_to_ask_back_is_waited_for(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_source, "MOST_REFUSALS", 2)
    await shelf.make()
    first = await shelf.receive()
    sent = make_messages(20, topic=shelf.topic, keys=1)
    await shelf.send(sent)
    await get(first, 10)
    # It dies without a word.
    await first._link.close()  # type: ignore[attr-defined]
    first._closed = True  # type: ignore[attr-defined]
    second = await shelf.receive()
    assert ids(await get(second, 20)) == ids(sent)


async def test_a_zombie_that_acknowledges_confuses_nobody(shelf: Shelf) -> None:
    """The one before us wakes up and says yes, while we collect what it had."""
    await shelf.make()
    first, second = await shelf.receive(), await shelf.receive()
    sent = make_messages(200, topic=shelf.topic, keys=1)
    await shelf.send(sent)
    stale = await get(first, 150)
    came: list[Delivery] = []

    async def wake() -> None:
        while not came:
            await first.ack(stale[:1])
            stale.pop(0)
            await asyncio.sleep(0.05)

    waking = asyncio.create_task(wake())

    async def all_here() -> bool:
        taken = await second.take(50)
        came.extend(taken)
        await second.ack(taken)
        return sent[-1].id in ids(came)

    await eventually_async(all_here, 60, interval=0)
    await waking
    assert ids(came) == ids(sent)[-len(came) :]


@pytest.mark.parametrize("name", ["nats-pin-id", "NATS-PIN-ID", "Nats-Pin-Id"])
async def test_a_pin_of_the_publishers_own_is_not_the_servers(shelf: Shelf, name: str) -> None:
    await shelf.make()
    async with await nats.connect(shelf.server.url) as client:
        stream = client.jetstream()
        await stream.publish(shelf.topic, b"one")
        await stream.publish(shelf.topic, b"two", headers={name: "mine"})
        await stream.publish(shelf.topic, b"three")
    subscription = await shelf.receive()
    async with asyncio.timeout(20):
        found = await get(subscription, 3)
    assert [each.payload for each in found] == [b"one", b"two", b"three"]
    assert len({each.claim for each in found}) == 1


async def test_without_pins_one_message_is_out_at_a_time(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with servers before 2.11."""
    monkeypatch.setattr(nats_durable, "_can_pin", lambda _: False)
    await shelf.make()
    first, second = await shelf.receive(), await shelf.receive()
    assert not first.exclusive
    sent = make_messages(20, topic=shelf.topic, keys=1)
    await shelf.send(sent)
    came: list[Delivery] = []
    for number in range(20):
        receiver, other = (first, second) if number % 3 else (second, first)
        (one,) = await get(receiver, 1, most=5)
        came.append(one)
        if number == 5:
            assert await other.take(1) == []
        if number == 7:
            await receiver.give_back([one])
            (one,) = await get(receiver, 1)
            assert one.id == came[-1].id
        await receiver.ack([one])
    assert ids(came) == ids(sent)
    monkeypatch.undo()
    third = await shelf.receive()
    assert not third.exclusive  # a durable cannot be changed into one that pins
    (sentence,) = [s for s in await shelf.broker.examine([shelf.topic]) if "postroom-billing" in s]
    assert "one message at a time" in sentence


# ── Servers that stand still, other loops, other users ─────────────────────────────────────────


async def test_a_server_that_stands_still_is_told_and_outlived(shelf: Shelf) -> None:
    shelf.server.require_private()
    await shelf.make()
    subscription = await shelf.receive()
    sent = make_messages(10, topic=shelf.topic)
    await shelf.send(sent)
    hand = await get(subscription, 4)

    async def take_until_it_fails() -> None:
        while True:
            await subscription.take(10)

    with shelf.server.paused(), pytest.raises(Unreachable):
        await asyncio.wait_for(take_until_it_fails(), 60)
    came: list[Delivery] = []

    async def all_here() -> bool:
        came.extend(await subscription.take(10))
        return {m.id for m in sent} <= set(ids(came))

    await eventually_async(all_here, 60, retry=(Unreachable,))
    again = [each for each in came if each.claim > hand[0].claim]
    assert ids(again)[-10:] == ids(sent)


async def test_closed_while_it_connects_it_leaves_no_connection(shelf: Shelf) -> None:
    await shelf.make()
    with ChaosProxy(shelf.server.url) as proxy:
        broker = NatsBroker(proxy.url, BrokerOptions(send_timeout_seconds=20.0))
        first = await broker.receive([shelf.topic], consumer="billing")
        await asyncio.to_thread(proxy.cut)
        await eventually_async(lambda: proxy.connections == 0)
        await asyncio.to_thread(proxy.freeze, "to_client")

        async def take_until_closed() -> None:
            while True:
                try:
                    await first.take(1)
                except Unreachable as error:
                    if "closed" in str(error):
                        return

        taking = asyncio.create_task(take_until_closed())
        await eventually_async(lambda: proxy.connections == 1)
        await first.close()
        await asyncio.to_thread(proxy.thaw)
        await taking
        await eventually_async(lambda: proxy.connections == 0)
        await broker.close()


async def test_on_another_loop_it_connects_anew(shelf: Shelf) -> None:
    await shelf.make()
    subscription = await shelf.receive()
    sent = make_messages(6, topic=shelf.topic)
    await shelf.send(sent)
    await subscription.ack((await get(subscription, 3))[:2])
    found: list[Delivery] = []

    async def elsewhere() -> None:
        found.extend(await get(subscription, 4))
        await subscription.ack(found)
        await asyncio.sleep(0.2)
        subscription._link.discard()  # type: ignore[attr-defined]

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert ids(found) == ids(sent[2:])


async def test_after_a_fork_the_child_connects_anew(shelf: Shelf) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("there is no fork here")
    await shelf.make()
    subscription = await shelf.receive()
    sent = make_messages(6, topic=shelf.topic)
    await shelf.send(sent)
    hand = await get(subscription, 2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover  the child
        code = 1
        try:
            asyncio.events._set_running_loop(None)
            loop = asyncio.new_event_loop()
            came = loop.run_until_complete(get(subscription, 6))
            os.write(writer, json.dumps(ids(came)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert status == 0
    assert json.loads(os.read(reader, 10_000)) == ids(sent)
    os.close(reader)
    assert hand[0].claim == 2  # opened, then pinned


# ── doctor ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_good_stream_gets_only_the_hint_about_copies(shelf: Shelf) -> None:
    await shelf.make()
    await shelf.receive()
    assert isinstance(shelf.broker, CanExamine)
    (hint,) = await shelf.broker.examine([shelf.topic])
    assert "has one copy" in hint


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"max_age": 3600}, "deletes messages after 60 minutes"),
        ({"max_msgs": 1000}, "drops its oldest messages, read or not, above 1,000 messages"),
        ({"max_bytes": 10_000_000}, "above 10,000,000 bytes; set discard to new"),
        ({"max_msgs_per_subject": 1}, "keeps the last 1 messages of a subject only"),
        ({"retention": RetentionPolicy.INTEREST}, "interest retention and drops"),
        ({"retention": RetentionPolicy.WORK_QUEUE}, "one consumer only"),
        ({"duplicate_window": 5}, "knows duplicates for 5 s"),
        ({"storage": StorageType.MEMORY}, "kept in memory"),
        ({"no_ack": True}, "answers nobody"),
    ],
)
async def test_what_could_lose_messages_is_named(
    shelf: Shelf, how: dict[str, Any], said: str
) -> None:
    await shelf.make(**how)
    found = await shelf.broker.examine([shelf.topic])
    assert len(found) == 2
    assert f"stream {shelf.topic} " in found[0]
    assert said in found[0]


async def test_limits_that_refuse_are_no_danger(shelf: Shelf) -> None:
    await shelf.make(max_msgs=10, max_bytes=1_000_000, discard=DiscardPolicy.NEW)
    assert len(await shelf.broker.examine([shelf.topic])) == 1


async def test_a_topic_without_a_stream_is_named(shelf: Shelf) -> None:
    (found,) = await shelf.broker.examine([shelf.topic])
    assert f"no JetStream stream captures subject {shelf.topic}" in found


def test_a_stream_of_three_copies_is_fine() -> None:
    config = {"name": "S", "num_replicas": 3, "duplicate_window": 120_000_000_000}
    assert dangers({"config": config}) == []


# ── The pure rules ─────────────────────────────────────────────────────────────────────────────

OLD = "$JS.ACK.ORDERS.postroom-billing.2.17.30.1700000000000000000.5"
NEW = "$JS.ACK.hub.ACCHASH.ORDERS.postroom-billing.2.17.30.1700000000000000000.5.token"


@pytest.mark.parametrize("subject", [OLD, NEW])
def test_receipts_are_read(subject: str) -> None:
    receipt = Receipt.of(subject)
    assert receipt is not None
    assert (receipt.stream, receipt.durable) == ("ORDERS", "postroom-billing")
    assert (receipt.deliveries, receipt.sequence) == (2, 17)
    assert receipt.unnamed == "ORDERS:17:1700000000000000000"
    other = Receipt.of(receipt.of_another(99, 100))
    assert other is not None
    assert other[1:5] == ("ORDERS", "postroom-billing", 1, 99)


@pytest.mark.parametrize("subject", ["", "$JS.ACK.a", "x.y", OLD.replace("17", "x"), "_INBOX.1.2"])
def test_what_is_no_receipt(subject: str) -> None:
    assert Receipt.of(subject) is None


def test_names_of_durables() -> None:
    assert durable_name("billing") == "postroom-billing"
    names = {durable_name(name) for name in ("a.b", "a/b", "a b", "a_b", "ä", "x" * 200, "x" * 201)}
    assert len(names) == 7
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in names)
    with pytest.raises(ConfigurationError):
        durable_name("")


def test_pieces_of_a_gap() -> None:
    assert list(pieces(3, 3, 2)) == []
    assert [list(piece) for piece in pieces(3, 8, 2)] == [[4, 5], [6, 7], [8]]


def _delivery(sequence: int) -> Delivery:
    return delivery(
        {}, b"", topic="t", source="s", claim=1, receipt=sequence, unnamed=str(sequence)
    )


def test_a_tray_waits_for_what_comes_back() -> None:
    tray = Tray()
    for sequence in range(1, 6):
        tray.arrive(sequence, _delivery(sequence))
    assert [each.receipt for each in tray.hand_out(3)] == [1, 2, 3]
    assert tray.give_back(2)
    assert not tray.give_back(2)
    assert not tray.ready
    assert tray.hand_out(5) == []
    tray.arrive(2, _delivery(2))
    assert [each.receipt for each in tray.hand_out(5)] == [2, 4, 5]
    assert tray.give_back(5)
    tray.expect_no_more(tray.returning)
    tray.arrive(6, _delivery(6))
    assert [each.receipt for each in tray.hand_out(5)] == [6]


@settings(deadline=None)
@given(st.data())
def test_a_tray_never_hands_out_past_what_is_coming_back(data: Any) -> None:
    """Messages 1 to 12 are delivered by a server that redelivers in any order."""
    tray = Tray()
    next_new, queue, hand, done = 1, [], [], set()  # type: ignore[var-annotated]
    seen: list[int] = []
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["deliver", "take", "ack", "give back"]))
        if step == "deliver" and queue:
            sequence = queue.pop(data.draw(st.integers(0, len(queue) - 1)))
            tray.arrive(sequence, _delivery(sequence))
        elif step == "deliver" and next_new <= 12:
            tray.arrive(next_new, _delivery(next_new))
            next_new += 1
        elif step == "take":
            for each in tray.hand_out(data.draw(st.integers(1, 5))):
                sequence = each.receipt
                # All before it are done or in hand.
                assert set(range(1, sequence)) <= done | set(hand)
                assert sequence not in hand
                hand.append(sequence)
                seen.append(sequence)
        elif step == "ack" and hand:
            sequence = data.draw(st.sampled_from(hand))
            hand.remove(sequence)
            done.add(sequence)
            tray.done(sequence)
        elif step == "give back" and hand:
            # As a consumer does: from one on, all that is later too.
            least = data.draw(st.sampled_from(hand))
            for sequence in [each for each in hand if each >= least]:
                assert tray.give_back(sequence)
                hand.remove(sequence)
                queue.append(sequence)
    assert tray.in_hand == len(hand)


@settings(deadline=None)
@given(st.data())
def test_a_recovery_is_complete_when_everything_has_come_and_not_before(data: Any) -> None:
    """The server redelivers in any order and delivers new messages; any receiver acknowledges."""
    pending = set(data.draw(st.sets(st.integers(1, 10), min_size=1)))
    last, place = 10, 50
    recovery = Recovery(last, place, len(pending), frozenset())
    in_hand: set[int] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["redeliver", "copy", "new", "acknowledge"]))
        if step == "copy":  # sent before the count, and slow to arrive
            sequence = data.draw(st.integers(1, 10))
            recovery.arrive(_receipt(sequence, data.draw(st.integers(1, 50))))
        elif step == "acknowledge" and pending:
            pending.discard(data.draw(st.sampled_from(sorted(pending))))
        elif step in ("redeliver", "new"):
            choice = sorted(pending) if step == "redeliver" else [11, 12]
            if choice:
                place += 1
                sequence = data.draw(st.sampled_from(choice))
                recovery.arrive(_receipt(sequence, place))
                in_hand.add(sequence)
        if not recovery.missing:
            assert pending <= in_hand


def _receipt(sequence: int, place: int) -> Receipt:
    return Receipt("", "s", "d", 1, sequence, "0", place)
