"""What only Kafka does when receiving: offsets, members that come and go, slow handlers."""

import asyncio
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from helpers import eventually_async
from helpers_kafka import produce_raw, take_nothing
from helpers_messages import make_message, make_messages
from helpers_receiving import Receiver
from postroom import signals
from postroom.brokers import (
    BrokerOptions,
    Delivered,
    Delivery,
    Subscription,
    kafka_receiving,
)
from postroom.brokers.kafka import KafkaBroker
from postroom.brokers.kafka_ledger import Ledger
from postroom.brokers.kafka_pump import Pump
from postroom.brokers.kafka_receiving import KafkaSubscription
from postroom.brokers.kafka_shelf import Shelf
from postroom.brokers.receiving import CanTellLag
from postroom.errors import ConfigurationError, InvalidMessage, Unreachable
from postroom.messages import Message, new_id
from receiving_places import KafkaPlace
from receiving_process import program
from servers import KafkaServer

OPTIONS = BrokerOptions(
    source="the-shop",
    send_timeout_seconds=10.0,
    extra={"session.timeout.ms": "6000", "max.poll.interval.ms": "6000"},
)


class Counter:
    """A topic of our own, and members of a group that read it."""

    def __init__(self, server: KafkaServer) -> None:
        self.server = server
        self.topic = f"t{new_id()}"
        self.consumer = f"billing-{new_id()}"
        self.broker = KafkaBroker(server.url, OPTIONS)
        self.members: list[KafkaSubscription] = []

    async def member(self, consumer: str | None = None) -> KafkaSubscription:
        made = await self.broker.receive([self.topic], consumer=consumer or self.consumer)
        self.members.append(made)
        return made

    async def send(self, batch: Sequence[Message]) -> None:
        assert await self.broker.send(batch) == [Delivered()] * len(batch)

    def committed(self) -> dict[int, int]:
        settings = {**self.server.client_settings(), "group.id": self.consumer}
        looking = Consumer(settings)
        try:
            partitions = looking.list_topics(self.topic, timeout=10).topics[self.topic].partitions
            asked = [TopicPartition(self.topic, number) for number in partitions]
            answer = looking.committed(asked, timeout=10)
            return {each.partition: each.offset for each in answer if each.offset >= 0}
        finally:
            looking.close()


@pytest.fixture
async def counter(kafka_server: KafkaServer) -> AsyncIterator[Counter]:
    made = Counter(kafka_server)
    kafka_server.create_topic(made.topic)
    yield made
    for member in made.members:
        await member.close()
    await made.broker.close()


async def take(subscription: Subscription, count: int, *, seconds: float = 40) -> list[Delivery]:
    """So many deliveries, however many takes they need."""
    taken: list[Delivery] = []
    async with asyncio.timeout(seconds):
        while len(taken) < count:
            taken += await subscription.take(count - len(taken))
    return taken


async def nothing_more(subscription: Subscription) -> None:
    assert await subscription.take(10) == []


def ids(deliveries: Sequence[Delivery | Message]) -> list[str]:
    return [each.id for each in deliveries]


def in_order(deliveries: Sequence[Delivery], sent: Sequence[Message]) -> bool:
    """Whether the messages of each key came as they were sent."""
    came, went = defaultdict(list), defaultdict(list)
    for each in deliveries:
        came[each.key].append(each.id)
    for message in sent:
        went[message.key].append(message.id)
    return came == went


async def test_a_source_is_a_partition(counter: Counter) -> None:
    batch = make_messages(500, topic=counter.topic)
    await counter.send(batch)
    taken = await take(await counter.member(), 500)
    assert in_order(taken, batch)
    assert {each.source for each in taken} == {f"{counter.topic}/{n}" for n in range(4)}
    assert all(each.source == f"{each.topic}/{each.receipt[1]}" for each in taken)


async def test_lag_is_what_was_not_handed_out_yet(counter: Counter) -> None:
    member = await counter.member()
    assert isinstance(member, CanTellLag)
    await counter.send(make_messages(50, topic=counter.topic))
    taken = await take(member, 20)
    await eventually_async(lambda: _lag_of(member, 30), 30)
    await take(member, 30)
    await eventually_async(lambda: _lag_of(member, 0), 30)
    assert len(taken) == 20


