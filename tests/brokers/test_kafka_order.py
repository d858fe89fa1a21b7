"""Kafka as an ordered pipeline: nothing of a key passes what failed, and others hardly notice."""

import asyncio
from collections.abc import Sequence

import pytest
from confluent_kafka import KafkaError

from helpers_kafka import MockCluster, mock_cluster, read_all
from helpers_messages import make_message, make_messages
from postroom.brokers import BrokerOptions, Delivered, Outcome, Permanent, Transient, Unknown
from postroom.brokers.base import BEHIND
from postroom.brokers.kafka import KafkaBroker
from postroom.brokers.kafka_proof import FRESH_SECONDS, Proof, partition_of
from postroom.brokers.kafka_rounds import again, merge, waves, without_blame
from postroom.brokers.kafka_wire import NOT_SENT, judge
from postroom.messages import Message, new_id
from servers import KafkaServer

SMALL = {"batch.num.messages": "10", "linger.ms": "50"}  # many requests, all of them full
TOO_LARGE = b"x" * 30_000


def open_kafka(url: str, seconds: float = 20, **extra: str) -> KafkaBroker:
    given = {name.replace("_", "."): value for name, value in extra.items()}
    return KafkaBroker(url, BrokerOptions(send_timeout_seconds=seconds, extra=given))


def assert_prefixes(sent: Sequence[Message], log: Sequence[bytes]) -> None:
    """Of every key the log has the first messages, in their order: no gap, and nothing passes."""
    place = {message.payload: message.order for message in sent}
    arrived: dict[tuple[str, str], list[bytes]] = {}
    for payload in dict.fromkeys(log):  # what came before is a duplicate
        if payload in place:
            arrived.setdefault(place[payload], []).append(payload)
    for order, payloads in arrived.items():
        expected = [message.payload for message in sent if message.order == order]
        assert payloads == expected[: len(payloads)], order


def assert_honest(
    batch: Sequence[Message], outcomes: Sequence[Outcome], log: Sequence[bytes]
) -> None:
    delivered = {m.payload for m, o in zip(batch, outcomes, strict=True) if o == Delivered()}
    assert delivered <= set(log)


# Errors on request.


async def started(cluster: MockCluster) -> KafkaBroker:
    cluster.create_topic("orders")
    broker = open_kafka(cluster.url, **SMALL)
    assert await broker.send([make_message(b"first", key="first")]) == [Delivered()]
    return broker


@pytest.mark.parametrize("name", ["MSG_SIZE_TOO_LARGE", "INVALID_RECORD", "INVALID_TIMESTAMP"])
@pytest.mark.parametrize("fine_before", [0, 3])
async def test_nothing_passes_a_batch_that_is_refused(name: str, fine_before: int) -> None:
    with mock_cluster() as cluster:
        broker = await started(cluster)
        cluster.fail_produce(*[0] * fine_before, getattr(KafkaError, name))
        batches = [
            [make_message(b"%d/%d" % (n, m), key=f"{n}/{m % 3}") for m in range(200)]
            for n in range(3)
        ]
        answers = await asyncio.gather(*(broker.send(batch) for batch in batches))
        await broker.close()
        log = cluster.read("orders")
        for batch, outcomes in zip(batches, answers, strict=True):
            assert_prefixes(batch, log)
            assert_honest(batch, outcomes, log)


async def test_what_was_refused_with_others_is_delivered_in_the_same_send() -> None:
    with mock_cluster() as cluster:
        broker = await started(cluster)
        cluster.fail_produce(0, KafkaError.MSG_SIZE_TOO_LARGE)
        batch = make_messages(200, keys=3)
        assert await broker.send(batch) == [Delivered()] * 200
        assert set(broker._troubled) == set()
        await broker.close()
        log = cluster.read("orders")
        assert_prefixes(batch, log)
        assert len(log) == 201


async def test_a_topic_we_may_not_write_to_keeps_back_what_comes_later() -> None:
    with mock_cluster() as cluster:
        broker = await started(cluster)
        barred = [KafkaError.TOPIC_AUTHORIZATION_FAILED] * 40
        cluster.fail_produce(0, 0, *barred)
        batch = make_messages(200, keys=3)
        outcomes = await broker.send(batch)
        failed = [outcome for outcome in outcomes if outcome != Delivered()]
        assert {getattr(outcome, "code", "") for outcome in failed} <= {"not_permitted", "behind"}
        assert BEHIND in failed
        log = cluster.read("orders")
        assert_prefixes(batch, log)
        assert_honest(batch, outcomes, log)
        await broker.close()


