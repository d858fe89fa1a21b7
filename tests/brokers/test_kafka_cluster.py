"""Three brokers, and the leader killed under load: nothing is lost, and keys stay in order."""

import asyncio
from collections.abc import Iterator

import pytest

from helpers import eventually_async
from helpers_kafka import read_all
from helpers_messages import make_message
from postroom.brokers import BrokerOptions, Delivered, Permanent
from postroom.brokers.kafka import KafkaBroker
from servers import KafkaCluster, KafkaServer

KEYS = 60
KILLS = 2


@pytest.fixture(scope="module")
def cluster(kafka_server: KafkaServer) -> Iterator[KafkaCluster]:
    kafka_server.require_private()
    with KafkaCluster() as made:
        yield made


async def test_the_leader_is_killed_under_load(cluster: KafkaCluster) -> None:
    cluster.nodes[0].create_topic("orders", partitions=3, copies=3)
    broker = KafkaBroker(cluster.url, BrokerOptions(send_timeout_seconds=10))
    delivered: dict[str, list[str]] = {f"key-{n}": [] for n in range(KEYS)}
    working = True

    async def keep_sending(key: str) -> None:
        """As a relay does: the next of a key only after the yes to the one before."""
        while working:
            message = make_message(topic="orders", key=key)
            while (await broker.send([message]))[0] != Delivered():
                await asyncio.sleep(0.05)
            delivered[key].append(message.id)
            await asyncio.sleep(0.01)

    async def all_go_on() -> None:
        """Wait until every key has got on."""
        mark = {key: len(ids) for key, ids in delivered.items()}
        await eventually_async(
            lambda: all(len(delivered[key]) > mark[key] + 10 for key in mark), timeout=90
        )

    senders = [asyncio.create_task(keep_sending(key)) for key in delivered]
    for _ in range(KILLS):
        await all_go_on()
        leader = await asyncio.to_thread(cluster.leader_of, "orders")
        assert leader is not None
        await asyncio.to_thread(leader.kill)
        await all_go_on()
        await asyncio.to_thread(leader.start)
    working = False
    await asyncio.gather(*senders)
    await broker.close()
    records = await asyncio.to_thread(read_all, cluster.nodes[0], "orders")
    arrived: dict[str, list[str]] = {key: [] for key in delivered}
    for record in records:
        id, key = record.headers["event_id"], record.headers["ce_partitionkey"]
        if id not in arrived[key]:  # what came before is a duplicate
            arrived[key].append(id)
    assert arrived == delivered


async def test_dangers_of_a_cluster(cluster: KafkaCluster) -> None:
    for number, settings in enumerate(({}, {"min_insync_replicas": "1"})):
        cluster.nodes[0].create_topic(f"shelf-{number}", copies=3, **settings)
    broker = KafkaBroker(cluster.url)

    async def found() -> bool:
        """All of the brokers may not know the new topics yet."""
        dangers = await broker.examine(["shelf-0", "shelf-1"])
        assert [text.partition(":")[0] for text in dangers] == [
            "topic shelf-1 has min.insync.replicas 1"
        ]
        return True

    await eventually_async(found, timeout=30)
    await broker.close()


async def test_too_few_live_copies_are_never_the_messages_fault(cluster: KafkaCluster) -> None:
    cluster.nodes[0].create_topic("ledger", partitions=1, copies=3)
    broker = KafkaBroker(cluster.url, BrokerOptions(send_timeout_seconds=3))
    assert await broker.send([make_message(topic="ledger")]) == [Delivered()]
    for node in cluster.nodes[1:]:
        await asyncio.to_thread(node.kill)
    (outcome,) = await broker.send([make_message(topic="ledger")])
    assert not isinstance(outcome, Delivered | Permanent)
    assert outcome.down in ("topic", "broker")
    await broker.close()
    for node in cluster.nodes[1:]:
        node.mend()