async def _lag_of(member: CanTellLag, expected: int) -> bool:
    return await member.lag() == expected


async def test_records_of_strangers_have_a_name_that_lasts(counter: Counter) -> None:
    stranger = Producer(counter.server.client_settings())
    stranger.produce(counter.topic, b"hello", key=b"\xff\xfe", partition=2)
    stranger.produce(counter.topic, None, partition=2, headers={"Odd": b"\xff", "none": None})
    assert stranger.flush(10) == 0
    member = await counter.member()
    first, second = await take(member, 2)
    assert (first.id, first.key, first.payload) == (f"{counter.topic}/2/0", r"\xff\xfe", b"hello")
    assert (second.id, second.key, second.payload) == (f"{counter.topic}/2/1", None, b"")
    assert second.headers == {"odd": "�", "none": ""}
    assert second.type == ""


async def test_a_header_whose_name_is_no_text_holds_nothing_up(counter: Counter) -> None:
    """The library cannot read any header of it: it comes without, for the consumer to refuse."""
    stranger, odd = Producer(counter.server.client_settings()), 60  # Python is used to it by then
    for number in range(odd + 2):
        value = b"%d" % number
        if number == odd:
            produce_raw(stranger, counter.topic, 2, value, b"x-\xff\xfe")
        else:
            stranger.produce(counter.topic, value, partition=2, headers={"n": value})
    assert stranger.flush(10) == 0
    member = await counter.member()
    found = await take(member, odd + 2)
    assert [each.payload for each in found] == [b"%d" % number for number in range(odd + 2)]
    assert (found[odd].id, found[odd].type) == (f"{counter.topic}/2/{odd}", "")
    assert (found[odd].headers, found[odd + 1].headers) == ({}, {"n": f"{odd + 1}"})
    await member.ack(found)
    assert counter.committed() == {2: odd + 2}


async def test_only_the_part_without_gaps_is_committed(counter: Counter) -> None:
    await counter.send(make_messages(10, topic=counter.topic, keys=1))
    member = await counter.member()
    taken = await take(member, 10)
    await member.ack([taken[2], taken[4], taken[9]])
    assert counter.committed() == {}
    await member.ack(taken[:2])
    (position,) = counter.committed().values()
    assert position == 3
    await member.ack([taken[3]])
    assert list(counter.committed().values()) == [5]
    await member.ack([taken[3], taken[0]])  # once more does no harm
    await member.ack(taken[5:9])
    assert list(counter.committed().values()) == [10]


def test_the_ledger_never_passes_what_is_not_done() -> None:
    dice = random.Random(7)
    for _ in range(300):
        offsets = sorted(dice.sample(range(100), dice.randint(1, 30)))
        ledger = Ledger(1)
        done: set[int] = set()
        waiting = list(offsets)
        while len(done) < len(offsets):
            if waiting and dice.random() < 0.5:
                assert ledger.hand_out(waiting[0])
                assert not ledger.hand_out(waiting.pop(0))
            elif out := [each for each in offsets if each not in done and each not in waiting]:
                chosen = dice.choice(out)
                ledger.ack(chosen)
                done.add(chosen)
            first = next((each for each in offsets if each not in done), None)
            if ledger.position is not None and first is not None:
                assert ledger.position <= first
        assert ledger.position == offsets[-1] + 1
        assert ledger.in_hand == 0


class Worker:
    """Takes and acknowledges until stopped, and keeps what it did; a void delivery counts not."""

    def __init__(self, member: KafkaSubscription, seen: list[Delivery]) -> None:
        self.member = member
        self.claims: dict[str, list[int]] = defaultdict(list)
        self._seen = seen
        self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            taken = await self.member.take(20)
            for each in taken:
                self._seen.append(each)
                if each.claim not in self.claims[each.source]:
                    self.claims[each.source].append(each.claim)
            await asyncio.sleep(0.001)
            await self.member.ack(taken)

    async def stop(self) -> None:
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task
        await self.member.close()