async def test_what_can_be_tried_again_neither_passes_nor_doubles() -> None:
    with mock_cluster() as cluster:
        broker = await started(cluster)
        cluster.fail_produce(
            0,
            KafkaError.NOT_LEADER_FOR_PARTITION,
            0,
            KafkaError.NOT_ENOUGH_REPLICAS,
            KafkaError.REQUEST_TIMED_OUT,
        )
        batch = make_messages(300, keys=2)
        assert await broker.send(batch) == [Delivered()] * 300
        await broker.close()
        assert cluster.read("orders")[1:] == [message.payload for message in batch]


async def test_a_partition_that_takes_any_number_loses_nothing() -> None:
    """Were a second request on its way, its yes would be taken for one to the first."""
    with mock_cluster() as cluster:
        cluster.create_topic("orders")
        broker = open_kafka(cluster.url, batch_num_messages="1")
        cluster.fail_produce(KafkaError.NOT_ENOUGH_REPLICAS)
        batch = make_messages(60, keys=1)
        assert await broker.send(batch) == [Delivered()] * 60
        await broker.close()
        assert cluster.read("orders") == [message.payload for message in batch]


async def test_a_header_that_is_none_keeps_back_what_comes_later() -> None:
    with mock_cluster() as cluster:
        broker = await started(cluster)
        batch = make_messages(10, keys=2)
        batch[4] = batch[4]._replace(headers_json="[1]")
        outcomes = await broker.send(batch)
        assert isinstance(outcomes[4], Permanent)
        assert outcomes[6] == outcomes[8] == BEHIND
        assert [outcomes[n] for n in (0, 1, 2, 3, 5, 7, 9)] == [Delivered()] * 7
        await broker.close()
        assert_prefixes(batch, cluster.read("orders"))


# Kafka itself.


@pytest.mark.parametrize("guilty", [0, 1, 150])
@pytest.mark.parametrize("extra", [{"batch_num_messages": "1"}, {"batch_num_messages": "7"}, {}])
@pytest.mark.parametrize("known", [False, True], ids=["fresh producer", "known producer"])
async def test_nothing_of_a_key_passes_a_message_that_is_too_large(
    kafka_server: KafkaServer, guilty: int, extra: dict[str, str], known: bool
) -> None:
    topic = f"t{new_id()}"
    kafka_server.create_topic(topic, partitions=1, max_message_bytes="20000")
    broker = open_kafka(kafka_server.url, 30, **extra)
    if known:
        assert await broker.send([make_message(b"first", topic=topic)]) == [Delivered()]
    hot = [make_message(b"%d" % n, topic=topic, key="hot") for n in range(300)]
    hot[guilty] = hot[guilty]._replace(payload=TOO_LARGE, size=len(TOO_LARGE))
    cold = [make_message(b"cold %d" % n, topic=topic, key=f"cold-{n}") for n in range(20)]
    outcomes, others = await asyncio.gather(broker.send(hot), broker.send(cold))
    assert outcomes[:guilty] == [Delivered()] * guilty
    refused = outcomes[guilty]
    assert isinstance(refused, Permanent)
    assert refused.code == "too_large"
    assert set(outcomes[guilty + 1 :]) == {BEHIND}
    assert others == [Delivered()] * 20
    log = [record.value for record in read_all(kafka_server, topic)]
    assert [value for value in log if value.isdigit()] == [m.payload for m in hot[:guilty]]
    assert sorted(v for v in log if v.startswith(b"cold")) == sorted(m.payload for m in cold)
    # Once it is out of the way, the others follow, and the topic is as well as before.
    rest = hot[guilty + 1 :]
    assert await broker.send(rest) == [Delivered()] * len(rest)
    assert not broker._troubled
    await broker.close()


async def test_a_topic_in_trouble_disturbs_others_once(kafka_server: KafkaServer) -> None:
    well, ill = f"well{new_id()}", f"ill{new_id()}"
    kafka_server.create_topic(well)
    kafka_server.create_topic(ill, max_message_bytes="20000")
    broker = open_kafka(kafka_server.url, 30)
    links = []
    for n in range(4):
        bad = make_message(TOO_LARGE, topic=ill, key="bad")
        good = [make_message(b"%d/%d" % (n, m), topic=well, key=f"{m % 5}") for m in range(200)]
        (refused,), outcomes = await asyncio.gather(broker.send([bad]), broker.send(good))
        assert isinstance(refused, Permanent)
        assert outcomes == [Delivered()] * 200
        links.append(broker._clients.link())
    assert len({id(link) for link in links}) == 1
    log = [record.value for record in read_all(kafka_server, well)]
    assert len(log) >= 800
    assert len(set(log)) == 800
    # What is delivered whole ends the trouble.
    assert await broker.send([make_message(topic=ill)]) == [Delivered()]
    assert not broker._troubled
    await broker.close()


