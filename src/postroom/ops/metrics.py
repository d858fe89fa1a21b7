"""Prometheus metrics of outbox and consumers, fed by signals: counted once a batch.

    metrics.install()                  # once a process, publishers too
    metrics.exposition()               # what a scrape gets

Counters and the histogram are those of this process; where PROMETHEUS_MULTIPROC_DIR is set, of all
processes that share it. Gauges speak for the whole database and come from one elected relay; where
it is not this one, or has not measured lately, they are left out rather than wrong. No metric has
a label that grows: ids, keys and topics are none. What a consumer does has its name as a label.
"""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

from postroom import signals
from postroom.errors import MissingDriver

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        REGISTRY,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        Metric,
        generate_latest,
        multiprocess,
    )
except ImportError:
    raise MissingDriver(
        "metrics need prometheus-client: pip install 'postroom[prometheus]'"
    ) from None

__all__ = ["AGE_BUCKETS", "GAUGES", "Metrics", "exposition", "install"]

AGE_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)
# A gauge that was not measured for so long is not known any more.
STALE_SECONDS = 30.0
RESULTS = ("delivered", "transient", "permanent", "unknown", "down")
# Gauge: the field of `outbox.measured` it shows, and what it means.
GAUGES = {
    "outbox_pending_records": (
        "pending",
        "Messages to be delivered, held ones too: exact up to 10,000, an estimate beyond.",
    ),
    "outbox_oldest_pending_age_seconds": (
        "oldest_pending_seconds",
        "How long the oldest pending message has waited.",
    ),
    "outbox_held_records": ("held", "Messages that wait behind a failure or a dead letter."),
    "outbox_held_keys": ("held_keys", "Keys that wait behind a failure or a dead letter."),
    "outbox_blocked_keys": ("blocked_keys", "Keys that wait behind a dead letter."),
    "outbox_delayed_records": ("delayed", "Messages that are not due yet."),
    "outbox_dead_letters": ("dead", "Dead letters that need a person."),
    "outbox_lanes_unowned": ("lanes_unowned", "Lanes that no relay works."),
    "outbox_workers_silent": (
        "workers_silent",
        "Workers that ended without stopping, or are stuck: silent for 15 seconds to 10 minutes.",
    ),
    "outbox_oldest_open_publisher_seconds": (
        "oldest_open_publisher_seconds",
        "PostgreSQL: how long the oldest transaction that publishes is open.",
    ),
}
# Gauge of a consumer: the field of `inbox.measured` it shows, and what it means.
INBOX_GAUGES = {
    "inbox_held_records": ("held", "Messages that wait in a consumer, dead letters too."),
    "inbox_blocked_records": ("blocked", "Dead letters of a consumer that need a person."),
    "inbox_oldest_held_age_seconds": (
        "oldest_held_seconds",
        "How long the oldest message that is not dead has waited in a consumer.",
    ),
    "inbox_held_keys": ("held_keys", "Keys that wait in a consumer."),
    "inbox_lag_records": (
        "lag",
        "Messages this process has not received yet, if the broker reports them.",
    ),
    "inbox_workers_silent": (
        "workers_silent",
        "Processes of a consumer that ended without stopping: silent for 15 seconds to 10 minutes.",
    ),
}
# Counter of a consumer: the signal it counts, and what it means.
INBOX_EVENTS = {
    "inbox_received": ("delivery.received", "Messages received from the broker."),
    "inbox_handled": ("delivery.handled", "Messages handled and committed."),
    "inbox_duplicates": ("delivery.duplicate", "Messages that were known already, and skipped."),
    "inbox_skipped": ("delivery.skipped", "Messages of types nobody handles, passed over."),
    "inbox_failed": ("delivery.failed", "Times a handler failed and its message was kept."),
    "inbox_buried": ("delivery.buried", "Messages that became dead letters of a consumer."),
    "inbox_seats_lost": ("seat.lost", "Sources lost to another process of the consumer."),
    "inbox_broker_lost": ("consumer.broker_lost", "Times the broker could not be reached."),
}
# Counter: the signal it counts, and what it means.
EVENTS = {
    "outbox_lanes_lost": ("lane.lost", "Lanes lost to another relay or to time."),
    "outbox_database_lost": ("database.lost", "Times the database could not be reached."),
    "outbox_destination_down": (
        "destination.down",
        "Outages of brokers and topics, as each relay met them.",
    ),
    "outbox_late": ("lane.late", "Messages found behind the watermark: each is a bug."),
    "outbox_missing": ("message.missing", "Messages that were gone when they were settled."),
    "idempotency_executed": ("key.executed", "Requests with a key that were carried out."),
    "idempotency_replayed": ("key.replayed", "Requests that were answered from memory."),
    "idempotency_refused": ("key.refused", "Requests refused because no key could be claimed."),
    "idempotency_lost": ("key.lost", "Requests whose key was somebody else's in the end."),
    "idempotency_indeterminate": ("key.indeterminate", "Requests that nobody knows the end of."),
    "idempotency_unprotected": ("key.unprotected", "Requests of which nothing is remembered."),
    "idempotency_failed": ("key.failed", "Times a resumable run failed."),
    "idempotency_resumed": ("key.resumed", "Requests that a worker went on with."),
}


class _Ages(Histogram):
    """A histogram that takes many values at once."""

    def observe_all(self, values: Iterable[float]) -> None:
        """As `observe` for each, at the cost of one for each bucket."""
        ordered = sorted(values)
        begin = 0
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            end = bisect_right(ordered, bound)
            if end > begin:
                bucket.inc(end - begin)
                begin = end
        self._sum.inc(math.fsum(ordered))


