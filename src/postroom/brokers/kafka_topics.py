"""Asking Kafka about itself: whether it answers, whether a topic is there, and what would lose
messages. All of it blocks, and is called in threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from postroom.brokers.base import Outcome
from postroom.brokers.kafka_wire import (
    ALL_BROKERS_DOWN,
    LEADER_NOT_AVAILABLE,
    TOPIC_OR_PARTITION_UNKNOWN,
    UNKNOWN_TOPIC,
    judge,
    no_topic,
    topic_fault,
)

__all__ = ["Admin", "ask_topic"]

_CREATION_SECONDS = 1.0  # a topic that the broker creates by itself is there by then
_HIDDEN = (
    "the settings of topics could not be read, so not all dangers are seen: "
    "give this user the right to describe configs"
)
_COMING = {LEADER_NOT_AVAILABLE, TOPIC_OR_PARTITION_UNKNOWN, UNKNOWN_TOPIC}


def ask_topic(producer: Any, topic: str, seconds: float) -> Outcome | int:
    """What keeps a topic from taking messages, or how many partitions it has. A broker that creates
    topics by itself is moved to do so by the question. Raises librdkafka's own error if nobody
    answers."""
    until = time.monotonic() + min(_CREATION_SECONDS, seconds)
    while True:
        found = producer.list_topics(topic, seconds).topics.get(topic)
        if found is not None and found.error is None and found.partitions:
            return len(found.partitions)
        code = TOPIC_OR_PARTITION_UNKNOWN if not found or not found.error else found.error.code()
        if code not in _COMING:
            return judge(code, found.error.str(), topic)
        if time.monotonic() > until:
            return no_topic(topic)
        time.sleep(0.1)


class Admin:
    """A client that only asks. It goes to whichever server answers, and creates nothing."""

    def __init__(
        self, library: Any, settings: dict[str, Any], without_secrets: Callable[[str], str]
    ) -> None:
        self.error: str | None = None
        self._without_secrets = without_secrets
        self._library = library
        self._client = library.admin.AdminClient({**settings, "error_cb": self._on_error})

    def reach(self, seconds: float) -> None:
        """Get an answer from the cluster, or raise."""
        client = self._client
        try:
            client.describe_cluster(request_timeout=seconds).result(seconds + 1)
            self.error = None
        finally:
            client.poll(0)

    def examine(self, topics: Sequence[str], seconds: float) -> list[str]:
        """A sentence for each danger to messages of these topics."""
        cluster = self._client.list_topics(timeout=seconds)
        brokers = self._configuration("BROKER", [str(min(cluster.brokers))], seconds)
        creates = next(iter(brokers.values()), {}).get("auto.create.topics.enable") == "true"
        there = [topic for topic in topics if topic in cluster.topics]
        settings = self._configuration("TOPIC", there, seconds)
        warnings = [] if len(settings) == len(there) else [_HIDDEN]
        for topic in topics:
            if fault := topic_fault(topic):
                warnings.append(fault.text)
            elif topic not in cluster.topics:
                warnings.append(_missing(topic, creates))
            else:
                copies = min(
                    (len(p.replicas) for p in cluster.topics[topic].partitions.values()), default=1
                )
                warnings += _dangers(topic, copies, settings.get(topic, {}))
        return warnings

    def keeps(self, topics: Sequence[str], seconds: float) -> dict[str, float | None]:
        """The seconds for which Kafka keeps messages of these topics; None: for ever."""
        cluster = self._client.list_topics(timeout=seconds)
        there = [topic for topic in topics if topic in cluster.topics]
        settings = self._configuration("TOPIC", there, seconds)
        return {topic: _kept_seconds(found) for topic, found in settings.items()}

    def give_up(self) -> list[Any]:
        """End it. Gives the client, in a box that holds the last reference to it."""
        box = [self._client] if self._client is not None else []
        self._client = None
        return box

    def _configuration(
        self, kind: str, names: Sequence[str], seconds: float
    ) -> dict[str, dict[str, str]]:
        admin = self._library.admin
        asked = [admin.ConfigResource(getattr(admin.ResourceType, kind), name) for name in names]
        found: dict[str, dict[str, str]] = {}
        for resource, answer in (
            self._client.describe_configs(asked, request_timeout=seconds).items() if asked else ()
        ):
            try:
                entries = answer.result(seconds + 1)
            except self._library.KafkaException:
                continue  # not everybody may see settings
            found[resource.name] = {name: entry.value for name, entry in entries.items()}
        return found

    def _on_error(self, error: Any) -> None:
        if error.code() != ALL_BROKERS_DOWN or self.error is None:  # which says nothing of why
            self.error = self._without_secrets(error.str())


def _kept_seconds(settings: dict[str, str]) -> float | None:
    milliseconds = int(settings.get("retention.ms", -1))
    for_ever = milliseconds < 0 or "delete" not in settings.get("cleanup.policy", "delete")
    return None if for_ever else milliseconds / 1000


def _missing(topic: str, creates: bool) -> str:
    if creates:
        return (
            f"topic {topic} does not exist, and the first message will create it with the broker's "
            "defaults for partitions and copies: create it yourself, as you want it"
        )
    return no_topic(topic).text


def _dangers(topic: str, copies: int, settings: dict[str, str]) -> list[str]:
    dangers = []
    if copies < 2:
        dangers.append(
            f"topic {topic} has one copy of each message: a lost disk loses them; "
            "give it a replication factor of 3"
        )
    elif settings.get("min.insync.replicas") == "1":
        dangers.append(
            f"topic {topic} has min.insync.replicas 1: a message counts as delivered while one "
            "server alone has it; set it to 2"
        )
    if settings.get("unclean.leader.election.enable") == "true":
        dangers.append(
            f"topic {topic} has unclean.leader.election.enable on: a server that lags may take "
            "over and drop delivered messages; set it to false"
        )
    if "compact" in settings.get("cleanup.policy", ""):
        dangers.append(
            f"topic {topic} is compacted: Kafka keeps only the last message of a key; "
            "set cleanup.policy to delete unless consumers may miss the ones before"
        )
    return dangers
