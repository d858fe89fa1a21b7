"""Alerts: told once, folded while they last, told once more when over; and nobody waits for it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import eventually
from postroom import signals
from postroom.alerts import ALERTS, QUEUE_LIMIT, Alert, Alerts

FIGURES: dict[str, Any] = {
    "pending": 5, "oldest_pending_seconds": 1.0, "held": 0, "held_keys": 0, "blocked_keys": 0,
    "delayed": 0, "dead": 0, "lanes_unowned": 0, "workers_silent": 0,
    "oldest_open_publisher_seconds": None,
}  # fmt: skip


class Desk:
    """Alerts with a clock of their own, and whoever is told of them."""

    def __init__(self, *more: Any) -> None:
        self.now = 1_000.0
        self.told: list[Alert] = []
        self.alerts = Alerts(
            [self.told.append, *more],
            incarnation="me",
            worker="mail-1",
            stale_seconds=300,
            repeat_seconds=3600,
            clock=lambda: self.now,
        )
        self.alerts.start()

    def bury(self, incarnation: str = "me", **fields: Any) -> None:
        buried: dict[str, Any] = {
            "id": "7", "topic": "orders", "key": "k", "lane": 1, "status": "aborted",
            "attempts": 6, "last_error_code": "busy", "adapter": "nats://a", "holds_key": False,
        }  # fmt: skip
        signals.emit("message.buried", **(buried | {"incarnation": incarnation} | fields))

    def measure(self, **figures: Any) -> None:
        self.now += 5
        signals.emit("outbox.measured", **({"incarnation": "me"} | FIGURES | figures))

    def heard(self) -> list[tuple[str, str, int]]:
        self.alerts._post.stop(10)
        found = [(alert.alert, alert.state, alert.count) for alert in self.told]
        self.told.clear()
        return found


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.alerts.stop()


def test_the_same_alert_is_folded_and_its_end_told_once(desk: Desk) -> None:
    desk.bury()
    assert desk.heard() == [("attempts_spent", "raised", 1)]
    for _ in range(50):
        desk.bury()
    desk.measure(dead=51)
    assert desk.heard() == []
    desk.now += 3600
    desk.measure(dead=51)  # nothing new has happened, but nobody was told of the fifty
    assert desk.heard() == [("attempts_spent", "raised", 51)]
    desk.now += 3600
    desk.measure(dead=51)
    assert desk.heard() == []
    desk.measure()
    assert desk.heard() == []  # once may be in the middle of a change
    desk.measure()
    desk.measure()
    assert desk.heard() == [("attempts_spent", "resolved", 51)]
    desk.bury()
    assert desk.heard() == [("attempts_spent", "raised", 1)]


def test_a_key_that_is_held_is_told_by_itself(desk: Desk) -> None:
    desk.bury(holds_key=True, key="order-9")
    desk.alerts._post.stop(10)
    (_, held) = desk.told
    assert held.alert == "key_held"
    assert "'order-9' of topic orders is held by the dead letter 7" in held.text
    desk.heard()
    desk.measure(dead=1)
    desk.measure(dead=1)
    assert desk.heard() == [("key_held", "resolved", 1)]


def test_a_stale_backlog_is_told_after_two_looks(desk: Desk) -> None:
    desk.measure(oldest_pending_seconds=301.0)
    assert desk.heard() == []
    desk.measure(oldest_pending_seconds=2.0)
    desk.measure(oldest_pending_seconds=301.0)
    assert desk.heard() == []
    desk.measure(oldest_pending_seconds=306.0)
    assert desk.heard() == [("stale_backlog", "raised", 1)]
    for _ in range(10):
        desk.measure(oldest_pending_seconds=400.0)
    assert desk.heard() == []
    desk.now += 3600
    desk.measure(oldest_pending_seconds=4000.0)
    assert desk.heard() == [("stale_backlog", "raised", 12)]
    desk.measure(oldest_pending_seconds=1.0)
    desk.measure(oldest_pending_seconds=1.0)
    assert desk.heard() == [("stale_backlog", "resolved", 12)]


def test_lanes_without_an_owner_are_told(desk: Desk) -> None:
    desk.measure(lanes_unowned=3)
    desk.measure(lanes_unowned=2)
    assert desk.heard() == [("lane_unowned", "raised", 1)]
    desk.measure()
    assert desk.heard() == [("lane_unowned", "resolved", 1)]


def test_who_speaks_no_more_for_the_outbox_ends_nothing(desk: Desk) -> None:
    for _ in range(2):
        desk.measure(oldest_pending_seconds=400.0)
    desk.bury()
    desk.heard()
    signals.emit("outbox.unmeasured", incarnation="me")
    assert desk.heard() == []
    assert desk.alerts.waiting
    desk.alerts.letters(0, 0)
    desk.alerts.letters(0, 0)
    assert desk.heard() == [("attempts_spent", "resolved", 1)]
    assert not desk.alerts.waiting


def test_what_another_relay_of_the_process_hears_is_not_ours(desk: Desk) -> None:
    desk.bury(incarnation="you")
    assert desk.heard() == []


def test_an_alert_is_a_document_with_all_that_is_needed(desk: Desk) -> None:
    desk.bury()
    desk.alerts._post.stop(10)
    document = desk.told[0].document()
    assert set(document) == {"alert", "state", "text", "count", "since", "worker"}
    assert document["worker"] == "mail-1"
    assert "postroom dead show 7" in document["text"]
    assert set(ALERTS) >= {document["alert"]}


def test_asynchronous_receivers_and_those_that_fail() -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    told: list[str] = []

    async def later(alert: Alert) -> None:
        await asyncio.sleep(0)
        told.append(alert.alert)

    def broken(alert: Alert) -> None:
        raise RuntimeError("cannot reach https://user:canary-pa55@hooks.example/x")

    stop = signals.listen(lambda name, fields: heard.append((name, fields)))
    desk = Desk(broken, later)
    try:
        desk.bury()
        desk.alerts.stop()
    finally:
        stop()
    assert told == ["attempts_spent"]
    (lost,) = [fields for name, fields in heard if name == "alert.lost"]
    assert "canary" not in repr(heard)
    assert lost["error"] == "RuntimeError: cannot reach https://user:***@hooks.example/x"
    assert [name for name, _ in heard].count("alert.raised") == 1


def test_a_slow_receiver_keeps_nobody_waiting_and_nothing_piles_up() -> None:
    lost: list[dict[str, Any]] = []
    stop = signals.listen(
        lambda name, fields: lost.append(fields) if name == "alert.lost" else None
    )
    release = threading.Event()
    desk = Desk(lambda alert: release.wait(60))
    try:
        begun = time.perf_counter()
        for _ in range(QUEUE_LIMIT + 10):
            desk.bury()
            desk.alerts.letters(0, 0)
            desk.alerts.letters(0, 0)
        assert time.perf_counter() - begun < 30
        assert lost[-1]["count"] >= QUEUE_LIMIT
        release.set()
        eventually(lambda: desk.alerts._post._thread is None)
        assert len(desk.told) <= QUEUE_LIMIT + 1
    finally:
        release.set()
        desk.alerts.stop()
        stop()


def test_a_silent_worker_is_told_once_and_when_it_is_over(desk: Desk) -> None:
    desk.measure(workers_silent=1)
    assert desk.heard() == []
    desk.measure(workers_silent=1)
    assert desk.heard() == [("worker_silent", "raised", 1)]
    desk.measure(workers_silent=0)
    assert desk.heard() == [("worker_silent", "resolved", 1)]
