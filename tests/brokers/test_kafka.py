"""What only Kafka does: partitions, batches that are refused, silence, producers that are spent."""

import asyncio
import gc
import itertools
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from helpers_kafka import Record, mock_cluster, read_all
from helpers_messages import make_message, make_messages
from postroom.brokers import (
    BrokerOptions,
    CanExamine,
    CanReceive,
    Delivered,
    Outcome,
    Permanent,
    Transient,
    Unknown,
    kafka_clients,
    kafka_wire,
)
from postroom.brokers.kafka import KafkaBroker
from postroom.brokers.kafka_link import Link
from postroom.brokers.kafka_wire import Stamp, judge
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.messages import new_id, wire_headers
from servers import KafkaServer

PATIENT = BrokerOptions(send_timeout_seconds=20.0)
QUICK = BrokerOptions(send_timeout_seconds=4.0)  # for tests of silence: they wait it out


class Shelf:
    """A topic of our own and a broker that sends to it."""

    def __init__(self, server: KafkaServer) -> None:
        self.server = server
        self.topic = f"t{new_id()}"
        self.broker = KafkaBroker(server.url, PATIENT)

    def make(self, topic: str | None = None, **settings: Any) -> None:
        self.server.create_topic(topic or self.topic, **settings)

    def stored(self) -> list[Record]:
        return read_all(self.server, self.topic)


@pytest.fixture
async def shelf(kafka_server: KafkaServer) -> AsyncIterator[Shelf]:
    made = Shelf(kafka_server)
    yield made
    await made.broker.close()


async def test_it_can_receive_and_examine(shelf: Shelf) -> None:
    assert isinstance(shelf.broker, CanReceive)
    assert isinstance(shelf.broker, CanExamine)


# Topics and partitions.


async def test_a_missing_topic_says_how_to_make_one(shelf: Shelf) -> None:
    (outcome,) = await shelf.broker.send([make_message(topic=shelf.topic)])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("no_topic", "topic")
    assert f"topic {shelf.topic} does not exist" in outcome.text
    assert f"`kafka-topics.sh --create --topic {shelf.topic} " in outcome.text
    shelf.make()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]


async def test_a_missing_topic_is_no_trouble_for_other_topics(shelf: Shelf) -> None:
    shelf.make()
    batch = [make_message(topic=topic) for topic in (shelf.topic, "nowhere", shelf.topic)]
    outcomes = await shelf.broker.send(batch)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Transient)


async def test_a_topic_that_was_deleted_is_missing_again(shelf: Shelf) -> None:
    shelf.make()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    shelf.server.admin.delete_topics([shelf.topic])[shelf.topic].result(10)
    broker = KafkaBroker(shelf.server.url, PATIENT)
    for _ in range(2):
        for each in (shelf.broker, broker):
            (outcome,) = await each.send([make_message(topic=shelf.topic)])
            assert isinstance(outcome, Transient | Unknown)
            assert outcome.down == "topic"
    await broker.close()


# Java's own: org.apache.kafka.common.utils.Utils.murmur2, from its tests.
MURMUR2 = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


async def test_keys_go_where_java_clients_put_them(shelf: Shelf) -> None:
    shelf.make(partitions=13)
    keys = [*MURMUR2, "ключ-1", "世界"]
    batch = [make_message(topic=shelf.topic, key=key) for key in keys]
    assert await shelf.broker.send(batch) == [Delivered()] * len(keys)
    found = {record.key.decode(): record.partition for record in shelf.stored() if record.key}
    golden = {key: (number & 0x7FFFFFFF) % 13 for key, number in MURMUR2.items()}
    assert {key: found[key] for key in golden} == golden
    assert {key: found[key] for key in keys} == {
        key: (_murmur2(key.encode()) & 0x7FFFFFFF) % 13 for key in keys
    }


