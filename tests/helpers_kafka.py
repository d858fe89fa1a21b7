"""The far end of Kafka: what its topics hold, and librdkafka's cluster that fails on request."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
from confluent_kafka import Consumer, Producer, TopicPartition

from helpers import eventually
from postroom.brokers import Subscription
from servers import KafkaServer

_RK_OFFSET = object.__basicsize__  # of librdkafka's handle in the Python object


class Record(NamedTuple):
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    headers: dict[str, str]


def _ends_of(reader: Consumer, place: TopicPartition) -> tuple[int, int]:
    """The first offset and the one after the last; a server just woken up has no leader yet."""
    return eventually(
        lambda: reader.get_watermark_offsets(place, timeout=10),
        retry=(confluent_kafka.KafkaException,),
    )


def read_all(server: KafkaServer, topic: str) -> list[Record]:
    """Every record of a topic, partition by partition in their order."""
    settings = {**server.client_settings(), "group.id": "looking", "enable.auto.commit": False}
    reader = Consumer({**settings, "enable.partition.eof": True, "fetch.wait.max.ms": 10})
    try:
        partitions = reader.list_topics(topic, timeout=10).topics[topic].partitions
        ends = {p: _ends_of(reader, TopicPartition(topic, p)) for p in partitions}
        waiting = {p for p, (low, high) in ends.items() if high > low}
        reader.assign([TopicPartition(topic, p, ends[p][0]) for p in sorted(waiting)])
        found: list[Record] = []
        while waiting:
            for message in reader.consume(500, timeout=0.1):
                if message.error() is not None:
                    if message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                        waiting.discard(message.partition())
                    continue
                headers = {name: value.decode() for name, value in message.headers() or []}
                found.append(
                    Record(
                        message.partition(),
                        message.offset(),
                        message.key(),
                        message.value(),
                        headers,
                    )
                )
        return sorted(found, key=lambda record: record[:2])
    finally:
        reader.close()


async def take_nothing(subscription: Subscription, takes: int = 30) -> None:
    """Take so often, in vain: for trouble that does not show at once."""
    for _ in range(takes):
        assert await subscription.take(10) == []


class MockCluster:
    """librdkafka's own cluster for tests, which answers with errors when told to.

    It lives inside a producer that is otherwise not used; ctypes reaches what Python's library does
    not offer. It takes any sequence number, as Kafka does where it does not know the producer.
    """

    def __init__(self, brokers: int = 1) -> None:
        self._host = Producer({"test.mock.num.brokers": brokers, "logger": _Silent()})
        place = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
        self._library = ctypes.CDLL(str(next(place.glob("librdkafka-*"))))
        handle = ctypes.c_void_p.from_address(id(self._host) + _RK_OFFSET)
        find = self._library.rd_kafka_handle_mock_cluster
        find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._cluster = ctypes.c_void_p(find(handle))
        say = self._library.rd_kafka_mock_cluster_bootstraps
        say.restype = ctypes.c_char_p
        self.url = f"kafka://{say(self._cluster).decode()}"

    def fail_produce(self, *codes: int) -> None:
        """Answer the next produce requests with these errors."""
        errors = (ctypes.c_int * len(codes))(*codes)
        push = self._library.rd_kafka_mock_push_request_errors_array
        push.argtypes = [ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.c_void_p]
        push(self._cluster, 0, len(codes), errors)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        create = self._library.rd_kafka_mock_topic_create
        create.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        assert create(self._cluster, name.encode(), partitions, 1) == 0

    def read(self, topic: str) -> list[bytes]:
        """The values in partition 0."""
        settings: dict[str, Any] = {"bootstrap.servers": self.url.removeprefix("kafka://")}
        reader = Consumer({**settings, "group.id": "looking", "logger": _Silent()})
        try:
            place = TopicPartition(topic, 0, 0)
            _, end = _ends_of(reader, place)
            reader.assign([place])
            found: list[bytes] = []
            while len(found) < end:
                found += [m.value() for m in reader.consume(100, timeout=0.1) if not m.error()]
            return found
        finally:
            reader.close()


def produce_raw(producer: Producer, topic: str, partition: int, value: bytes, name: bytes) -> None:
    """A record with a header of any name, such as only clients in other languages make."""
    place = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    produce = ctypes.CDLL(str(next(place.glob("librdkafka-*")))).rd_kafka_producev
    end, to, of, body, header, flags = map(ctypes.c_int, (0, 1, 3, 4, 9, 7))
    copied = ctypes.c_int(2)
    failed = produce(
        ctypes.c_void_p.from_address(id(producer) + _RK_OFFSET),
        *(to, ctypes.c_char_p(topic.encode()), of, ctypes.c_int32(partition)),
        *(body, ctypes.c_char_p(value), ctypes.c_size_t(len(value)), flags, copied),
        *(header, ctypes.c_char_p(name), ctypes.c_char_p(b"v"), ctypes.c_ssize_t(1), end),
    )
    assert failed == 0


@contextmanager
def mock_cluster(brokers: int = 1) -> Iterator[MockCluster]:
    yield MockCluster(brokers)


class _Silent:
    def log(self, *_: object) -> None:
        pass