async def test_members_come_and_go_and_nothing_is_lost(counter: Counter) -> None:
    sent: list[Message] = []
    seen: list[Delivery] = []
    working = True

    async def send() -> None:
        while working:
            batch = make_messages(20, topic=counter.topic, keys=20)
            await counter.send(batch)
            sent.extend(batch)
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    workers: list[Worker] = []
    for members in (1, 2, 3):
        workers.append(Worker(await counter.member(), seen))
        await _all_are_shared(counter, workers, members)
    first = workers[0]
    while len(workers) > 1:
        await workers.pop().stop()
        await _all_are_shared(counter, workers, len(workers))
    working = False
    await sending
    everything = set(ids(sent))
    await eventually_async(lambda: set(ids(seen)) >= everything, timeout=60)
    await eventually_async(lambda: sum(counter.committed().values()) == len(sent), timeout=60)
    await first.stop()
    assert set(ids(seen)) == everything
    # What it lost and got again, it has under a newer claim.
    assert all(claims == sorted(claims) for claims in first.claims.values())
    assert any(len(claims) > 1 for claims in first.claims.values())
    # First deliveries of a key stand in order, whoever had it.
    firsts: dict[str, Delivery] = {}
    for each in seen:
        firsts.setdefault(each.id, each)
    assert in_order(list(firsts.values()), sent)


async def _all_are_shared(counter: Counter, workers: Sequence[Worker], members: int) -> None:
    """Wait until all partitions are assigned, and every member has some."""

    def shared() -> bool:
        held = [set(worker.member._shelf.partitions) for worker in workers]
        return all(held) and sum(map(len, held)) == 4 and len(set().union(*held)) == 4

    assert len(workers) == members
    await eventually_async(shared, timeout=60)
    await asyncio.sleep(0.5)  # let them work for a while


async def test_a_void_claim_commits_nothing(counter: Counter) -> None:
    await counter.send(make_messages(40, topic=counter.topic, keys=40))
    one = await counter.member()
    taken = await take(one, 40)
    sources = {each.source for each in taken}
    assert len(sources) == 4
    two = await counter.member()
    other = await take(two, 1)
    lost = {each.source for each in other}
    while more := await two.take(100):
        other += more
        lost |= {each.source for each in more}
    assert lost < sources
    await one.ack(taken)  # among them what is no longer its own
    mine = {int(source.rpartition("/")[2]) for source in sources - lost}
    assert set(counter.committed()) == mine
    await one.give_back([each for each in taken if each.source in lost])
    await nothing_more(one)
    await two.ack(other)
    assert sum(counter.committed().values()) == 40


async def test_a_slow_handler_keeps_its_partitions(counter: Counter) -> None:
    await counter.send(make_messages(3000, topic=counter.topic, keys=40))
    one = await counter.member()
    taken = await take(one, 10)
    await asyncio.sleep(9)  # longer than max.poll.interval.ms, the shelf being full
    assert one._pump._paused
    await one.ack(taken)
    taken += await take(one, 2990)
    await one.ack(taken)
    assert len({(each.source, each.claim) for each in taken}) == 4
    assert len(set(ids(taken))) == 3000
    assert sum(counter.committed().values()) == 3000


async def test_memory_is_bounded_while_nobody_takes(counter: Counter) -> None:
    batch = [make_message(b"x" * 100_000, topic=counter.topic, key=str(n)) for n in range(300)]
    await counter.send(batch)
    member = await counter.member()
    await eventually_async(lambda: member._shelf.room == 0)
    await asyncio.sleep(1)
    assert member._shelf._bytes <= 8 * 1024 * 1024 + 1000 * 100_000 / 10
    taken = await take(member, 300)
    assert in_order(taken, batch)


async def _all_of(
    member: KafkaSubscription, wanted: set[str], in_hand: list[Delivery]
) -> list[Delivery]:
    """Go on until all of these are acknowledged, through whatever trouble there is."""
    seen: list[Delivery] = []
    await _through_trouble(lambda: member.ack(in_hand))
    done = set(ids(in_hand))
    async with asyncio.timeout(60):
        while not done >= wanted:
            try:
                more = await member.take(100)
            except Unreachable:
                continue
            seen += more
            await _through_trouble(lambda more=more: member.ack(more))  # type: ignore[misc]
            done |= set(ids(more))
    return seen


