"""Prometheus metrics: their names, what they count, and that many processes make one sum."""

import os
import random
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from helpers import eventually_async
from postroom import Outbox, Relay, RetryPolicy, signals
from postroom.brokers import memory
from postroom.brokers.base import Permanent, Transient
from postroom.databases import migrate
from postroom.databases.urls import resolve
from postroom.messages import Draft
from postroom.ops import metrics
from postroom.ops.metrics import AGE_BUCKETS, GAUGES, Metrics
from postroom.outbox import watch

WANTED = {
    "outbox_enqueued_total", "outbox_sent_total", "outbox_failed_total", "outbox_aborted_total",
    "outbox_age_seconds_bucket", "outbox_pending_records", "outbox_oldest_pending_age_seconds",
    "outbox_publish_attempts_total", "outbox_dlq_total", "outbox_oldest_open_publisher_seconds",
    "outbox_held_keys", "outbox_held_records",
}  # fmt: skip
FIGURES: dict[str, Any] = {field: 7 for field, _ in GAUGES.values()}


class Scrape:
    """The metrics of one registry, fed by signals."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def __getitem__(self, series: str) -> float | None:
        return values(self.text).get(series)


def values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.split("\n") if line and line[0] != "#"]
    return {series: float(value) for series, _, value in lines if "_created" not in series}


@pytest.fixture
def scrape() -> Iterator[Scrape]:
    scrape = Scrape()
    stop = signals.listen(scrape.metrics)
    yield scrape
    stop()


def measured(incarnation: str = "a", **figures: Any) -> None:
    signals.emit("outbox.measured", **({"incarnation": incarnation} | FIGURES | figures))


def test_the_names_are_those_that_were_asked_for(scrape: Scrape) -> None:
    measured()
    names = {series.partition("{")[0] for series in values(scrape.text)}
    assert names >= WANTED
    assert {name for name in names if not name.startswith(("outbox_", "idempotency_"))} == set()


async def test_what_a_relay_does_is_counted(
    database_url: str, scrape: Scrape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MEASURE_SECONDS", 0.2)
    await migrate.install(database_url)
    name = uuid.uuid4().hex
    broker = memory.broker(name)
    broker.fail(lambda m: m.key == "dead", Permanent("no", "never"), times=None)
    broker.fail(lambda m: m.key == "twice", Transient("busy", "later"), times=2)
    from sqlalchemy.ext.asyncio import create_async_engine

    target = resolve(database_url)
    engine = create_async_engine(target.url, connect_args=target.connect_args)
    drafts = [Draft(payload=n, type="note", key=f"k{n}") for n in range(200)]
    drafts += [Draft(payload=0, type="note", key="dead"), Draft(payload=0, type="note", key="dead")]
    drafts += [Draft(payload=0, type="note", key="twice")]
    async with engine.begin() as connection:
        await Outbox().publish_many_async(connection, drafts)
    async with engine.connect() as connection:
        await Outbox().publish_many_async(connection, drafts)
        await connection.rollback()
    await engine.dispose()
    relay = Relay(database_url, f"memory://{name}", retry=RetryPolicy((0.05,), attempts=3))
    async with relay:
        await eventually_async(lambda: scrape["outbox_sent_total"] == 201, 30)
        await eventually_async(lambda: scrape["outbox_pending_records"] == 1)
        assert scrape["outbox_enqueued_total"] == 203
        assert scrape["outbox_failed_total"] == 2
        assert scrape["outbox_aborted_total"] == scrape["outbox_dlq_total"] == 1
        assert scrape['outbox_publish_attempts_total{result="delivered"}'] == 201
        assert scrape['outbox_publish_attempts_total{result="transient"}'] == 2
        assert scrape['outbox_publish_attempts_total{result="permanent"}'] == 1
        assert scrape["outbox_age_seconds_count"] == 201
        assert scrape['outbox_age_seconds_bucket{le="120.0"}'] == 201
        assert scrape['outbox_age_seconds_bucket{le="0.005"}'] < 201  # type: ignore[operator]
        assert scrape["outbox_dead_letters"] == scrape["outbox_blocked_keys"] == 1
        assert scrape["outbox_held_records"] == 2
        assert scrape["outbox_lanes_unowned"] == 0
    # Nobody measures any more: nothing is shown, rather than what was.
    assert scrape["outbox_pending_records"] is None
    memory._brokers.pop(name, None)


def test_many_ages_at_once_are_as_one_after_the_other(scrape: Scrape) -> None:
    ages = [random.expovariate(0.1) for _ in range(1_000)] + list(AGE_BUCKETS) + [0.0, 5_000.0]
    plain = CollectorRegistry()
    histogram = Histogram("outbox_age_seconds", "x", buckets=AGE_BUCKETS, registry=plain)
    for age in ages:
        histogram.observe(age)
    signals.emit(
        "message.delivered", lane=0, status="succeeded", count=len(ages), ages_seconds=ages
    )
    expected = values(generate_latest(plain).decode())
    found = {s: v for s, v in values(scrape.text).items() if s.startswith("outbox_age_seconds")}
    assert found == pytest.approx(expected)
    assert AGE_BUCKETS[0] == 0.005
    assert AGE_BUCKETS[-1] == 3600


def test_gauges_vanish_with_the_election_and_with_time(
    scrape: Scrape, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scrape["outbox_pending_records"] is None
    measured("a", pending=3)
    assert scrape["outbox_pending_records"] == 3
    measured("b", pending=4)
    signals.emit("outbox.unmeasured", incarnation="a")
    assert scrape["outbox_pending_records"] == 4
    signals.emit("outbox.unmeasured", incarnation="b")
    assert [name for name in GAUGES if f"\n{name} " in scrape.text] == []
    measured("b", oldest_open_publisher_seconds=None)
    assert scrape["outbox_oldest_open_publisher_seconds"] is None
    assert scrape["outbox_pending_records"] == 7
    monkeypatch.setattr(metrics, "STALE_SECONDS", -1.0)  # a stuck relay measures no more
    assert scrape["outbox_pending_records"] is None


def test_a_million_ids_are_no_more_series_than_one(scrape: Scrape) -> None:
    def fail(n: int) -> None:
        message = {"id": str(uuid.uuid4()), "topic": f"t{n}", "key": f"k{n}", "lane": n % 16}
        message |= {"attempts": n, "last_error_code": f"code-{n}", "adapter": f"nats://host-{n}"}
        signals.emit("message.held", **message, status="failed", delay_seconds=float(n))
        signals.emit(
            "message.buried", **message, status="aborted", holds_key=True, incarnation=f"i{n}"
        )
        signals.emit(
            "destination.down",
            destination=f"topic t{n}",
            error_code=f"code-{n}",
            error=f"x{n}",
            retry_in_seconds=1.0,
        )

    fail(0)
    before = len(values(scrape.text))
    for n in range(5_000):
        fail(n)
    assert len(values(scrape.text)) == before
    labels = set(re.findall(r"(\w+)=\"", scrape.text))
    assert labels == {"le", "result"}


CHILD = """
import os, sys, time
from postroom import signals
from postroom.ops import metrics
signals.check_fields()
metrics.install()
children = []
for n in range(3):
    pid = os.fork()
    if not pid:
        signals.emit("message.committed", count=10)
        signals.emit(
            "message.delivered", lane=0, status="succeeded", count=2, ages_seconds=[0.3, 7.0]
        )
        signals.emit("message.attempted", adapter="x", delivered=2, transient=0, permanent=0,
                     unknown=0, down=0)
        if n < 2:
            time.sleep(0.05 * n)
            signals.emit("outbox.measured", incarnation=str(n), pending=100 + n,
                         oldest_pending_seconds=1.0, held=0, held_keys=0, blocked_keys=0, delayed=0,
                         dead=0, lanes_unowned=0, workers_silent=0,
                         oldest_open_publisher_seconds=None)
        if sys.argv[1] == "over" and n == 1:
            signals.emit("outbox.unmeasured", incarnation="1")
        os._exit(0)
    os.waitpid(pid, 0)