class _Known(Gauge):
    """A gauge that is shown only while its value is known."""

    def know(self, value: float | None) -> None:
        """Show this from now on; None: show nothing."""
        self._known_at = time.monotonic() if value is not None else -math.inf
        # Other processes read what is written here, and a number would outlive its truth.
        self.set(math.nan if value is None else value)

    def collect(self) -> Iterable[Metric]:
        """Nothing, where nothing is known."""
        if time.monotonic() - getattr(self, "_known_at", -math.inf) > STALE_SECONDS:
            return []
        return super().collect()


class Metrics:
    """All metrics, in a registry, and the listener that feeds them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        self.enqueued = counter("outbox_enqueued", "Messages committed with your changes.")
        self.sent = counter("outbox_sent", "Messages delivered and written down.")
        self.failed = counter("outbox_failed", "Times a message failed and was held for a retry.")
        self.aborted = counter("outbox_aborted", "Messages given up: dead letters and expired.")
        self.dlq = counter("outbox_dlq", "Messages that became dead letters.")
        self.attempts = Counter(
            "outbox_publish_attempts",
            "Messages handed to a broker, by what came of it.",
            ["result"],
            registry=registry,
        )
        self._results = {result: self.attempts.labels(result) for result in RESULTS}
        self.age = _Ages(
            "outbox_age_seconds",
            "From creation until the broker's yes was written down.",
            buckets=AGE_BUCKETS,
            registry=registry,
        )
        self.gauges = {
            field: _Known(name, text, registry=registry, multiprocess_mode="livemostrecent")
            for name, (field, text) in GAUGES.items()
        }
        self._events = {signal: counter(name, text) for name, (signal, text) in EVENTS.items()}
        self.of_consumers = {
            signal: Counter(name, text, ["consumer"], registry=registry)
            for name, (signal, text) in INBOX_EVENTS.items()
        }
        self.inbox_age = _Ages(
            "inbox_age_seconds",
            "From creation until its handler's transaction was committed.",
            ["consumer"],
            buckets=AGE_BUCKETS,
            registry=registry,
        )
        self.inbox_gauges = {
            field: Gauge(
                name, text, ["consumer"], registry=registry, multiprocess_mode="livemostrecent"
            )
            for name, (field, text) in INBOX_GAUGES.items()
        }
        self._speaker: str | None = None

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        """Hear a signal."""
        if (react := _REACTIONS.get(name)) is not None:
            react(self, fields)
        if (mine := self.of_consumers.get(name)) is not None:
            mine.labels(fields["consumer"]).inc(fields.get("count", 1))
        elif (event := self._events.get(name)) is not None:
            event.inc(fields.get("count", 1))

    def _committed(self, fields: dict[str, Any]) -> None:
        self.enqueued.inc(fields["count"])

    def _attempted(self, fields: dict[str, Any]) -> None:
        for result, counter in self._results.items():
            if fields[result]:
                counter.inc(fields[result])

    def _delivered(self, fields: dict[str, Any]) -> None:
        self.sent.inc(fields["count"])
        self.age.observe_all(fields["ages_seconds"])

    def _held(self, fields: dict[str, Any]) -> None:
        self.failed.inc()

    def _buried(self, fields: dict[str, Any]) -> None:
        self.aborted.inc()
        self.dlq.inc()

    def _expired(self, fields: dict[str, Any]) -> None:
        self.aborted.inc()

    def _measured(self, fields: dict[str, Any]) -> None:
        self._speaker = fields["incarnation"]
        for field, gauge in self.gauges.items():
            gauge.know(fields[field])

    def _handled(self, fields: dict[str, Any]) -> None:
        self.inbox_age.labels(fields["consumer"]).observe_all(fields["ages_seconds"])

    def _inbox_measured(self, fields: dict[str, Any]) -> None:
        for field, gauge in self.inbox_gauges.items():
            value = fields[field]
            gauge.labels(fields["consumer"]).set(math.nan if value is None else value)

    def _inbox_unmeasured(self, fields: dict[str, Any]) -> None:
        for gauge in self.inbox_gauges.values():
            gauge.labels(fields["consumer"]).set(math.nan)

    def _unmeasured(self, fields: dict[str, Any]) -> None:
        # Another relay of this process may have been elected since.
        if self._speaker == fields["incarnation"]:
            self._speaker = None
            for gauge in self.gauges.values():
                gauge.know(None)


_REACTIONS: dict[str, Callable[[Metrics, dict[str, Any]], None]] = {
    "message.committed": Metrics._committed,
    "message.attempted": Metrics._attempted,
    "message.delivered": Metrics._delivered,
    "message.held": Metrics._held,
    "message.buried": Metrics._buried,
    "message.expired": Metrics._expired,
    "outbox.measured": Metrics._measured,
    "outbox.unmeasured": Metrics._unmeasured,
    "delivery.handled": Metrics._handled,
    "inbox.measured": Metrics._inbox_measured,
    "inbox.unmeasured": Metrics._inbox_unmeasured,
}
HEARD = frozenset(_REACTIONS) | {signal for signal, _ in (*EVENTS.values(), *INBOX_EVENTS.values())}
_lock = threading.Lock()
_installed: Metrics | None = None


def install() -> Metrics:
    """Begin to count, in prometheus_client's default registry. A second call changes nothing."""
    global _installed
    with _lock:
        if _installed is None:
            _installed = Metrics()
            signals.listen(_installed, only=HEARD)
        return _installed


def exposition() -> tuple[str, bytes]:
    """Content type and text of all metrics, for a scrape."""
    registry = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return CONTENT_TYPE_LATEST, generate_latest(registry)
