"""The relay: owns lanes, and moves what is committed from the outbox to the broker.

    connect ──► register ──► take a fair share of the lanes ──► each lane works by itself
       ▲                                                          │
       └──── anything wrong with the database: drop all memory ◄──┘

A relay may die at any line. Its lanes are taken over when their lease ends; until then nobody
sends for them. A relay that wakes up late finds its fence gone and writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postroom import signals
from postroom.alerts import Alerts, Receiver
from postroom.brokers.base import Broker, BrokerOptions
from postroom.brokers.options import OptionsByScheme, open_brokers
from postroom.config import AlertSettings, RelaySettings, Routes
from postroom.databases.database import Database, DatabaseLost
from postroom.databases.trouble import is_locked
from postroom.dead_letters.redriver import Redriver
from postroom.dead_letters.store import OUTBOX
from postroom.errors import ConfigurationError, PostroomError, RoutingChanged, SchemaError
from postroom.outbox.lane import Tally
from postroom.outbox.notify import Listener
from postroom.outbox.office import Office
from postroom.outbox.sending import Sender
from postroom.outbox.settling import Settling
from postroom.retry import RetryPolicy
from postroom.worker.reopening import reopen
from postroom.worker.vitals import SILENT_SECONDS, Health, Vitals
from postroom.worker.waiting import pause

__all__ = ["Drained", "Relay", "dedicate_process"]

# A report is written about once a second, so it stays small.
REPORTED_DESTINATIONS = 20
REPORTED_CHARACTERS = 300
PING_SECONDS = 5.0
# For how many leases a start waits for a lock that another process has.
START_LEASES = 4
LOCK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Drained:
    """What `drain_once` did. `elsewhere`: lanes that another relay owns, so it was left to it.

    `waiting`: how many messages are left because their destination is down, counted up to a limit,
    and `waits_for` the names of those destinations.
    """

    delivered: int
    held: int
    dead: int
    elsewhere: int
    waiting: int = 0
    waits_for: tuple[str, ...] = ()


class Relay:
    """Moves messages from the outbox to a broker, or to several by topic.

        relay = Relay("postgresql://localhost/app", "nats://localhost:4222")
        await relay.run()                 # until stop()
        await relay.drain_once()          # what is there now, for a scheduler
        async with relay: ...             # inside an application

    `broker` is a URL, or a mapping of topic pattern → URL in which "*" is the default, and
    `broker_options` hold options by the scheme of a URL. `alerts` are functions that are called, in
    a thread of their own, with each `Alert`.
    """

    def __init__(
        self,
        database: str,
        broker: str | Mapping[str, str] | Routes,
        *,
        settings: RelaySettings | None = None,
        retry: RetryPolicy | Mapping[str, RetryPolicy] | None = None,
        rebind: bool = False,
        listen: bool = True,
        name: str | None = None,
        brokers: Mapping[str, Broker] | None = None,
        broker_options: OptionsByScheme | None = None,
        alerts: Sequence[Receiver] = (),
        alert_settings: AlertSettings | None = None,
        **overrides: Any,
    ) -> None:
        self.settings = replace(settings or RelaySettings(), **overrides)
        self.database = Database(database, timeout_seconds=self.settings.lease_seconds)
        self.routes = _routes(broker)
        self.owner = str(uuid.uuid4())
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.tally = Tally()
        self.settling = Settling()
        self.rebind = rebind
        self.listener = self._listener(database) if listen else None
        self._options = BrokerOptions(
            source=self.settings.source,
            send_timeout_seconds=self.settings.send_timeout_seconds,
            concurrency=self.settings.concurrency,
        )
        opened = brokers or open_brokers(self.routes.urls, self._options, broker_options)
        self.sender = Sender(
            self.routes, opened, retry=retry or self.settings.retry(), options=self._options
        )
        self._started = asyncio.Event()
        self.stopping = asyncio.Event()
        self.vitals = Vitals("relay")
        self.alerts = Alerts(
            alerts,
            incarnation=self.owner,
            worker=self.name,
            stale_seconds=(alert_settings or AlertSettings()).stale_seconds,
            repeat_seconds=(alert_settings or AlertSettings()).repeat_seconds,
        )
        self._trouble = "not connected yet"
        self._task: asyncio.Task[None] | None = None
        self._office: Office | None = None

    def _listener(self, database: str) -> Listener | None:
        if self.settings.notify_url:
            return Listener(self.settings.notify_url)
        return Listener(database) if self.database.dialect == "postgresql" else None

    async def run(self) -> None:
        """Work until `stop`. Raises if it cannot start; once started, it outlives any outage."""
        try:
            async with self._in_the_background():
                await self._run()
        except BaseException as error:
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.vitals.end(signals.redact(why))
            if self._started.is_set() and isinstance(error, Exception):
                signals.emit("relay.failed", incarnation=self.owner, error=why)
            raise
        self.vitals.end("it was told to stop")

    @contextlib.asynccontextmanager
    async def _in_the_background(self) -> AsyncIterator[None]:
        """What goes on beside the work, whatever becomes of the database."""
        tasks = [
            asyncio.create_task(self.vitals.keep_beating(), name="beat"),
            asyncio.create_task(self.sender.keep_pinging(PING_SECONDS), name="ping"),
        ]
        if (rule := self.settings.redrive()) is not None:
            redriver = Redriver(self.database, OUTBOX, rule, self.name)
            tasks.append(asyncio.create_task(redriver.keep(), name="redrive"))
        for task in tasks:
            self.vitals.add(task)
        self.alerts.start()
        try:
            yield
        finally:
            self.vitals.forget(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.alerts.stop)

    async def _run(self) -> None:
        failures = 0
        office = await self._open_first()
        self._started.set()
        signals.emit(
            "relay.started",
            incarnation=self.owner,
            database=self.database.target.safe,
            brokers=[signals.redact_url(url) for url in self.routes.urls],
        )
        try:
            while self._office is office:  # else it was stopped before it could open
                try:
                    await office.work(self.stopping)
                    return
                except DatabaseLost as error:
                    await office.finish_sends()
                    await office.close()
                    failures = 0 if office.lived else failures + 1
                    office = await self._reopen(error, failures)
                if self.stopping.is_set():
                    return
        finally:
            await office.close()
            await self.sender.close()
            signals.emit("relay.stopped", incarnation=self.owner, delivered=self.tally.delivered)

    def stop(self) -> None:
        """Finish what is under way, give the lanes back, and return from `run`."""
        self.stopping.set()
        if self._office is not None:
            self._office.stop_lanes()

    async def drain_once(self) -> Drained:
        """Deliver what is due now and return; what is in its back-off stays for the next time."""
        before = replace(self.tally)
        self.alerts.start()
        try:
            office = await self._open()
            try:
                elsewhere = await office.drain()
                topics = await office.waiting_topics()
            except DatabaseLost as error:
                raise self.database.explain(error) from error
            finally:
                await office.close()
        finally:
            await asyncio.to_thread(self.alerts.stop)
        now = self.tally
        waits_for = {topic: self.sender.waits_for(topic) for topic in topics}
        return Drained(
            now.delivered - before.delivered,
            now.held - before.held,
            now.dead - before.dead,
            elsewhere,
            sum(count for topic, count in topics.items() if waits_for[topic] is not None),
            tuple(sorted({name for name in waits_for.values() if name is not None})),
        )

    def health(self) -> Health:
        """Whether this relay lives, and whether it can work. May be asked from any thread."""
        unhealthy, unready = self.vitals.wrong(), []
        office = self._office
        if not self.vitals.started or self.stopping.is_set():
            unready.append("the relay is stopping" if self.vitals.started else "not started yet")
        elif self._trouble:
            unready.append(f"database: {self._trouble}")
        elif office is not None and (silent := office.silent_seconds()) > SILENT_SECONDS:
            unready.append(f"database: no answer for {silent:.0f} s")
        for url, text in self.sender.destinations.brokers_down().items():
            unready.append(f"broker {url}: {text}")
        if (late := self.sender.overdue(SILENT_SECONDS)) is not None:
            unhealthy.append(f"a send to {late} does not end, though its time is over")
        degraded = [
            f"{name}: {why}" for name, why in self.sender.destinations.topics_down().items()
        ]
        return Health(
            tuple(unhealthy),
            tuple(map(signals.redact, unready)),
            tuple(map(signals.redact, degraded[:REPORTED_DESTINATIONS])),
        )

    def report(self) -> dict[str, Any]:
        """What this relay has done so far and what stands in its way, for whoever watches."""
        now = time.monotonic()
        down = list(self.sender.destinations.down().items())[:REPORTED_DESTINATIONS]
        return {
            "delivered": self.tally.delivered,
            "held": self.tally.held,
            "dead": self.tally.dead,
            "in_flight": 0 if self._office is None else self._office.budget.rows,
            "destinations": [
                {
                    "name": name,
                    "error_code": breaker.code,
                    "error": breaker.text[:REPORTED_CHARACTERS],
                    "retry_in_seconds": round(breaker.seconds_left(now), 1),
                }
                for name, breaker in down
            ],
        }

    async def close(self) -> None:
        """Close the brokers; for those who call `drain_once` by themselves."""
        await self.sender.close()

    async def __aenter__(self) -> Relay:
        self._task = asyncio.create_task(self.run())
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait([self._task, started], return_when=FIRST_COMPLETED)
        started.cancel()
        if not self._started.is_set():
            await self._task
        return self

    async def ended(self) -> None:
        """Inside `async with`: wait until it works no more; raises what it ended with."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self.stop()
        await self._task

    async def _open(self) -> Office:
        office = Office(self)
        try:
            await office.open()
        except DatabaseLost as error:
            await office.close()
            raise self.database.explain(error) from error
        except BaseException:
            await office.close()
            raise
        self._office, self._trouble = office, ""
        return office

    async def _open_first(self) -> Office:
        """Open, or wait a few leases for another process that has SQLite's write lock."""
        give_up_at = time.monotonic() + START_LEASES * self.settings.lease_seconds
        while not self.stopping.is_set():
            try:
                return await self._open()
            except PostroomError as error:
                waits = self.database.dialect == "sqlite" and is_locked(error)
                if not waits or time.monotonic() >= give_up_at:
                    raise
                self._lost(error, LOCK_SECONDS)
                await pause(self.stopping, LOCK_SECONDS)
        return Office(self)

    async def _reopen(self, error: Exception, failures: int) -> Office:
        """The database was lost: try again with growing pauses until it is back or we must stop."""
        office = await reopen(
            self._open,
            stopping=self.stopping,
            report=self._lost,
            cause=error,
            failures=failures,
            final=(RoutingChanged, SchemaError),
        )
        if office is None:
            return Office(self)
        signals.emit("database.back", incarnation=self.owner)
        return office

    def _lost(self, cause: Exception, retry_in_seconds: float) -> None:
        self._trouble = told = str(self.database.explain(cause))
        signals.emit("database.lost", error=told, retry_in_seconds=retry_in_seconds)


def _routes(broker: str | Mapping[str, str] | Routes) -> Routes:
    if isinstance(broker, str):
        broker = {"*": broker}
    if not isinstance(broker, Routes):
        patterns = tuple((pattern, url) for pattern, url in broker.items() if pattern != "*")
        broker = Routes(patterns, broker.get("*"))
    if not broker.urls:
        raise ConfigurationError("a relay needs a broker: give it a URL, or routes by topic.")
    return broker


def dedicate_process() -> None:
    """For a process that does nothing but relay: the garbage collector looks more seldom, and not
    at what was there from the start. Messages come and go by the thousand and are never in a cycle;
    a tenth of the relay's time went into looking at them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
