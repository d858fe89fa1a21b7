"""The thread that owns a consumer of librdkafka: it fetches, commits, and keeps the membership.

All that is done to the consumer is done here, so that no commit can cross a partition's being taken
away. It goes on polling while the shelf is full, with the partitions paused: handlers may take
longer than `max.poll.interval.ms`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from postroom.brokers.kafka_shelf import Partition, Shelf
from postroom.brokers.kafka_wire import ALL_BROKERS_DOWN, as_delivery, unreadable

__all__ = ["Pump"]

_POLL_SECONDS = 0.05
_QUICK_SECONDS = 0.002  # nothing can wake a poll, and acknowledgements wait for its end
_PAUSE_AFTER_SECONDS = 0.5  # pausing throws away what librdkafka has fetched ahead
_MEASURE_SECONDS = 1.0
_PROBE_SECONDS = 1.0
_COMMIT_AGAIN_SECONDS = 0.1
_REBALANCING = {22, 25, 27}  # illegal generation, unknown member, rebalance in progress
_ONE_SERVER = {-195, -193}  # its connection, its name: others may be well
_NO_NEWS = {-191, -147}  # the end of a partition; too late a poll, after which it joins again


class Pump:
    """Runs in a thread from `start` until `stop`; `told` hears of commits and of trouble."""

    def __init__(
        self,
        library: Any,
        settings: dict[str, Any],
        topics: Sequence[str],
        shelf: Shelf,
        *,
        on_commit: Callable[[str | None], None],
        on_end: Callable[[], None],
        without_secrets: Callable[[str], str],
    ) -> None:
        self.trouble: str | None = None  # why nothing comes, until it is told
        self.joining_since: float | None = None  # by the monotonic clock; None: it is a member
        self.behind: int | None = None  # records of our partitions that were not fetched yet
        self._measured_at = float("-inf")
        self._last: str | None = None
        self._library = library
        self._settings = settings
        self._topics = list(topics)
        self._shelf = shelf
        self._on_commit, self._on_end = on_commit, on_end
        self._without_secrets = without_secrets
        self._stopping = False
        self._fatal = False
        self._lost = False  # no server could be reached when we last heard
        self._probed_at = 0.0
        self._commit_after = 0.0
        self._full_since: float | None = None
        self._paused = False
        self._pause_anew = False  # partitions came that are not paused
        self._thread = threading.Thread(target=self._run, name="postroom-kafka", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave the group, after a last commit. It is over when `on_end` is called."""
        with self._shelf.changed:
            self._stopping = True
            self._shelf.changed.notify_all()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._serve()
        finally:
            self._on_end()

    def _serve(self) -> None:
        """One consumer, from its making to its end: ours, or a fatal error's."""
        consumer: Any = None
        try:
            consumer = self._library.Consumer({**self._settings, "error_cb": self._on_error})
            self._fatal = self._paused = False
            self.joining_since = time.monotonic()
            consumer.subscribe(
                self._topics,
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._stopping and not self._fatal:
                self._turn(consumer)
            self._commit(consumer, self._shelf.partitions)
        except Exception as error:  # a bug, or what librdkafka refuses: told to those who take
            self.trouble = self._said(error)
            with self._shelf.changed:
                self._shelf.changed.wait(_PROBE_SECONDS)
        finally:
            if consumer is not None:
                self._close(consumer)

    def _turn(self, consumer: Any) -> None:
        self._commit(consumer)
        self._measure(consumer)
        if self._lost:
            self._probe(consumer)
        if self._shelf.room:
            self._full_since = None
            if self._paused:
                consumer.resume(consumer.assignment())
                self._paused = False
            self._fetch(consumer)
            return
        now = time.monotonic()
        self._full_since = self._full_since or now
        if now - self._full_since < _PAUSE_AFTER_SECONDS:
            with self._shelf.changed:
                if not self._stopping and not self._shelf.room:
                    self._shelf.changed.wait(_POLL_SECONDS)
            return
        if not self._paused or self._pause_anew:
            consumer.pause(consumer.assignment())
            self._paused, self._pause_anew = True, False
        self._put([consumer.poll(_QUICK_SECONDS)])

    def _measure(self, consumer: Any) -> None:
        """Count what the partitions hold beyond our positions, as librdkafka knows them here."""
        now = time.monotonic()
        if now - self._measured_at < _MEASURE_SECONDS:
            return
        self._measured_at = now
        self.behind, behind = None, 0
        with contextlib.suppress(self._library.KafkaException):  # a figure never stops the work
            for place in consumer.position(consumer.assignment()):
                _, end = consumer.get_watermark_offsets(place, cached=True)
                behind += max(0, end - place.offset) if end >= 0 and place.offset >= 0 else 0
            self.behind = behind

    def _fetch(self, consumer: Any) -> None:
        # `consume` alone would wait for a whole batch.
        first = consumer.poll(_QUICK_SECONDS if self._shelf.in_hand else _POLL_SECONDS)
        if first is None:
            return
        claim = self._claim_of(first)
        rest = consumer.consume(self._shelf.room, 0)
        # `consume` serves rebalances: the partition may be reassigned to us at an earlier position.
        self._put([first, *rest] if self._claim_of(first) == claim else rest)

    def _claim_of(self, message: Any) -> int | None:
        return self._shelf.claim_of((message.topic(), message.partition()))

    def _put(self, messages: Sequence[Any]) -> None:
        found = []
        for message in messages:
            if message is None:
                continue
            if (error := message.error()) is not None:
                self._hear(error, message.topic())
                continue
            topic, partition = message.topic(), message.partition()
            claim = self._claim_of(message)
            if claim is not None:
                source = f"{topic}/{partition}"
                offset = message.offset()
                found.append(
                    as_delivery(message, topic, partition, offset, source=source, claim=claim)
                )
        if found:
            self.trouble, self._lost = None, False
            self._shelf.put(found)

    # Commits.

    def _commit(self, consumer: Any, only: Sequence[Partition] | None = None) -> None:
        if only is None and time.monotonic() < self._commit_after:
            return
        positions = self._shelf.to_commit(only)
        if not positions:
            return
        make = self._library.TopicPartition
        offsets = [make(topic, number, offset) for (topic, number), offset in positions.items()]
        try:
            answers = consumer.commit(offsets=offsets, asynchronous=False)
        except self._library.KafkaException as error:
            self._not_committed(error.args[0])
            return
        failed = [each for each in answers if each.error is not None]
        for each in failed:
            positions.pop((each.topic, each.partition), None)
        self._shelf.committed(positions)
        if failed:
            self._not_committed(failed[0].error)
        else:
            self._on_commit(None)

    def _not_committed(self, error: Any) -> None:
        """Try again soon. While members come and go that is all; else those who wait are told."""
        self._commit_after = time.monotonic() + _COMMIT_AGAIN_SECONDS
        if error.code() not in _REBALANCING:
            self._on_commit(self._without_secrets(error.str()))

    # What librdkafka tells, in this thread.

    def _on_assign(self, _: Any, partitions: Sequence[Any]) -> None:
        self.trouble, self._lost = None, False
        self.joining_since = None
        self._pause_anew = True
        self._shelf.assigned(_names(partitions))

    def _on_revoke(self, consumer: Any, partitions: Sequence[Any]) -> None:
        names = _names(partitions)
        self._commit(consumer, names)
        self._shelf.revoked(names)

    def _on_lost(self, _: Any, partitions: Sequence[Any]) -> None:
        self.joining_since = time.monotonic()
        self._shelf.revoked(_names(partitions))

    def _on_error(self, error: Any) -> None:
        self._hear(error, None)

    def _hear(self, error: Any, topic: str | None) -> None:
        code = error.code()
        if error.fatal():
            self._fatal = True
        if code in _NO_NEWS:
            return
        text = unreadable(code, self._without_secrets(error.str()), topic)
        if code in _ONE_SERVER:
            self._last = text
            return
        if code == ALL_BROKERS_DOWN:
            self._lost = True
            text = self._last or text
        self.trouble = text

    def _probe(self, consumer: Any) -> None:
        """See whether the servers are back: librdkafka does not tell."""
        if time.monotonic() - self._probed_at < _PROBE_SECONDS:
            return
        self._probed_at = time.monotonic()
        try:
            consumer.list_topics(self._topics[0], _PROBE_SECONDS / 2)
        except self._library.KafkaException as error:
            self.trouble = self._last or self._said(error)
        else:
            self.trouble, self._lost = None, False

    # The end.

    def _close(self, consumer: Any) -> None:
        try:
            consumer.close()
        except Exception as error:
            self.trouble = self._said(error)
        self._shelf.revoked(self._shelf.partitions)

    def _said(self, error: Exception) -> str:
        said = error.args[0] if error.args else error
        text = said.str() if isinstance(said, self._library.KafkaError) else str(error)
        return self._without_secrets(text)


def _names(partitions: Sequence[Any]) -> list[Partition]:
    return [(each.topic, each.partition) for each in partitions]
