"""What every broker must do, run on each; what only one does stands in a file of its own."""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from helpers import eventually_async
from helpers_messages import make_message, make_messages
from places import SERVED, SOURCE, UNSERVED, CallPlace, Place, Served
from postroom.brokers import Broker, CanLookUp, Delivered, Outcome, Permanent, Transient, Unknown
from postroom.errors import Unreachable
from postroom.messages import Message, attribute_text, new_id
from postroom.outbox.rules import waves


@pytest.fixture(params=[*UNSERVED, *SERVED])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    if request.param in SERVED:
        kind, server = SERVED[request.param]
        made = kind(request.getfixturevalue(server))
        await made.begin()
    else:
        made = UNSERVED[request.param]()
    yield made
    await made.end()


def all_delivered(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome == Delivered() for outcome in outcomes)


async def test_each_message_arrives_as_it_was(place: Place) -> None:
    batch = make_messages(20, topic=place.topic)
    assert await place.broker.send(batch) == [Delivered()] * 20
    arrived = await place.arrived()
    assert sorted((a.id, a.topic, a.payload) for a in arrived) == sorted(
        (m.id, m.topic, m.payload) for m in batch
    )


async def test_an_empty_batch_is_nothing(place: Place) -> None:
    assert await place.broker.send([]) == []
    assert await place.arrived() == []


async def test_outcomes_stand_in_the_order_of_the_messages(place: Place) -> None:
    batch = make_messages(30, topic=place.topic, keys=30)
    batch[3], batch[17] = place.refuse(batch[3]), place.refuse(batch[17])
    outcomes = await place.broker.send(batch)
    refused = [index for index, outcome in enumerate(outcomes) if outcome != Delivered()]
    assert refused == [3, 17]
    assert all(isinstance(outcomes[index], Permanent) for index in refused)
    expected = {m.id for index, m in enumerate(batch) if index not in refused}
    assert {a.id for a in await place.arrived()} == expected


async def test_empty_binary_and_large_payloads(place: Place) -> None:
    payloads = [b"", b"\x00\xff\r\n\r\nPUB other 0\r\n\r\n", b"\n\n", os.urandom(place.largest)]
    batch = [
        make_message(payload, topic=place.topic, content_type="application/octet-stream")
        for payload in payloads
    ]
    assert all_delivered(await place.broker.send(batch))
    arrived = {a.id: a.payload for a in await place.arrived()}
    assert [arrived[m.id] for m in batch] == payloads


async def test_headers_survive(place: Place) -> None:
    own = {"greeting": "grüße, 世界 🌍", "empty": "", "colons": "a: b: c", "X-Line": "a\u2028b"}
    message = make_message(
        topic=place.topic,
        key="ключ-1",
        aggregate_type="commande",
        aggregate_id="№ 7",
        headers=own,
    )
    assert all_delivered(await place.broker.send([message]))
    (arrived,) = await place.arrived()
    text = attribute_text if place.encoded else str
    expected = own | {
        f"{place.prefix}id": message.id,
        f"{place.prefix}type": "order.placed.v1",
        f"{place.prefix}source": SOURCE,
        f"{place.prefix}specversion": "1.0",
        f"{place.prefix}partitionkey": text("ключ-1"),
        "content-type": "application/json",
        "event_id": message.id,
        "event_type": "order.placed.v1",
        "aggregate_type": "commande",
        "aggregate_id": "№ 7",
    }
    assert {name: arrived.headers.get(name) for name in expected} == expected


