"""The consumer: receives from a broker and applies each message once, in the order of its key.

    connect ──► subscribe ──► receive ──► workers: many in one transaction ──► acknowledge
       ▲                                            │
       └─ anything wrong with the database: give back

A consumer may die at any line: what it has not acknowledged comes again, and what it has committed
is then a duplicate. One that wakes up late finds its seat taken and applies nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from postroom import framework, signals
from postroom.brokers.base import Broker, BrokerOptions
from postroom.brokers.options import OptionsByScheme, open_brokers
from postroom.brokers.receiving import CanReceive, Subscription
from postroom.config import ConsumerSettings, Settings, load
from postroom.databases.database import Database, DatabaseLost
from postroom.dead_letters import store as letters
from postroom.dead_letters.redriver import Redriver
from postroom.errors import ConfigurationError, SchemaError
from postroom.inbox.carrying import Tally
from postroom.inbox.giving import Gives, check_handlers, gives_for
from postroom.inbox.handlers import Handlers
from postroom.inbox.returning import Consumers
from postroom.inbox.seats import Resubscribe
from postroom.inbox.tray import Tray
from postroom.messages import check_topic
from postroom.retry import RetryPolicy
from postroom.worker.reopening import reopen
from postroom.worker.vitals import SILENT_SECONDS, Health, Vitals

__all__ = ["Consumed", "Consumer"]

NAME_CHARACTERS = 100
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Consumed:
    """What `drain_once` did. Failed: kept to be tried again; buried: dead letters."""

    handled: int
    duplicates: int
    failed: int
    buried: int
    skipped: int


class Consumer:
    """Applies messages of a broker to a database, each once.

        billing = Consumer("billing", "postgresql://localhost/app", "nats://localhost:4222")

        @billing.on(OrderPlaced)
        async def bill(order: OrderPlaced, tx: AsyncSession) -> None:
            tx.add(Bill(order.order_id))          # committed with the inbox's row, or not at all

        await billing.run()                       # until stop()
        await billing.drain_once()                # what is there now, for a scheduler
        async with billing: ...                   # inside an application

    Without `database` or `broker` they are those of the settings (POSTROOM_DATABASE_URL and
    POSTROOM_BROKER_URL, or postroom.toml), and so are how it works and `broker_options`, which are
    options of the broker by the scheme of its URL.

    `name` is the scope in which a message is applied once, and what the broker knows the consumer
    by. `topics` are those of the declared types that have handlers, unless told. `gives` says what
    a handler works on: a "session", a "connection" of SQLAlchemy's, or the "driver"'s own. A
    handler that is not async runs in a thread, on the synchronous kind of the same.

    In a Django project, a consumer without `database` works on the one that POSTROOM names, or on
    the alias `using`, and gives handlers Django's connection inside `transaction.atomic()`.
    """

    def __init__(
        self,
        name: str,
        database: str | None = None,
        broker: str | Broker | None = None,
        *,
        topics: Sequence[str] | None = None,
        gives: Gives | None = None,
        using: str | None = None,
        settings: ConsumerSettings | None = None,
        retry: RetryPolicy | None = None,
        worker_name: str | None = None,
        broker_options: OptionsByScheme | None = None,
        **overrides: Any,
    ) -> None:
        if not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
            raise ConfigurationError(
                f"a consumer's name must be printable text of 1 to {NAME_CHARACTERS} characters."
            )
        self.name = name
        self.chose_gives = gives is not None
        self.gives = gives_for(gives, database, using)
        self._using, self._url = using, database
        if database is None or broker is None:
            told = self._told()
            settings = settings or told.consumer
            broker = broker or told.broker_url
            broker_options = broker_options or told.brokers
        self.settings = replace(settings or ConsumerSettings(), **overrides)
        self.retry = retry or self.settings.retry()
        self.owner = str(uuid.uuid4())
        self.worker_name = worker_name or f"{name} {socket.gethostname()}:{os.getpid()}"
        self.handlers = Handlers()
        self.tally = Tally()
        self.stopping = asyncio.Event()
        self.vitals = Vitals("consumer")
        self.broker_name = signals.redact_url(broker) if isinstance(broker, str) else repr(broker)
        if isinstance(broker, str):
            broker = open_brokers([broker], BrokerOptions(), broker_options)[broker]
        self._broker = broker
        if broker is not None and not isinstance(broker, CanReceive):
            raise ConfigurationError(f"{broker!r} can be sent to, but not received from.")
        if self.gives != "django":
            _ = self.database, self.broker  # wrong settings are an error here
        self._topics = None if topics is None else tuple(check_topic(each) for each in topics)
        self._started = asyncio.Event()
        self._trouble = "not connected yet"
        self._task: asyncio.Task[None] | None = None
        self._tray: Tray | None = None
        self._threads: ThreadPoolExecutor | None = None

    # ── where it works ─────────────────────────────────────────────────────────────────────────

    def _told(self) -> Settings:
        host = framework.present()
        return load(base=None if host is None else host.document(self._using))

    @cached_property
    def url(self) -> str:
        """The URL of its database. That of a framework's is resolved at its first use, so that it
        is the test database in the framework's tests."""
        return self._url or self._told().require_database()

    @cached_property
    def database(self) -> Database:
        """Its database."""
        # A seat may be waited for as long as a frozen process can keep its transaction open.
        return Database(self.url, timeout_seconds=self.settings.stuck_seconds + 15)

    @property
    def alias(self) -> str | None:
        """The alias of Django's DATABASES that handlers work on, if they do."""
        host = framework.present()
        return None if self.gives != "django" or host is None else host.alias(self._using)

    @property
    def broker(self) -> Broker:
        """The broker it receives from."""
        if self._broker is None:
            raise ConfigurationError(
                f"consumer {self.name} has no broker: give it a URL, or set POSTROOM_BROKER_URL."
            )
        return self._broker

    # ── handlers ───────────────────────────────────────────────────────────────────────────────

    def on(self, what: str | type, *, retry: RetryPolicy | None = None) -> Callable[[F], F]:
        """Hand messages of a declared class, or of a type by its name, to the function below.

        It takes (event, tx), or (event, tx, received) to see id, headers and attempt too. An event
        of a class is an object of it; else JSON as plain values, and anything else as bytes.
        """

        self.handlers.name_of(what)

        def register(function: F) -> F:
            self.handlers.add(what, function, retry)
            return function

        return register

    @property
    def topics(self) -> tuple[str, ...]:
        """What it receives from."""
        found = self.handlers.topics() if self._topics is None else self._topics
        if not found:
            raise ConfigurationError(
                f"consumer {self.name} has no topics: name them with topics=[...], or give the "
                "declared types it handles a topic."
            )
        return tuple(found)

    async def subscribe(self) -> Subscription:
        """Ask the broker for its messages."""
        assert isinstance(self.broker, CanReceive)
        return await self.broker.receive(self.topics, consumer=self.name)

    # ── running ────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Work until `stop`. Raises if it cannot start; once started, it outlives any outage."""
        try:
            async with self._in_the_background():
                await self._run()
        except BaseException as error:
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.vitals.end(signals.redact(why))
            if self._started.is_set() and isinstance(error, Exception):
                signals.emit(
                    "consumer.failed", consumer=self.name, incarnation=self.owner, error=why
                )
            raise
        self.vitals.end("it was told to stop")

    @contextlib.asynccontextmanager
    async def _in_the_background(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.vitals.keep_beating(), name="beat")]
        if (rule := self.settings.redrive()) is not None:
            letters.return_to("consumer", Consumers())
            redriver = Redriver(self.database, f"consumer:{self.name}", rule, self.worker_name)
            tasks.append(asyncio.create_task(redriver.keep(), name="redrive"))
        for task in tasks:
            self.vitals.add(task)
        try:
            yield
        finally:
            self.vitals.forget(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        tray = await self._open()
        self._started.set()
        signals.emit(
            "consumer.started",
            consumer=self.name,
            incarnation=self.owner,
            database=self.database.target.safe,
            topics=list(self.topics),
        )
        try:
            while not self.stopping.is_set():
                try:
                    await tray.work()
                    return
                except DatabaseLost as error:
                    await tray.close()
                    failures = 0 if tray.lived else failures + 1
                    tray = await self._reopen(error, failures)
                except Resubscribe:
                    await tray.close()
                    tray = await self._reopen(None, 0)
        finally:
            await tray.close()
            await self.close()
            signals.emit(
                "consumer.stopped",
                consumer=self.name,
                incarnation=self.owner,
                handled=self.tally.handled,
            )

    def stop(self) -> None:
        """Finish the transactions under way, give the rest back, and return from `run`."""
        self.stopping.set()

    async def drain_once(self) -> Consumed:
        """Handle what is there now and return; what is in its back-off stays for the next time."""
        before = replace(self.tally)
        tray = await self._open()
        try:
            await tray.drain()
        except DatabaseLost as error:
            raise self.database.explain(error) from error
        finally:
            await tray.close()
        now = self.tally
        return Consumed(
            now.handled - before.handled,
            now.duplicates - before.duplicates,
            now.failed - before.failed,
            now.buried - before.buried,
            now.skipped - before.skipped,
        )

    def health(self) -> Health:
        """Whether this consumer lives, and whether it can work. May be asked from any thread."""
        unhealthy, unready = self.vitals.wrong(), []
        tray = self._tray
        if not self.vitals.started or self.stopping.is_set():
            unready.append("the consumer is stopping" if self.vitals.started else "not started yet")
        elif self._trouble:
            unready.append(self._trouble)
        elif tray is not None and (silent := tray.silent_seconds()) > SILENT_SECONDS:
            unready.append(f"database: no answer for {silent:.0f} s")
        if tray is not None and tray.broker_trouble:
            unready.append(f"broker: {tray.broker_trouble}")
        return Health(tuple(unhealthy), tuple(map(signals.redact, unready)))

    def report(self) -> dict[str, Any]:
        """What this consumer has done so far, for whoever watches."""
        tally, tray = self.tally, self._tray
        return {
            "consumer": self.name,
            "lag": None if tray is None else tray.lag,
            "trouble": "; ".join(self.health().unready) or None,
            "received": tally.received,
            "handled": tally.handled,
            "duplicates": tally.duplicates,
            "failed": tally.failed,
            "buried": tally.buried,
            "skipped": tally.skipped,
            "in_hand": 0 if tray is None else tray.in_hand,
        }

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Where sync handlers run."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self.settings.concurrency, thread_name_prefix=f"consumer-{self.name}"
            )
        return self._threads

    async def close(self) -> None:
        """Close the broker; for those who call `drain_once` by themselves."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        if self._broker is not None:
            await self._broker.close()

    async def __aenter__(self) -> Consumer:
        self._task = asyncio.create_task(self.run())
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait([self._task, started], return_when=FIRST_COMPLETED)
        started.cancel()
        if not self._started.is_set():
            await self._task
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self.stop()
        await self._task

    async def _open(self) -> Tray:
        tray = await self._connect()
        try:
            await tray.subscribe()
        except BaseException:
            await tray.close()
            raise
        self._tray, self._trouble = tray, ""
        return tray

    async def _connect(self) -> Tray:
        """Return a tray that has its connections to the database."""
        if not self.handlers:
            raise ConfigurationError(f"consumer {self.name} has no handlers: write @consumer.on.")
        check_handlers(self)
        tray = Tray(self)
        try:
            if any(not handler.is_async for handler in self.handlers):
                tray.transactions.prepare_for_threads()
            await tray.connect()
        except DatabaseLost as error:
            await tray.close()
            raise self.database.explain(error) from error
        except BaseException:
            await tray.close()
            raise
        return tray

    async def _reopen(self, error: Exception | None, failures: int) -> Tray:
        """Open another tray, however long the database and then the broker are away."""
        tray = await reopen(
            self._connect,
            stopping=self.stopping,
            report=self._database_lost,
            cause=error,
            failures=failures,
            final=(SchemaError,),
        )
        if tray is None:
            return Tray(self)
        if error is not None:
            signals.emit("database.back", incarnation=self.owner)
        try:
            await self._subscribe(tray)
        except BaseException:
            await tray.close()
            raise
        self._tray, self._trouble = tray, ""
        return tray

    async def _subscribe(self, tray: Tray) -> None:
        """Subscribe a connected tray, unless the consumer must stop."""
        try:
            await tray.subscribe()
        except Exception as error:
            await reopen(
                tray.subscribe, stopping=self.stopping, report=self._broker_lost, cause=error
            )
            if not self.stopping.is_set():
                signals.emit("consumer.broker_back", consumer=self.name)

    def _database_lost(self, cause: Exception, retry_in_seconds: float) -> None:
        told = str(self.database.explain(cause))
        self._trouble = f"database: {told}"
        signals.emit("database.lost", error=told, retry_in_seconds=retry_in_seconds)

    def _broker_lost(self, cause: Exception, retry_in_seconds: float) -> None:
        self._trouble = f"broker: {cause}"
        signals.emit(
            "consumer.broker_lost",
            consumer=self.name,
            error=str(cause),
            retry_in_seconds=retry_in_seconds,
        )