@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_nothing_passes_when_the_leader_is_gone(kafka_server: KafkaServer, how: str) -> None:
    kafka_server.require_private()
    topic = f"t{new_id()}"
    kafka_server.create_topic(topic, partitions=2)
    broker = open_kafka(kafka_server.url, 3, batch_num_messages="50")
    assert await broker.send([make_message(b"first", topic=topic)]) == [Delivered()]
    batches = [
        [make_message(b"%d/%d" % (n, m), topic=topic, key=f"{n}/{m % 2}") for m in range(4000)]
        for n in range(3)
    ]
    sending = [asyncio.ensure_future(broker.send(batch)) for batch in batches]
    await asyncio.sleep(0.1)
    if how == "paused":
        with kafka_server.paused():
            answers = await asyncio.gather(*sending)
    else:
        await asyncio.to_thread(kafka_server.kill)
        answers = await asyncio.gather(*sending)
        await asyncio.to_thread(kafka_server.start)
    log = [record.value for record in await asyncio.to_thread(read_all, kafka_server, topic)]
    sent = [message for batch in batches for message in batch]
    outcomes = [outcome for answer in answers for outcome in answer]
    assert_prefixes(sent, log)
    assert_honest(sent, outcomes, log)
    left = [m for m, o in zip(sent, outcomes, strict=True) if o != Delivered()]
    patient = open_kafka(kafka_server.url, 30)
    assert await patient.send(left) == [Delivered()] * len(left)
    await patient.close()
    await broker.close()
    log = [record.value for record in await asyncio.to_thread(read_all, kafka_server, topic)]
    assert_prefixes(sent, log)
    assert {message.payload for message in sent} <= set(log)


# Rules.


def message(key: str | None, topic: str = "orders") -> Message:
    return make_message(topic=topic, key=key)


def test_a_partition_is_proven_by_the_first_message_for_it() -> None:
    now = 0.0
    proof = Proof(lambda: now)
    assert proof.missing({"orders"}) == {"orders"}
    proof.exists("orders", 3)
    keys = [f"key-{n}" for n in range(20)]
    batch = [message(key) for key in keys]
    wanted = proof.probes(batch, [None] * 20, 100)
    assert sorted(wanted.values()) == [0, 1, 2]
    for index, place in wanted.items():
        assert place == partition_of(keys[index], 3)
        assert all(partition_of(key, 3) != place for key in keys[:index])
    assert len(proof.probes(batch, [None] * 20, 2)) == 2
    assert not proof.is_whole({"orders"})
    for place in range(3):
        proof.took("orders", place)
    assert proof.is_whole({"orders"})
    assert not proof.is_whole({"orders", "others"})
    assert proof.probes(batch, [None] * 20, 100) == {}
    now = FRESH_SECONDS + 1
    assert proof.missing({"orders"}) == {"orders"}


def test_messages_without_a_key_go_where_the_producer_is_known() -> None:
    proof = Proof(lambda: 0.0)
    proof.exists("orders", 3)
    assert proof.probes([message(None)] * 9, [None] * 9, 100) == {0: 0, 1: 1, 2: 2}
    proof.took("orders", 1)
    assert proof.somewhere("orders") == 1
    assert proof.probes([message(None)] * 9, [None] * 9, 100) == {0: 0, 1: 2}
    proof.took("orders", 0)
    proof.took("orders", 2)
    assert proof.somewhere("orders") == -1


def test_what_may_go_again() -> None:
    batch = [message(key) for key in "abcabcabc"]
    lost = Unknown("timeout", "", "topic")
    barred = Transient("not_permitted", "", "topic")
    outcomes: list[Outcome] = [
        *(Delivered(), Permanent("too_large", ""), barred),
        *(lost, lost, lost),
        *(NOT_SENT, BEHIND, NOT_SENT),
    ]
    found = again(batch, outcomes, range(9), spent=False)
    assert found == [1, 3, 4, 6, 7]
    assert [outcomes[n] for n in (5, 8)] == [BEHIND, BEHIND]
    assert again(batch, outcomes, range(9), spent=True) == [1]
    assert without_blame(outcomes[1]) == NOT_SENT
    assert merge(lost, barred) == Unknown("not_permitted", "", "topic")
    assert merge(NOT_SENT, barred) == barred
    assert merge(lost, BEHIND) == BEHIND


def test_one_that_was_refused_for_another_of_its_batch_is_tried_alone() -> None:
    outcome = judge(KafkaError._INVALID_DIFFERENT_RECORD, "another", "orders")
    assert again([message("a")], [outcome], [0], spent=False) == [0]


def test_waves() -> None:
    assert waves([message(key) for key in ["a", "b", "a", None, None, "a"]]) == [
        [0, 1, 3, 4],
        [2],
        [5],
    ]