async def _through_trouble(act: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                return await act()
            except Unreachable:
                await asyncio.sleep(0.1)


async def test_an_acknowledgement_that_nobody_hears(counter: Counter) -> None:
    counter.server.require_private()
    await counter.send(make_messages(5, topic=counter.topic, keys=1))
    broker = KafkaBroker(counter.server.url, BrokerOptions(send_timeout_seconds=2.0))
    member = await broker.receive([counter.topic], consumer=counter.consumer)
    taken = await take(member, 5)
    with counter.server.paused(), pytest.raises(Unreachable, match="cannot commit to Kafka"):
        await member.ack(taken[:3])
    await _through_trouble(lambda: member.ack(taken[3:4]))
    assert list(counter.committed().values()) == [4]
    await member.close()
    await broker.close()


async def test_a_topic_that_comes_later_is_read_from_its_beginning(
    kafka_server: KafkaServer,
) -> None:
    late = Counter(kafka_server)
    member = await late.member()
    with pytest.raises(Unreachable, match="does not exist"):
        await take_nothing(member)
    kafka_server.create_topic(late.topic)
    batch = make_messages(5, topic=late.topic)
    await late.send(batch)
    seen = await _all_of(member, set(ids(batch)), [])
    assert sorted(ids(seen)) == sorted(ids(batch))
    await member.close()
    await late.broker.close()


async def test_a_dead_member_that_holds_the_group_up_is_told_of(
    kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_receiving, "SLOW_JOIN_SECONDS", 0.5)
    place = KafkaPlace(kafka_server)
    place.options = replace(place.options, extra={"session.timeout.ms": "9000"})
    heard: list[dict[str, Any]] = []
    stop = signals.listen(lambda _, fields: heard.append(fields), only=["consumer.joining"])
    try:
        await place.begin()
        await place.send(make_messages(20, topic=place.topic))
        async with program(place) as other:
            await other.took()
            other.send(signal.SIGKILL)
            receiver = Receiver(await place.receive("billing"))
            await receiver.get(1)  # it waits until Kafka has removed the other
            await receiver.subscription.close()
    finally:
        stop()
        await place.end()
    (told,) = heard
    assert told["consumer"] == place.named("billing")
    assert "the group may still count a member that is gone" in told["reason"]
    assert "session.timeout.ms (9 s)" in told["reason"]


async def test_a_member_without_partitions_does_not_count_as_joining(counter: Counter) -> None:
    await counter.send(make_messages(3, topic=counter.topic))
    first = await counter.member()
    await take(first, 3)
    members = [await counter.member() for _ in range(7)]  # more than there are partitions

    async def joined() -> bool:
        await asyncio.gather(*(each.take(1) for each in (first, *members)))
        return all(each._pump.joining_since is None for each in members)

    await eventually_async(joined, 60, interval=0)


class _Record:
    """What librdkafka returns for a record."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"%d" % self._offset

    def headers(self) -> list[tuple[str, bytes]]:
        return []


def test_a_record_fetched_before_a_rebalance_does_not_stand_under_the_claim_after_it() -> None:
    """librdkafka serves rebalances inside of `consume`, between two records of one fetch."""
    shelf = Shelf(lambda: None)
    pump = Pump(
        None,
        {},
        ["t"],
        shelf,
        on_commit=lambda _: None,
        on_end=lambda: None,
        without_secrets=str,
    )
    ours = [TopicPartition("t", 0)]

    class Rebalancing:
        def poll(self, _: float) -> _Record:
            return _Record(100)

        def consume(self, most: int, _: float) -> list[_Record]:
            pump._on_lost(None, ours)
            pump._on_assign(None, ours)
            return [_Record(50), _Record(51)]  # from the committed position

    pump._on_assign(None, ours)
    pump._fetch(Rebalancing())
    assert [each.receipt[2] for each in shelf.take(10)] == [50, 51]


async def test_a_consumer_may_have_an_odd_name(counter: Counter) -> None:
    batch = make_messages(20, topic=counter.topic)
    await counter.send(batch)
    member = await counter.member(f"b {counter.consumer} é")
    assert sorted(ids(await take(member, 20))) == sorted(ids(batch))


async def test_what_cannot_be_received(counter: Counter) -> None:
    with pytest.raises(ConfigurationError, match="at least one topic"):
        await counter.broker.receive([], consumer="billing")
    with pytest.raises(InvalidMessage, match="bad topic"):
        await counter.broker.receive(["orders.>"], consumer="billing")