def _murmur2(data: bytes) -> int:
    """Java's hash again, checked by its vectors, for keys that are not ASCII."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    whole = len(data) - len(data) % 4
    for start in range(0, whole, 4):
        k = int.from_bytes(data[start : start + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_the_hash_of_this_test_is_javas() -> None:
    assert {key: _murmur2(key.encode()) for key in MURMUR2} == {
        key: number & 0xFFFFFFFF for key, number in MURMUR2.items()
    }


async def test_without_a_key_there_is_none_on_the_wire(shelf: Shelf) -> None:
    shelf.make()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    (record,) = shelf.stored()
    assert record.key is None
    assert "ce_partitionkey" not in record.headers


@pytest.mark.parametrize(
    "bad",
    [
        {"headers_json": "[1]"},
        {"headers_json": "{"},
        {"headers_json": '{"a": 1}'},
        {"headers_json": '{"a": "\\ud800"}'},
        {"headers_json": '{"\\ud800": "a"}'},
        {"headers_json": '{"a\\u0000b": "a"}'},
        {"key": "\ud800"},
        {"type": "\ud800"},
        {"topic": "a b"},
        {"topic": "orders.>"},
        {"topic": ""},
        {"topic": "x" * 250},
        {"topic": "."},
    ],
)
async def test_what_kafka_can_never_take(shelf: Shelf, bad: dict[str, Any]) -> None:
    shelf.make()
    messages = [make_message(topic=shelf.topic)._replace(**one) for one in ({}, bad, {})]
    outcomes = await shelf.broker.send(messages)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Permanent)
    assert outcomes[1].code in ("bad_header", "bad_topic")
    assert len(shelf.stored()) == 2


@pytest.mark.parametrize("created_us", [0, 1_760_000_000_000_001])
@pytest.mark.parametrize("key", [None, "schlüssel"])
@pytest.mark.parametrize(("aggregate_type", "aggregate_id"), [(None, None), ("order", "17")])
def test_the_short_way_to_headers_says_what_all_brokers_say(
    created_us: int, key: str | None, aggregate_type: str | None, aggregate_id: str | None
) -> None:
    message = make_message(key=key, aggregate_type=aggregate_type, aggregate_id=aggregate_id)
    message = message._replace(created_us=created_us)
    headers = Stamp("shop", 7).headers(message)
    assert isinstance(headers, list)
    said = {name: value.decode() for name, value in headers}
    assert said == wire_headers(message, source="shop", epoch=7, prefix="ce_")
    assert len(headers) == len(dict(headers))


# Outcomes.


async def test_a_batch_that_is_refused_buries_only_the_guilty(shelf: Shelf) -> None:
    shelf.make(partitions=1, max_message_bytes="20000")
    batch = make_messages(300, topic=shelf.topic, keys=300)
    batch[7] = batch[7]._replace(payload=b"x" * 30_000)
    batch[211] = batch[211]._replace(payload=b"x" * 30_000)
    # The others go out again in smaller batches, which takes its time.
    patient = KafkaBroker(shelf.server.url, BrokerOptions(send_timeout_seconds=60))
    outcomes = await patient.send(batch)
    await patient.close()
    refused = [index for index, outcome in enumerate(outcomes) if outcome != Delivered()]
    assert refused == [7, 211]
    for index in refused:
        outcome = outcomes[index]
        assert isinstance(outcome, Permanent)
        assert outcome.code == "too_large"
        assert "max.message.bytes" in outcome.text
    assert len(shelf.stored()) == 298


async def test_a_record_that_a_compacted_topic_refuses(shelf: Shelf) -> None:
    shelf.make(partitions=1, cleanup_policy="compact")
    batch = [make_message(topic=shelf.topic, key=key) for key in ("a", None, "b")]
    outcomes = await shelf.broker.send(batch)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Permanent)
    assert outcomes[1].code == "invalid_record"


NAMES = {
    "MSG_SIZE_TOO_LARGE": Permanent,
    "RECORD_LIST_TOO_LARGE": Permanent,
    "TOPIC_EXCEPTION": Permanent,
    "INVALID_RECORD": Permanent,
    "UNKNOWN_TOPIC_OR_PART": (Transient, "topic"),
    "_UNKNOWN_TOPIC": (Transient, "topic"),
    "_UNKNOWN_PARTITION": (Transient, "topic"),
    "TOPIC_AUTHORIZATION_FAILED": (Transient, "topic"),
    "CLUSTER_AUTHORIZATION_FAILED": (Transient, "broker"),
    "_AUTHENTICATION": (Transient, "broker"),
    "SASL_AUTHENTICATION_FAILED": (Transient, "broker"),
    "NOT_ENOUGH_REPLICAS": (Transient, "topic"),
    "KAFKA_STORAGE_ERROR": (Transient, "topic"),
    "POLICY_VIOLATION": (Transient, "topic"),
    "_PURGE_QUEUE": (Unknown, "topic"),
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": (Unknown, "topic"),
    "_MSG_TIMED_OUT": (Unknown, "topic"),
    "_TIMED_OUT": (Unknown, "topic"),
    "REQUEST_TIMED_OUT": (Unknown, "topic"),
    "_PURGE_INFLIGHT": (Unknown, "topic"),
    "_DESTROY": (Unknown, "topic"),
    "_FATAL": (Unknown, "broker"),
    "_STATE": (Unknown, "broker"),
    "_TRANSPORT": (Unknown, "broker"),
    "OUT_OF_ORDER_SEQUENCE_NUMBER": (Unknown, "broker"),
    "UNKNOWN_PRODUCER_ID": (Unknown, "broker"),
    "INVALID_PRODUCER_EPOCH": (Unknown, "broker"),
    "_GAPLESS_GUARANTEE": (Unknown, "broker"),
    "UNKNOWN": (Unknown, None),  # what nobody has thought of buries nothing at once
}


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    said = judge(getattr(KafkaError, name), "password=hunter2", "orders")
    kind = NAMES[name]
    if isinstance(kind, tuple):
        assert isinstance(said, kind[0])
        assert said.down == kind[1]
    else:
        assert isinstance(said, kind)
    assert not isinstance(said, Delivered)
    assert "hunter2" not in said.text


def test_the_numbers_of_errors_are_the_librarys() -> None:
    assert kafka_wire.PURGE_QUEUE == KafkaError._PURGE_QUEUE
    assert kafka_wire.PURGE_INFLIGHT == KafkaError._PURGE_INFLIGHT
    assert kafka_wire.ALL_BROKERS_DOWN == KafkaError._ALL_BROKERS_DOWN
    assert kafka_wire.LEADER_NOT_AVAILABLE == KafkaError.LEADER_NOT_AVAILABLE


async def test_a_silent_server_leaves_the_outcome_unknown(shelf: Shelf) -> None:
    shelf.broker = KafkaBroker(shelf.server.url, QUICK)
    shelf.make(partitions=1)
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    shelf.server.require_private()
    batch = make_messages(50, topic=shelf.topic)
    with shelf.server.paused():
        began = time.monotonic()
        outcomes = await shelf.broker.send(batch)
        assert time.monotonic() - began < 10
        assert {(type(o), o.code, o.down) for o in _failures(outcomes)} == {
            (Unknown, "timeout", "broker")
        }
        # The silent producer was given up, and a new one gets no greeting.
        outcomes = await shelf.broker.send(batch)
        assert {(type(o), o.code, o.down) for o in _failures(outcomes)} == {
            (Transient, "unreachable", "broker")
        }
        with pytest.raises(Unreachable, match="cannot reach Kafka at kafka://127"):
            await shelf.broker.ping()
    assert await shelf.broker.send(batch) == [Delivered()] * 50
    ids = {record.headers["event_id"] for record in shelf.stored()}
    assert {message.id for message in batch} <= ids


def _failures(outcomes: list[Outcome]) -> list[Any]:
    return [outcome for outcome in outcomes if outcome != Delivered()]


async def test_nobody_there(unused_tcp_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    broker = KafkaBroker(f"kafka://127.0.0.1:{unused_tcp_port}", QUICK)
    answers = await asyncio.gather(*(broker.send(make_messages(2)) for _ in range(3)))
    for outcome in itertools.chain(*answers):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("unreachable", "broker")
    with pytest.raises(Unreachable, match="cannot reach Kafka"):
        await broker.ping()
    with pytest.raises(Unreachable, match="cannot reach Kafka"):
        await broker.receive(["orders"], consumer="billing")
    with pytest.raises(Unreachable, match="cannot reach Kafka"):
        await broker.examine(["orders"])
    await broker.close()
    assert await broker.send([make_message()]) != [Delivered()]
    assert capfd.readouterr().err == ""


async def test_a_killed_server_prints_nothing(
    shelf: Shelf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    shelf.broker = KafkaBroker(shelf.server.url, QUICK)
    shelf.make()
    shelf.server.require_private()
    assert await shelf.broker.send(make_messages(2, topic=shelf.topic)) == [Delivered()] * 2
    sending = asyncio.create_task(shelf.broker.send(make_messages(20_000, topic=shelf.topic)))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(shelf.server.kill)
    outcomes = await sending
    assert {o.down for o in outcomes if isinstance(o, Unknown | Transient)} == {"broker"}
    del sending
    gc.collect()
    assert caplog.text == ""
    assert capfd.readouterr().err == ""


# Errors on request, by librdkafka's own cluster.


async def test_what_can_be_tried_again_is_and_stays_in_order() -> None:
    with mock_cluster() as cluster:
        cluster.create_topic("orders")
        broker = KafkaBroker(cluster.url, BrokerOptions(send_timeout_seconds=10))
        assert await broker.send(make_messages(1)) == [Delivered()]
        cluster.fail_produce(
            KafkaError.NOT_LEADER_FOR_PARTITION,
            KafkaError.REQUEST_TIMED_OUT,
            KafkaError.NOT_ENOUGH_REPLICAS,
        )
        batches = [make_messages(40, keys=1) for _ in range(3)]
        for outcomes in await asyncio.gather(*(broker.send(batch) for batch in batches)):
            assert outcomes == [Delivered()] * 40
        await broker.close()
        sent = [m.payload for batch in batches for m in batch]
        assert cluster.read("orders")[1:] == sent


async def test_after_a_fatal_error_there_is_a_new_producer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with mock_cluster() as cluster:
        cluster.create_topic("orders")
        broker = KafkaBroker(cluster.url, BrokerOptions(send_timeout_seconds=60))
        assert await broker.send(make_messages(1)) == [Delivered()]
        spent = broker._clients.link()
        cluster.fail_produce(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
        began = time.monotonic()
        outcomes = await broker.send(make_messages(20))
        assert time.monotonic() - began < 30
        assert {(type(o), o.code, o.down) for o in _failures(outcomes)} == {
            (Unknown, "fatal", "broker")
        }
        assert len(_failures(outcomes)) == 20
        assert await broker.send(make_messages(20)) == [Delivered()] * 20
        assert broker._clients.link() is not spent
        await broker.close()
    assert capfd.readouterr().err == ""


async def test_a_topic_that_the_broker_creates_by_itself() -> None:
    with mock_cluster() as cluster:
        broker = KafkaBroker(cluster.url, BrokerOptions(send_timeout_seconds=10))
        assert await broker.send([make_message(topic="newcomer")]) == [Delivered()]
        await broker.close()


# The window.


async def test_the_window_is_bounded_by_rows(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.make()
    seen = _watch_window(monkeypatch)
    extra = {"max_outstanding": "16"}
    broker = KafkaBroker(shelf.server.url, BrokerOptions(send_timeout_seconds=20, extra=extra))
    batches = [make_messages(500, topic=shelf.topic) for _ in range(3)]
    for outcomes in await asyncio.gather(*(broker.send(batch) for batch in batches)):
        assert outcomes == [Delivered()] * 500
    assert 1 < max(rows for rows, _ in seen) <= 16
    await broker.close()


async def test_the_window_is_bounded_by_bytes(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.make()
    seen = _watch_window(monkeypatch)
    monkeypatch.setattr(kafka_clients, "MAX_OUTSTANDING_BYTES", 100_000)
    batch = [make_message(b"x" * 30_000, topic=shelf.topic) for _ in range(100)]
    assert await shelf.broker.send(batch) == [Delivered()] * 100
    assert 100_000 <= max(size for _, size in seen) <= 140_000


async def test_a_full_queue_of_librdkafka_means_wait(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.make()
    settings = kafka_clients.Clients._producer_settings
    small = {"queue.buffering.max.messages": 5, "linger.ms": 20}
    monkeypatch.setattr(
        kafka_clients.Clients, "_producer_settings", lambda self: {**settings(self), **small}
    )
    broker = KafkaBroker(shelf.server.url, BrokerOptions(send_timeout_seconds=20))
    batch = make_messages(100, topic=shelf.topic)
    assert await broker.send(batch) == [Delivered()] * 100
    await broker.close()
    assert len(shelf.stored()) == 100


def _watch_window(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    give = Link.give

    def watched(link: Link, *arguments: Any) -> None:
        give(link, *arguments)
        seen.append((link.rows, link.bytes))

    monkeypatch.setattr(Link, "give", watched)
    return seen


async def test_a_cancelled_send_sends_nothing_later(shelf: Shelf) -> None:
    shelf.make()
    shelf.server.require_private()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    batch = make_messages(3000, topic=shelf.topic)
    with shelf.server.paused():
        sending = asyncio.create_task(shelf.broker.send(batch))
        await asyncio.sleep(0.3)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert await shelf.broker.send(make_messages(10, topic=shelf.topic)) == [Delivered()] * 10


# Places.


def test_one_broker_on_two_loops_and_in_a_forked_child(kafka_server: KafkaServer) -> None:
    script = """
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[2])
        from helpers_messages import make_messages
        from postroom.brokers import Delivered
        from postroom.brokers.kafka import KafkaBroker

        broker = KafkaBroker(sys.argv[1])

        async def send():
            assert await broker.send(make_messages(50, topic="forked")) == [Delivered()] * 50

        async def last():
            await send()
            await broker.close()

        asyncio.run(send())
        asyncio.run(send())
        child = os.fork()
        if child == 0:
            asyncio.run(last())
            sys.exit(0)
        asyncio.run(send())
        assert os.waitpid(child, 0)[1] == 0
        asyncio.run(last())
        print("ok")
    """
    kafka_server.create_topic("forked")
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), kafka_server.url, tests],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr
    assert done.stderr == ""


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingDriver, match=r"pip install 'postroom\[kafka\]'"):
        KafkaBroker("kafka://localhost")


def test_importing_brokers_imports_no_client() -> None:
    check = "import sys, postroom.brokers.kafka; print('confluent_kafka' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("kafka://localhost", "kafka://localhost:9092"),
        ("kafka://", "kafka://localhost:9092"),
        ("kafka://u:p%40ss@a,b:9093?security.protocol=SASL_SSL", "kafka://a:9092,b:9093"),
        ("kafka://[::1]:7,[::2]/", "kafka://[::1]:7,[::2]:9092"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert repr(KafkaBroker(url)) == shown


@pytest.mark.parametrize(
    ("url", "extra", "expected"),
    [
        ("kafka://a", {}, {}),
        (
            "kafka://u:p%40ss@a",
            {},
            {
                "sasl.username": "u",
                "sasl.password": "p@ss",
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "PLAIN",
            },
        ),
        (
            "kafka://u:p@a?security.protocol=SASL_PLAINTEXT&sasl.mechanism=SCRAM-SHA-512",
            {"compression_type": "lz4", "sasl_mechanism": "PLAIN"},
            {
                "sasl.username": "u",
                "sasl.password": "p",
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "SCRAM-SHA-512",
                "compression.type": "lz4",
            },
        ),
        (
            "kafka://a",
            {"user": "u", "password": "p"},
            {
                "sasl.username": "u",
                "sasl.password": "p",
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "PLAIN",
            },
        ),
        (
            "kafka://a?tls_ca=/some/ca.pem&max_outstanding=7",
            {"tls_ca": "/other.pem"},
            {"ssl.ca.location": "/some/ca.pem", "security.protocol": "SSL"},
        ),
        (
            "kafka://a",
            {"tls_ca": "/some/ca.pem"},
            {"ssl.ca.location": "/some/ca.pem", "security.protocol": "SSL"},
        ),
    ],
)
def test_settings(url: str, extra: dict[str, str], expected: dict[str, str]) -> None:
    assert kafka_clients.Address.of(url, extra).settings == expected


@pytest.mark.parametrize(
    ("url", "extra", "says"),
    [
        ("kafka://user:s3cr3t@host:port", {}, "bad Kafka URL"),
        ("kafka://user:s3cr3t@host:99999", {}, "bad Kafka URL"),
        ("kafka://user:s3cr3t@host/path", {}, "bad Kafka URL"),
        ("kafka://host?s3cr3t", {}, "bad Kafka URL"),
        ("kafka://", {"max_outstanding": "0"}, "max_outstanding"),
        ("kafka://?acks=1", {}, "acks is not yours to set"),
        *(
            (
                f"kafka://?enable.ssl.certificate.verification={no}",
                {},
                "must be true, else a server",
            )
            for no in ("false", "0", "f", "False")
        ),
        ("kafka://", {"enable_ssl_certificate_verification": "false"}, "verification must be true"),
        ("kafka://?ssl.endpoint.identification.algorithm=none", {}, "must be https, else"),
        ("kafka://?isolation.level=read_uncommitted", {}, "must be read_committed, else"),
        ("kafka://", {"enable.idempotence": "false"}, "enable.idempotence is not yours"),
        ("kafka://", {"no_such": "s3cr3t"}, 'No such configuration property: "no.such"'),
        ("kafka://?no.such=s3cr3t", {}, 'No such configuration property: "no.such"'),
        ("kafka://", {"tls_ca": "/nowhere"}, "ssl.ca.location"),
        ("kafka://", {"ssl.key.password": "s3cr3t", "ssl.key.pem": "s3cr3t"}, "ssl.key.pem"),
    ],
)
def test_bad_settings_are_refused_without_showing_secrets(
    url: str, extra: dict[str, str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        KafkaBroker(url, BrokerOptions(extra=extra))
    assert "s3cr3t" not in str(caught.value) + "".join(capfd.readouterr())


# What the doctor is told.


async def test_dangers_are_named(shelf: Shelf) -> None:
    shelf.make()
    wild = f"{shelf.topic}-wild"
    shelf.make(wild, unclean_leader_election_enable="true", cleanup_policy="compact")
    found = await shelf.broker.examine([shelf.topic, "nowhere", wild, "x" * 250])
    assert [text.partition(":")[0] for text in found] == [
        f"topic {shelf.topic} has one copy of each message",
        "topic nowhere does not exist and the broker does not create it",
        f"topic {wild} has one copy of each message",
        f"topic {wild} has unclean.leader.election.enable on",
        f"topic {wild} is compacted",
        f"topic '{'x' * 250}' is too long",
    ]
    assert "nowhere" not in shelf.server.admin.list_topics(timeout=5).topics