async def test_five_thousand_at_once(place: Place) -> None:
    batch = make_messages(5_000 // place.pace, topic=place.topic, keys=50)
    assert all_delivered(await place.broker.send(batch))
    assert {a.id for a in await place.arrived()} == {m.id for m in batch}


async def send_as_a_relay(broker: Broker, batch: Sequence[Message]) -> None:
    """All at once where the broker keeps the order of a key, else one of each key at a time."""
    limit = broker.capabilities.max_batch or len(batch)
    for wave in [batch] if broker.capabilities.ordered_pipeline else waves(batch):
        for start in range(0, len(wave), limit):
            assert all_delivered(await broker.send(wave[start : start + limit]))


async def test_each_key_arrives_in_its_order(place: Place) -> None:
    """Many keys that take turns, batch after batch, from four lanes at once."""
    keys, each = 5, max(60 // place.pace, 3)

    async def work(lane: int) -> list[Message]:
        sent = []
        for number in range(each):
            for key in range(keys):
                content = b"%d" % number
                sent.append(make_message(content, topic=place.topic, key=f"{lane}-{key}"))
        third = len(sent) // 3
        for batch in (sent[:third], sent[third : 2 * third], sent[2 * third :]):
            await send_as_a_relay(place.broker, batch)
        return sent

    sent = [message for lane in await asyncio.gather(*map(work, range(4))) for message in lane]
    key_of = {message.id: message.key for message in sent}
    found: dict[str | None, list[int]] = {}
    for one in await place.arrived():
        found.setdefault(key_of[one.id], []).append(int(one.payload))
    assert found == {key: list(range(each)) for key in set(key_of.values())}


async def test_nothing_of_a_key_passes_what_was_refused(place: Place) -> None:
    """Of a broker that is given all of a key at once: those behind are kept back."""
    if not place.broker.capabilities.ordered_pipeline:
        return  # it has one of each key at a time, and a relay stops there
    batch = [
        make_message(b"%d" % number, topic=place.topic, key=f"k{number % 3}")
        for number in range(30)
    ]
    batch[10] = place.refuse(batch[10])  # of k1
    outcomes = await place.broker.send(batch)
    kept_back = [10, *range(13, 30, 3)]
    assert [i for i, outcome in enumerate(outcomes) if outcome != Delivered()] == kept_back
    expected = {m.id for i, m in enumerate(batch) if i not in kept_back}
    assert {one.id for one in await place.arrived()} == expected


async def test_sends_side_by_side_do_not_mix(place: Place) -> None:
    count = 200 // min(place.pace, 10)
    batches = [make_messages(count, topic=place.topic, keys=200) for _ in range(5)]
    for number, batch in enumerate(batches):
        batch[number] = place.refuse(batch[number])
    answers = await asyncio.gather(*(place.broker.send(batch) for batch in batches))
    for number, outcomes in enumerate(answers):
        assert [i for i, o in enumerate(outcomes) if o != Delivered()] == [number]
    assert len(await place.arrived()) == 5 * (count - 1)


async def test_ping(place: Place) -> None:
    await place.broker.ping()
    if place.pings:
        await place.go_down()
        with pytest.raises(Unreachable):
            await place.broker.ping()
        await place.come_back()
        await place.broker.ping()


async def test_nothing_is_delivered_while_it_is_down(place: Place) -> None:
    first, second = make_messages(10, topic=place.topic), make_messages(10, topic=place.topic)
    assert all_delivered(await place.broker.send(first))
    await place.go_down()
    for outcome in await place.broker.send(second):
        assert isinstance(outcome, Transient | Unknown)
        assert outcome.down == "broker" or isinstance(place, CallPlace)
    # Nobody is there to take it: of this everybody is certain.
    for outcome in await place.broker.send(second):
        assert isinstance(outcome, Transient)
    await place.come_back()
    assert all_delivered(await place.broker.send(second))
    assert {a.id for a in await place.arrived()} == {m.id for m in first + second}


async def test_what_was_delivered_through_an_outage_is_there(place: Place) -> None:
    todo = make_messages(6_000 // place.pace, topic=place.topic, keys=6_000)
    everything = {m.id for m in todo}
    delivered: set[str] = set()

    async def deliver() -> None:
        left = list(todo)
        while left:
            size = max(100 // place.pace, 2)
            batch, left = left[:size], left[size:]
            for message, outcome in zip(batch, await place.broker.send(batch), strict=True):
                if outcome == Delivered():
                    delivered.add(message.id)
                else:
                    left.append(message)
            await asyncio.sleep(0.001)

    delivering = asyncio.create_task(deliver())
    await eventually_async(lambda: len(delivered) > 500 // place.pace, 60, interval=0.001)
    await place.go_down()
    assert not delivering.done()
    before = set(delivered)
    await place.come_back()
    await asyncio.wait_for(delivering, 120)
    arrived = {a.id for a in await place.arrived()}
    assert before <= arrived
    assert delivered == everything == arrived


async def test_a_topic_that_is_not_there_stops_only_its_own(place: Place) -> None:
    """Its messages can go once somebody has made it, so they are not refused for ever."""
    if not place.strict:
        return  # it makes its topics itself, or takes them all
    nowhere = f"t{new_id()}.nowhere"
    batch = make_messages(20, topic=place.topic, keys=20)
    batch[5] = batch[5]._replace(topic=nowhere)
    outcomes = await place.broker.send(batch)
    missing = outcomes.pop(5)
    assert isinstance(missing, Transient)
    assert missing.down == "topic"
    assert all_delivered(outcomes)


def check(batch: Sequence[Message], outcomes: Sequence[Outcome], arrived: set[str]) -> None:
    """A yes is for what is there, and a certain no for what is not."""
    for message, outcome in zip(batch, outcomes, strict=True):
        assert not (outcome == Delivered() and message.id not in arrived), outcome
        assert not (isinstance(outcome, Transient) and message.id in arrived), outcome


def large_messages(count: int, topic: str) -> list[Message]:
    """Together more than the pipe of standard output and its reader hold."""
    return [
        make_message(b"x" * (300_000 // count), topic=topic, key=f"k{number}", position=number + 1)
        for number in range(count)
    ]


async def test_silence_leaves_outcomes_unknown(place: Place) -> None:
    """The far end takes messages, and its answers are held back until nobody awaits them."""
    seconds = 1.0
    broker = place.narrow(seconds)

    async def delivered(*batches: Sequence[Message]) -> bool:  # a busy machine may need more time
        return all([all_delivered(await broker.send(batch)) for batch in batches])

    # Twice in a row: one that was late may have a connection of its own, which is not used again.
    await eventually_async(lambda: delivered(*[make_messages(10, topic=place.topic)] * 2))
    await place.hold()
    batch, began = large_messages(60, place.topic), time.perf_counter()
    outcomes = await broker.send(batch)
    assert time.perf_counter() - began < seconds + 1
    await place.let_go()
    unknown = [m for m, o in zip(batch, outcomes, strict=True) if isinstance(o, Unknown)]
    assert unknown
    assert not any(isinstance(outcome, Permanent) for outcome in outcomes)
    later = make_messages(10, topic=place.topic)
    await eventually_async(lambda: delivered(later))
    await broker.close()
    arrived = {one.id for one in await place.arrived()}
    check(batch, outcomes, arrived)
    assert {message.id for message in later} <= arrived
    if isinstance(place, Served):
        assert Delivered() not in outcomes
        assert place.gone_out(unknown) == len(unknown)  # of the others it is certain
        assert arrived & {message.id for message in unknown}


async def test_silence_at_the_first_contact(place: Place) -> None:
    """Whoever gets no greeting, or no word of the topic, has sent nothing and knows it."""
    if not isinstance(place, Served):
        return
    broker = place.narrow(0.5)
    await place.hold()
    batch = make_messages(10, topic=place.topic, keys=10)
    outcomes = await broker.send(batch)
    await place.let_go()
    for message, outcome in zip(batch, outcomes, strict=True):
        gone_out = functools.partial(place.gone_out, [message])
        if isinstance(outcome, Unknown):
            await eventually_async(gone_out, 5)
        else:
            assert isinstance(outcome, Transient)
            assert not gone_out()
    await broker.close()


async def test_a_lost_answer_is_never_a_no(place: Place) -> None:
    """The server has taken the message when the connection breaks. Some ask again, and may know."""
    if not isinstance(place, Served):
        return
    broker = place.narrow(10.0)
    assert all_delivered(await broker.send(make_messages(10, topic=place.topic)))
    batch = make_messages(10, topic=place.topic, keys=10)
    loss = place.detour.lose_reply(to=batch[0].id.encode())
    outcomes = await broker.send(batch)
    assert loss.happened
    assert isinstance(outcomes[0], Unknown | Delivered)
    later = make_messages(10, topic=place.topic)
    assert all_delivered(await broker.send(later))
    await broker.close()
    arrived = {one.id for one in await place.arrived()}
    check(batch, outcomes, arrived)
    assert {batch[0].id, *(message.id for message in later)} <= arrived


async def test_a_slow_far_end_holds_up_senders(place: Place) -> None:
    """However much they have to send, and from how many lanes, no more than the window is under
    way; all of it arrives once the far end goes on."""
    broker = place.narrow(30.0)
    first = make_messages(10, topic=place.topic)
    assert all_delivered(await broker.send(first))
    batches = [large_messages(max(100 // place.pace, 20), place.topic) for _ in range(3)]
    everything = [message for batch in batches for message in batch]
    await place.hold()
    sending = [asyncio.create_task(broker.send(batch)) for batch in batches]
    window = place.window or len(everything)
    if place.window:
        await eventually_async(lambda: place.gone_out(everything) > window // 2)
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in sending)
    assert place.gone_out(everything) <= window
    await place.let_go()
    for outcomes in await asyncio.gather(*sending):
        assert all_delivered(outcomes)
    await broker.close()
    assert {one.id for one in await place.arrived()} == {m.id for m in first + everything}


async def test_close_lets_a_send_come_to_its_end(place: Place) -> None:
    batch = make_messages(2_000 // place.pace, topic=place.topic)
    sending = asyncio.create_task(place.broker.send(batch))
    await asyncio.sleep(0.005)
    await place.broker.close()
    assert all_delivered(await sending)
    assert {a.id for a in await place.arrived()} == {m.id for m in batch}


async def test_close_twice(place: Place) -> None:
    await place.broker.close()
    await place.broker.close()


async def test_it_is_a_broker(place: Place) -> None:
    assert isinstance(place.broker, Broker)
    assert not isinstance(place.broker, CanLookUp)