signals.emit("message.committed", count=1)
print(metrics.exposition()[1].decode())
"""


def forked(folder: Path, how: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, how],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return values(done.stdout)


def test_forked_processes_make_one_sum_and_no_double_gauge(tmp_path: Path) -> None:
    found = forked(tmp_path, "on")
    assert found["outbox_enqueued_total"] == 31
    assert found["outbox_sent_total"] == 6
    assert found["outbox_age_seconds_count"] == 6
    assert found['outbox_age_seconds_bucket{le="0.5"}'] == 3
    assert found["outbox_age_seconds_sum"] == pytest.approx(21.9)
    assert found['outbox_publish_attempts_total{result="delivered"}'] == 6
    assert found["outbox_pending_records"] == 101  # the newest, and not the sum


def test_a_lost_election_leaves_no_number_behind_in_other_processes(tmp_path: Path) -> None:
    found = forked(tmp_path, "over")
    pending = found["outbox_pending_records"]
    assert pending != pending  # not a number


def test_installing_twice_counts_once() -> None:
    code = (
        "from postroom import signals; from postroom.ops import metrics; metrics.install();"
        "metrics.install(); signals.emit('message.committed', count=2);"
        "print(metrics.exposition()[1].decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert values(done.stdout)["outbox_enqueued_total"] == 2


def test_without_the_library_the_error_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, "-c", "import postroom.ops.metrics"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
        if os.environ.get("PYTHONPATH")
        else os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install 'postroom[prometheus]'" in done.stderr


def test_the_raw_driver_counts_when_told(tmp_path: Path, scrape: Scrape) -> None:
    import asyncio
    import sqlite3

    asyncio.run(migrate.install(f"sqlite:///{tmp_path}/app.db"))
    outbox = Outbox()
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        published = outbox.publish(connection, 1, type="note")
        connection.commit()
    assert scrape["outbox_enqueued_total"] == 0
    outbox.committed(published)
    assert scrape["outbox_enqueued_total"] == 1
