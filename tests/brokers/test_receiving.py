"""What every broker that can receive must do, run on each; what only one does stands in a file of
its own. `tests/receiving_places.py` says what each of them is like."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from helpers import eventually_async
from helpers_messages import make_message, make_messages
from helpers_receiving import PATIENCE_SECONDS, Receiver, ids, in_order
from postroom.brokers import CanReceive, Delivery, Subscription
from postroom.errors import Unreachable
from receiving_places import PLACES, Place, places_with
from receiving_process import program


@pytest.fixture(params=list(PLACES))
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    kind = PLACES[request.param]
    made: Place = kind(request.getfixturevalue(kind.server)) if kind.server else kind()
    await made.begin()
    yield made
    await made.end()


@pytest.fixture
async def receive(place: Place) -> AsyncIterator[Any]:
    """`await receive("billing")`: a receiver for a consumer, closed in the end."""
    opened: list[Subscription] = []

    async def open_one(consumer: str = "billing", *topics: str) -> Receiver:
        subscription = await place.receive(consumer, topics)
        opened.append(subscription)
        return Receiver(subscription)

    yield open_one
    for subscription in opened:
        await subscription.close()


def on(*members: str) -> pytest.MarkDecorator:
    """Only on places that have these."""
    return pytest.mark.parametrize("place", places_with(*members), indirect=True)


async def next_is(receiver: Receiver, place: Place, key: str | None = None) -> None:
    """Nothing comes but what is sent now."""
    mark = make_message(b"mark", topic=place.topic, key=key)
    await place.send([mark])
    assert ids(await receiver.get(1, ack=True)) == [mark.id]


# ── What comes ─────────────────────────────────────────────────────────────────────────────────


async def test_it_can_receive(place: Place, receive: Any) -> None:
    receiver = await receive()
    assert isinstance(place.broker, CanReceive)
    assert isinstance(receiver.subscription, Subscription)
    assert receiver.subscription.exclusive is place.exclusive
    assert (receiver.subscription.extend_seconds is None) is (place.lease_seconds is None)
    await receiver.subscription.ack([])
    await receiver.subscription.give_back([])
    await receiver.subscription.extend([])
    assert await receiver.subscription.take(10) == []


async def test_order_per_key(place: Place, receive: Any) -> None:
    receiver = await receive()
    sent = make_messages(40, topic=place.topic, keys=4)
    await place.send(sent)
    came = await receiver.get(40, most=7, ack=True)
    assert sorted(ids(came)) == sorted(ids(sent))
    assert in_order(came, sent)


async def test_several_topics(place: Place, receive: Any) -> None:
    await place.make(place.topics[1])
    receiver = await receive("billing", *place.topics)
    sent = [make_message(topic=place.topics[n % 2], key=f"k{n % 3}") for n in range(24)]
    await place.send(sent)
    came = await receiver.get(24, most=5, ack=True)
    assert {each.id: each.topic for each in came} == {m.id: m.topic for m in sent}
    assert in_order(came, sent)


async def test_a_message_is_as_it_was_sent(place: Place, receive: Any) -> None:
    own = {
        "Greeting": "grüße, 世界 🌍",
        "empty": "",
        "payload": "a header of this name",
        "colons": "a: b: c",
        "X-Line": "a\u2028b",
        "ce-tenant": "Zoë, 100 %41",
    }
    message = make_message(
        b"\x00\xff{}",
        topic=place.topic,
        key="ключ 1 %",
        type="commande.passée.v1",
        aggregate_type="commande",
        aggregate_id="№ 7",
        content_type="text/x-odd",
        headers=own,
    )
    await place.send([message])
    receiver = await receive()
    (came,) = await receiver.get(1)
    assert (came.id, came.type, came.key) == (message.id, message.type, message.key)
    assert (came.topic, came.payload) == (place.topic, message.payload)
    assert (came.content_type, came.seen) == ("text/x-odd", 0)
    expected = {name.lower(): value for name, value in own.items()} | {
        "ce-specversion": "1.0",
        "ce-id": message.id,
        "ce-type": message.type,
        "ce-source": "the-shop",
        "ce-partitionkey": "ключ 1 %",
        "event_id": message.id,
        "event_type": message.type,
        "aggregate_type": "commande",
        "aggregate_id": "№ 7",
    }
    assert {name: came.headers.get(name) for name in expected} == expected
    assert not [name for name in came.headers if name != name.lower()]


async def test_empty_binary_and_large_payloads(place: Place, receive: Any) -> None:
    payloads = [b"", b"\x00\xff\r\n\r\nPUB other 0\r\n\r\n", b"\n\n", os.urandom(place.largest)]
    binary = "application/octet-stream"
    sent = [make_message(body, topic=place.topic, content_type=binary) for body in payloads]
    await place.send(sent)
    receiver = await receive()
    came = {each.id: each for each in await receiver.get(4)}
    assert [came[message.id].payload for message in sent] == payloads
    assert {each.key for each in came.values()} == {None}


@on("strangers")
async def test_a_message_of_a_stranger_has_a_lasting_id(place: Place, receive: Any) -> None:
    await place.send_bare(b"hello")
    await place.send_bare(b"hello")
    first = await receive()
    came = await first.get(2)
    assert [each.payload for each in came] == [b"hello"] * 2
    assert [each.type for each in came] == [""] * 2
    assert len(set(ids(came))) == 2
    assert all(ids(came))
    await first.subscription.give_back(came)
    assert sorted(ids(await first.get(2))) == sorted(ids(came))
    await first.subscription.close()
    if place.names_strangers:
        second = await receive()
        assert sorted(ids(await second.get(2))) == sorted(ids(came))


@on("strangers")
async def test_a_cloudevent_in_structured_mode(place: Place, receive: Any) -> None:
    event = {
        "specversion": "1.0",
        "id": "e-7",
        "source": "/the/mill",
        "type": "flour.ground.v1",
        "partitionkey": "mühle 7",
        "tenant": 7,
        "datacontenttype": "application/json",
        "data": {"bags": 3},
    }
    kind = "application/cloudevents+json; charset=UTF-8"
    await place.send_bare(json.dumps(event).encode(), kind)
    receiver = await receive()
    (came,) = await receiver.get(1, ack=True)
    assert (came.id, came.type, came.key) == ("e-7", "flour.ground.v1", "mühle 7")
    assert (came.payload, came.content_type) == (b'{"bags":3}', "application/json")
    assert (came.headers["ce-source"], came.headers["ce-tenant"]) == ("/the/mill", "7")


async def test_two_consumers_get_everything_each(place: Place, receive: Any) -> None:
    sent = make_messages(20, topic=place.topic, keys=3)
    billing, shipping = await receive("billing"), await receive("shipping")
    await place.send(sent)
    for receiver in (billing, shipping):
        came = await receiver.get(20, ack=True)
        assert sorted(ids(came)) == sorted(ids(sent))
        assert in_order(came, sent)


# ── Yes and no ─────────────────────────────────────────────────────────────────────────────────


async def test_what_is_acknowledged_does_not_come_again(place: Place, receive: Any) -> None:
    first = await receive()
    await place.send(make_messages(10, topic=place.topic))
    came = await first.get(10, ack=True)
    await first.subscription.ack(came[:3])  # once more does no harm
    await first.subscription.give_back(came[3:5])  # and done is done
    await next_is(first, place)
    await first.subscription.close()
    await next_is(await receive(), place)


async def test_what_is_not_acknowledged_comes_to_another(place: Place, receive: Any) -> None:
    first = await receive()
    sent = make_messages(10, topic=place.topic, keys=2)
    await place.send(sent)
    assert {each.seen for each in await first.get(6)} == {0}
    await first.subscription.close()
    second = await receive()
    came = await second.get(10, ack=True)
    assert sorted(ids(came)) == sorted(ids(sent))
    assert in_order(came, sent)
    if place.counts:
        assert min(each.seen for each in came if each.id in ids(first.came)) >= 1


async def test_later_ones_may_be_acknowledged_first(place: Place, receive: Any) -> None:
    first = await receive()
    sent = make_messages(10, topic=place.topic, keys=1)
    await place.send(sent)
    came = await first.get(10)
    await first.subscription.ack(came[7:])
    await first.subscription.ack([came[2], came[0]])
    await first.subscription.close()
    second = await receive()
    mark = make_message(topic=place.topic, key=sent[0].key)
    await place.send([mark])
    again: list[Delivery] = []
    while mark.id not in ids(again):
        again += await second.get(1, ack=True)
    left = ids([sent[1], *sent[3:7], mark])
    assert [id for id in ids(again) if id in left] == left
    assert sent[0].id not in ids(again)
    if place.acks_each:
        assert ids(again) == left


async def test_given_back_they_come_again_in_order(place: Place, receive: Any) -> None:
    receiver = await receive()
    sent = make_messages(20, topic=place.topic, keys=1)
    await place.send(sent)
    came = await receiver.get(8)
    await receiver.subscription.ack(came[:3])
    await receiver.subscription.give_back(came[3:])
    again = await receiver.get(17, ack=True)
    assert ids(again) == ids(sent[3:])
    assert {each.seen for each in again[:5]} == {1}


async def test_given_back_in_any_order_they_come_in_theirs(place: Place, receive: Any) -> None:
    receiver = await receive()
    sent = make_messages(10, topic=place.topic, keys=1)
    await place.send(sent)
    came = await receiver.get(10)
    for part in (came[7:], came[:3][::-1], came[3:7]):
        await receiver.subscription.give_back(part)
    assert ids(await receiver.get(10, ack=True)) == ids(sent)


async def test_given_back_twice_they_come_once(place: Place, receive: Any) -> None:
    receiver = await receive()
    sent = make_messages(6, topic=place.topic, keys=1)
    await place.send(sent)
    came = await receiver.get(6)
    await receiver.subscription.give_back([came[4], came[1], came[4]])
    await receiver.subscription.give_back(came)
    assert ids(await receiver.get(6, ack=True)) == ids(sent)
    await next_is(receiver, place, sent[0].key)


@on("exclusive")
async def test_what_stays_in_hand_does_not_come_with_the_others(place: Place, receive: Any) -> None:
    receiver = await receive()
    sent = make_messages(14, topic=place.topic, keys=1)
    await place.send(sent)
    came = await receiver.get(10)
    await receiver.subscription.give_back([came[n] for n in (7, 3, 9)])
    again = await receiver.get(7)
    assert ids(again) == ids([sent[n] for n in (3, 7, 9, 10, 11, 12, 13)])
    assert {each.claim for each in again} == {came[0].claim}
    assert [each.seen for each in again[:3]] == [1] * 3
    await receiver.subscription.give_back([again[1]])
    await receiver.subscription.give_back([came[2]])
    last = await receiver.get(2)
    assert ids(last) == ids([sent[2], sent[7]])
    assert [each.seen for each in last] == [1, 2]
    await receiver.subscription.ack([*came, *again])
    await next_is(receiver, place, sent[0].key)


async def test_what_waits_behind_them_does_not_pass_them(place: Place, receive: Any) -> None:
    receiver = await receive()
    sent = make_messages(40, topic=place.topic, keys=1)
    await place.send(sent)
    hand: list[Delivery] = []
    while not hand:
        hand = await receiver.subscription.take(20)
    await asyncio.sleep(0.2)  # what else was asked for arrives, and is not handed out
    await receiver.subscription.give_back(hand)
    assert ids(await receiver.get(40, ack=True)) == ids(sent)


@on("wakes")
async def test_giving_back_wakes_who_waits(place: Place, receive: Any) -> None:
    receiver = await receive()
    await place.send(make_messages(1, topic=place.topic))
    hand = await receiver.get(1)
    while True:
        waiting = asyncio.create_task(receiver.subscription.take(10))
        await asyncio.sleep(0.1)
        if not waiting.done():
            break
        assert await waiting == []  # we were too slow
    await receiver.subscription.give_back(hand)
    assert ids(await waiting) == ids(hand)


# ── Who has it ─────────────────────────────────────────────────────────────────────────────────


async def test_one_at_a_time_and_the_next_takes_over(place: Place, receive: Any) -> None:
    first = await receive()
    sent = make_messages(30, topic=place.topic, keys=3)
    await place.send(sent)
    came = await first.get(5)
    taken = {each.source if place.exclusive else each.key for each in came}
    second = await receive()
    async with first.holding(came):
        for _ in range(2):
            for each in await second.subscription.take(10):
                assert (each.source if place.exclusive else each.key) not in taken
                second.came.append(each)
        await first.subscription.ack(came[:1])
    await first.subscription.close()
    await second.until_came(set(ids(sent[1:])))
    assert in_order(second.came, sent)
    assert sent[0].id not in ids(second.came)


@on("lease_seconds")
async def test_extended_beyond_its_time_it_stays_ours(place: Place, receive: Any) -> None:
    first, second = await receive(), await receive()
    await place.send(make_messages(5, topic=place.topic, keys=5))
    hand = await first.get(5)
    assert place.lease_seconds is not None
    async with first.holding(hand):
        loop = asyncio.get_running_loop()
        until = loop.time() + 2 * place.lease_seconds
        while loop.time() < until:
            assert await second.subscription.take(1) == []
    await first.subscription.ack(hand)
    await first.subscription.close()
    await next_is(second, place)


async def test_close_loses_nothing_that_was_not_acknowledged(place: Place, receive: Any) -> None:
    first = await receive()
    sent = make_messages(30, topic=place.topic, keys=30)
    await place.send(sent)
    taken = await first.get(20)
    await first.subscription.ack(taken[:5])
    await first.subscription.close()
    await first.subscription.close()
    with pytest.raises(Unreachable, match="closed"):
        await first.subscription.take(1)
    second = await receive()
    await second.until_came(set(ids(sent)) - set(ids(taken[:5])))
    assert not set(ids(second.came)) & set(ids(taken[:5]))


async def test_close_ends_a_take_that_waits(place: Place, receive: Any) -> None:
    first = await receive()
    assert await first.subscription.take(1) == []
    waiting = asyncio.create_task(first.subscription.take(1))
    await asyncio.sleep(0.1)
    await first.subscription.close()
    (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert ended == [] or isinstance(ended, Unreachable), ended
    await next_is(await receive(), place)


async def test_a_cancelled_take_loses_nothing(place: Place, receive: Any) -> None:
    receiver = await receive()
    sent = make_messages(30, topic=place.topic, keys=3)
    sending = asyncio.create_task(place.send(sent))
    for number in range(12):
        taking = asyncio.create_task(receiver.subscription.take(2))
        await asyncio.sleep(0.01 * (number % 4))
        taking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            receiver.came += await taking
    await sending
    await receiver.until_came(set(ids(sent)))
    assert in_order(receiver.came, sent)


async def test_receiving_while_sending(place: Place, receive: Any) -> None:
    """Both sides at once, with a receiver that leaves half-way some of what it took."""
    first = await receive()
    sent = make_messages(600 // place.pace, topic=place.topic, keys=20)
    sending = asyncio.create_task(place.send(sent))
    while len(first.came) < len(sent) // 2:
        taken = await first.subscription.take(20)
        first.came += taken
        await first.subscription.ack(taken if len(first.came) < len(sent) // 3 else taken[:-3])
    await first.subscription.close()
    second = await receive()
    second.came = first.came
    await second.until_came(set(ids(sent)))
    await sending
    assert in_order(second.came, sent)


# ── Processes that die or stand still ──────────────────────────────────────────────────────────


@on("processes")
async def test_a_killed_process_gives_back_what_it_had(place: Place, receive: Any) -> None:
    sent = make_messages(20, topic=place.topic, keys=7)
    await place.send(sent)
    async with program(place) as other:
        acked = list(await other.took())[:2]
        other.send(signal.SIGKILL)
        left = [message for message in sent if message.id not in acked]
        receiver = await receive()
        await receiver.until_came(set(ids(left)))
    assert in_order(receiver.came, left)
    assert not set(ids(receiver.came)) & set(acked)


@on("processes")
async def test_a_frozen_process_is_taken_over_and_comes_back_with_a_greater_claim(
    place: Place, receive: Any
) -> None:
    sent = make_messages(20, topic=place.topic, keys=7)
    await place.send(sent)
    async with program(place) as other:
        stale = await other.took()
        other.send(signal.SIGSTOP)
        left = [message for message in sent if message.id not in list(stale)[:2]]
        receiver = await receive()
        await receiver.until_came(set(ids(left)))
        assert in_order(receiver.came, left)
        other.go_on()
        other.send(signal.SIGCONT)
        await receiver.subscription.close()
        mark = make_message(topic=place.topic)
        await place.send([mark])
        came: dict[str, int] = {}

        async def is_back() -> bool:
            came.update(await other.took())
            return mark.id in came

        await eventually_async(is_back, PATIENCE_SECONDS, interval=0)
    if place.exclusive:
        assert came[mark.id] > max(stale.values())


# ── Broken servers ─────────────────────────────────────────────────────────────────────────────


async def test_a_server_killed_while_receiving_costs_no_message(
    place: Place,
    receive: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    receiver, other = await receive(), await receive("shipping")
    sent = make_messages(60, topic=place.topic, keys=6)
    await place.send(sent[:30])
    hand = await receiver.get(6)
    await receiver.subscription.ack(hand[:3])
    await place.written_down()
    await place.kill()
    await receiver.until_lost()
    await other.subscription.close()  # it never raises

    async def begin() -> None:
        await (await receive("shipping")).until_lost()
        raise Unreachable("at its first take")

    with pytest.raises(Unreachable):
        await begin()
    await place.restart()

    async def sent_the_rest() -> bool:
        await place.send(sent[30:])
        return True

    await eventually_async(sent_the_rest, PATIENCE_SECONDS)
    hand = list(receiver.came)
    await receiver.until_came(set(ids(sent)))
    assert in_order(receiver.came, sent)
    # What is in hand is still ours, or comes again under a greater claim.
    again = receiver.came[len(hand) :]
    if place.exclusive:
        old = {each.id: each.claim for each in hand}
        assert all(each.claim > old[each.id] for each in again if each.id in old)
    await receiver.subscription.give_back(hand)
    await receiver.subscription.close()
    mark = make_message(topic=place.topic)
    await place.send([mark])
    next_one = await receive()
    await next_one.until_came({mark.id, *ids(hand[3:])} - set(ids(again)))
    said = [each.getMessage() for each in caplog.records]
    # Kafka may count the lost member for a while, which is said.
    assert [each for each in said if not each.startswith("consumer.joining")] == []
    assert capfd.readouterr().err == ""


@on("pausable")
async def test_a_server_that_stands_still_is_outlived(place: Place, receive: Any) -> None:
    receiver, other = await receive(), await receive("shipping")
    sent = make_messages(20, topic=place.topic, keys=10)
    await place.send(sent)
    hand = await receiver.get(4)
    await other.get(1)
    await receiver.subscription.ack(hand[:2])
    async with place.paused():
        await other.subscription.close()  # it neither raises nor waits for ever
        with contextlib.suppress(Unreachable):
            receiver.came += await receiver.subscription.take(10)
    await receiver.until_came(set(ids(sent)))
    assert in_order(receiver.came, sent)
