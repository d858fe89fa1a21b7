"""One connected life of a consumer: its subscription, its workers, and what they share.

A tray is opened, works, and is closed for good; a consumer that lost its database opens another.
Nothing a tray knew outlives it: what it had in hand is given back to the broker, and what was
committed of it is a duplicate when it comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from postroom import failpoints, signals
from postroom.brokers.receiving import CanTellLag, Delivery, Subscription
from postroom.databases.database import DatabaseLost, WorkerLink
from postroom.databases.schema import newest, remedy
from postroom.errors import ConfigurationError, SchemaError, Unreachable
from postroom.flow import Rows, Value
from postroom.inbox.hand import Hand
from postroom.inbox.rules import Letter, letter_of, worker_of
from postroom.inbox.seats import Seats
from postroom.inbox.store import LEASE_SECONDS, ROOM, Seat, Store
from postroom.inbox.transactions import transactions_of
from postroom.inbox.working import Worker
from postroom.worker import version
from postroom.worker.pace import Pace
from postroom.worker.waiting import finish, pause

if TYPE_CHECKING:
    from postroom.inbox.consumer import Consumer

__all__ = ["Tray"]

BEAT_SECONDS = 1.0
REFUSED_SECONDS = 0.2
ACK_SECONDS = 5.0
GOODBYE_SECONDS = 5.0
MEASURE_SECONDS = 5.0
LAG_SECONDS = 2.0
REGISTER_SECONDS = 600.0
COUNT_LIMIT = 10_000
LONGEST_PAUSE_SECONDS = 5.0


class Tray:
    """One connected life of a consumer (see carrying.Desk)."""

    def __init__(self, consumer: Consumer) -> None:
        settings = consumer.settings
        self.consumer = consumer
        self.settings = settings
        self.name = consumer.name
        self.owner = consumer.owner
        self.handlers = consumer.handlers
        self.tally = consumer.tally
        self.stopping = consumer.stopping
        self.retry = consumer.retry
        self.chunk_rows = settings.chunk_rows
        self.chunk_bytes = settings.chunk_bytes
        self.handler_seconds = settings.handler_seconds
        self.skips_unknown = settings.unknown == "skip"
        self.lived = False
        self.store = Store(
            consumer.name,
            consumer.owner,
            stuck_seconds=settings.stuck_seconds,
            holds_key=settings.on_dead == "hold",
        )
        self.transactions = transactions_of(
            consumer.gives,
            consumer.alias,
            consumer.url,
            consumer.database.target,
            connections=settings.concurrency,
            stuck_seconds=settings.stuck_seconds,
        )
        self._links: list[WorkerLink] = []
        self._subscription: Subscription | None = None
        self._queues: list[asyncio.Queue[Letter]] = []
        self._retrying: set[int | None] = set()
        self._due = asyncio.Event()
        self.ending = asyncio.Event()
        self.lease_seconds = min(LEASE_SECONDS, settings.stuck_seconds)
        self._silent = False  # whether the database was found not to answer
        self._told = False
        self._registered = False
        self._pace = Pace()
        self.lag: int | None = None
        self.broker_trouble = ""

    # ── opening and closing ────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        """Connect to the database and check that its tables fit."""
        for _ in range(2):
            self._links.append(await self.consumer.database.connect())
        self.transactions.pooled = any(link.pooled for link in self._links)
        await self._check_schema()
        await self._check_alias()
        await self._register()

    async def subscribe(self) -> None:
        """Subscribe to the broker; the tray can work after that."""
        self._subscription = await self.consumer.subscribe()
        self._hand = Hand(
            self.name,
            self._subscription,
            rows=self.settings.in_hand_rows,
            size=self.settings.in_hand_bytes,
        )
        self._seats = Seats(self.name, self._take_seat, exclusive=self._subscription.exclusive)

    @property
    def _house(self) -> WorkerLink:
        return self._links[0]

    @property
    def _control(self) -> WorkerLink:
        return self._links[1]

    async def _take_seat(self, source: str) -> int:
        return await self._control.transact(self.store.take_seat(source))

    async def _check_schema(self) -> None:
        found, oldest = [
            int(rows[0][0]) if rows else 0
            for rows in [
                await self._house.query(ROOM, "meta", item="schema_version"),
                await self._house.query(ROOM, "meta", item="oldest_code"),
            ]
        ]
        mine = newest(self.consumer.database.dialect)
        if found != mine and not 0 < oldest <= mine < found:
            raise SchemaError(
                f"the tables in {self.consumer.database.target.safe} are of version {found}, "
                f"this consumer needs version {mine}: {remedy(found, mine)}."
            )

    async def _register(self) -> None:
        """Record that this consumer is here, and which topics it receives from where."""
        await self._house.query(
            ROOM,
            "register",
            consumer=self.name,
            broker=self.consumer.broker_name,
            topics=json.dumps(self.consumer.topics),
        )
        self._registered = True

    async def _check_alias(self) -> None:
        """See that the connection of handlers leads to the database that we know the URL of."""
        if self.consumer.alias is None:
            return
        await self._beat()
        look = partial(self.transactions.look, self.store.is_at_work())
        try:
            there = await self.in_thread(look)
        except Exception as error:
            raise DatabaseLost(str(error)) from error
        if not there:
            raise ConfigurationError(
                f"handlers of consumer {self.name} work on {self.consumer.alias!r} of DATABASES, "
                f"and {self.consumer.database.target.safe} is another database: correct "
                "database_url in POSTROOM, or name the alias with Consumer(…, using=…)."
            )

    async def close(self) -> None:
        """Give back what is in hand, and every connection."""
        await finish(self._close())

    async def _close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        if self._house_lives():
            with contextlib.suppress(DatabaseLost):
                await self._unlease()
                await self._house.query(ROOM, "gone", incarnation=self.owner)
                if self._registered:
                    await self._register()
        self._untell()
        await self.transactions.close()
        for link in self._links:
            await link.close()

    def _house_lives(self) -> bool:
        return bool(self._links) and not self._links[0].lost

    async def _unlease(self) -> None:
        """Retries that were not come to: others may have them at once."""
        for queue in self._queues:
            while not queue.empty():
                letter = queue.get_nowait()
                if letter.position is not None:
                    await self._house.transact(self.store.unlease(letter))

    # ── working ────────────────────────────────────────────────────────────────────────────────

    async def work(self) -> None:
        """Receive and handle until told to stop; then finish what is under way."""
        await self._work(self._receive(), idle=None)

    async def drain(self) -> None:
        """Handle what is there now: until the broker has nothing and nothing is due."""
        idle = asyncio.Event()
        await self._work(self._receive(idle), idle)

    async def _work(self, receiving: Any, idle: asyncio.Event | None) -> None:
        self._queues = [asyncio.Queue() for _ in range(self._workers())]
        receive = asyncio.create_task(receiving, name="receive")
        working = [
            asyncio.create_task(self._keep_retrying(idle), name="retry"),
            asyncio.create_task(self._keep_house(), name="keep house"),
            asyncio.create_task(self._hand.keep_extending(self.ending), name="extend"),
            *(
                asyncio.create_task(self._keep_working(queue), name=f"worker {n}")
                for n, queue in enumerate(self._queues)
            ),
        ]
        acking = asyncio.create_task(self._hand.keep_acknowledging(self.ending), name="acknowledge")
        tasks = [receive, *working, acking]
        for task in tasks:
            self.consumer.vitals.add(task, lambda: self._house)
        stop = asyncio.create_task((idle or self.stopping).wait())
        other = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait([stop, other, *tasks], return_when=FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()
            if not (idle or self.stopping).is_set() and not self.stopping.is_set():
                raise RuntimeError("a background task of the consumer was ended from outside")
            await self._end(receive, working, acking)
            for task in [*working, acking]:
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            self.consumer.vitals.forget(tasks)
            # A transaction that is torn off may leave its connection behind, with its locks.
            await self._end(receive, working, acking)
            if self._silent and self._subscription is not None:
                await self._subscription.close()  # first of all: others wait for the source
            for task in [stop, other, *tasks]:
                task.cancel()
            ended = asyncio.gather(stop, other, *tasks, return_exceptions=True)
            # A driver that is cancelled asks its server, which may never answer.
            await asyncio.wait([ended], timeout=GOODBYE_SECONDS if self._silent else None)

    def _workers(self) -> int:
        """SQLite has one writer at a time: several would only wait for each other, with less in
        each transaction."""
        return 1 if self.consumer.database.dialect == "sqlite" else self.settings.concurrency

    async def _end(
        self,
        receive: asyncio.Task[None],
        working: Sequence[asyncio.Task[None]],
        acking: asyncio.Task[None],
    ) -> None:
        """What is under way comes to its end; the rest goes back to the broker."""
        if self.ending.is_set():
            return
        receive.cancel()
        self.ending.set()
        self._due.set()
        grace_seconds = self.settings.grace_seconds
        if self._silent:
            grace_seconds = min(grace_seconds, self.lease_seconds / 4)
        await asyncio.wait(working, timeout=grace_seconds)
        self._hand.wake()
        await asyncio.wait([acking], timeout=ACK_SECONDS)

    async def _receive(self, idle: asyncio.Event | None = None) -> None:
        failures, subscription = 0, self._subscription
        assert subscription is not None
        while not self.stopping.is_set():
            room = await self._hand.room()
            try:
                failpoints.hit("consumer.receive.before")
                deliveries = await subscription.take(room)
                failpoints.hit("consumer.receive.after")
            except Unreachable as error:
                failures += 1
                await self._broker_lost(error, failures)
                continue
            if failures:
                failures, self.broker_trouble = 0, ""
                signals.emit("consumer.broker_back", consumer=self.name)
            if deliveries:
                self.tally.received += len(deliveries)
                signals.emit("delivery.received", consumer=self.name, count=len(deliveries))
                await self._sort(deliveries)
                continue
            await asyncio.sleep(0)  # whatever the broker does, others have their turn
            if idle is not None and not len(self._hand) and not self._retrying and self._looked:
                idle.set()
                return

    async def _broker_lost(self, error: Exception, failures: int) -> None:
        seconds = min(0.1 * 2.0 ** min(failures, 10), LONGEST_PAUSE_SECONDS)
        self.broker_trouble = str(error)
        signals.emit(
            "consumer.broker_lost",
            consumer=self.name,
            error=str(error),
            retry_in_seconds=round(seconds, 3),
        )
        await pause(self.stopping, seconds)

    async def _sort(self, deliveries: Sequence[Delivery]) -> None:
        """Hand every message to the worker of its key, if its source is ours."""
        refused = []
        for each in deliveries:
            epoch = await self._seats.epoch_of(each)
            if epoch is None:
                refused.append(each)
                continue
            letter = letter_of(each, epoch)
            self._hand.take(each)
            self._queues[worker_of(letter, len(self._queues))].put_nowait(letter)
        if refused:
            await self._hand.give_back(refused)
            await pause(self.stopping, REFUSED_SECONDS)

    async def _keep_working(self, queue: asyncio.Queue[Letter]) -> None:
        worker = Worker(self)
        ended = asyncio.create_task(self.ending.wait())
        try:
            while not self.ending.is_set():
                if queue.empty():
                    waiting = asyncio.create_task(queue.get())
                    await asyncio.wait([waiting, ended], return_when=FIRST_COMPLETED)
                    if not waiting.done():
                        waiting.cancel()
                        continue
                    letters = [waiting.result()]
                else:
                    letters = []
                while not queue.empty() and len(letters) < 2 * self.chunk_rows:
                    letters.append(queue.get_nowait())
                done = await worker.handle(letters)
                self._retrying -= {one.position for one in letters[:done]}
                for letter in letters[done:]:
                    queue.put_nowait(letter)
        finally:
            ended.cancel()

    # ── what waits to be tried again ───────────────────────────────────────────────────────────

    _looked = False

    async def _keep_retrying(self, idle: asyncio.Event | None) -> None:
        """Hand heads whose time has come to the workers of their keys."""
        most = 2 * len(self._queues)
        while not self.ending.is_set():
            self.consumer.vitals.beat("retry")
            self._due.clear()
            found = []
            rows = most - len(self._retrying)
            if rows > 0 and await self._ask("due_any", consumer=self.name):
                found = await self._house.transact(self.store.lease_due(rows))
                # What waits for a worker for longer than the lease is not handed out twice.
                found = [letter for letter in found if letter.position not in self._retrying]
                for letter in found:
                    self._retrying.add(letter.position)
                    self._queues[worker_of(letter, len(self._queues))].put_nowait(letter)
            self._looked = not found
            with contextlib.suppress(TimeoutError):
                seconds = 0.05 if idle is not None or found else self.settings.poll_seconds
                await asyncio.wait_for(self._due.wait(), seconds)

    # ── keeping house ──────────────────────────────────────────────────────────────────────────

    async def _keep_house(self) -> None:
        """Say that this process lives, and now and then how the consumer stands."""
        measured_at, registered_at = float("-inf"), time.monotonic()
        while not self.ending.is_set():
            self.consumer.vitals.beat("keep house")
            await self._beat()
            if time.monotonic() - measured_at >= MEASURE_SECONDS:
                measured_at = time.monotonic()
                await self._measure()
                await self._house.query(ROOM, "lease_cap", consumer=self.name)
            if time.monotonic() - registered_at >= REGISTER_SECONDS:
                registered_at = time.monotonic()
                await self._register()
            await pause(self.ending, BEAT_SECONDS)
            # A tray that ends within its first beat must not reset the back-off.
            self.lived = self.lived or not self.ending.is_set()

    async def _beat(self) -> None:
        report = self.consumer.report()
        said = {"at": time.time(), "version": version(), **report, **self._pace.add(report)}
        row = {"incarnation": self.owner, "worker_name": self.consumer.worker_name}
        await self._ask("beat", **row, report=json.dumps(said))

    async def _ask(self, name: str, **values: Value) -> Rows:
        """Carry out a query that waits for no lock. A server that does not answer it in time is
        silent: the source is given up within the lease, for a consumer that can work."""
        # A file has no network in between; a busy one may keep a writer waiting for longer.
        seconds = None if self.consumer.database.dialect == "sqlite" else self.lease_seconds / 2
        try:
            async with asyncio.timeout(seconds):
                return await self._house.query(ROOM, name, **values)
        except TimeoutError as error:
            self._silent = True
            raise DatabaseLost("the database does not answer") from error

    async def _measure(self) -> None:
        ((held, blocked, oldest_ms, keys, _),) = await self._ask(
            "measure", consumer=self.name, most=COUNT_LIMIT
        )
        silent = [json.loads(row[0] or "{}") for row in await self._ask("silent")]
        self.lag = await self._ask_lag()
        self._told = True
        signals.emit(
            "inbox.measured",
            consumer=self.name,
            incarnation=self.owner,
            held=held,
            blocked=blocked,
            oldest_held_seconds=max(0, oldest_ms or 0) / 1000,
            held_keys=keys,
            lag=self.lag,
            workers_silent=sum(one.get("consumer") == self.name for one in silent),
        )

    async def _ask_lag(self) -> int | None:
        """Return how many messages the broker has that this process could receive next.

        None if the broker does not report it, or not in time: a figure never stops the work.
        """
        if not isinstance(self._subscription, CanTellLag):
            return None
        try:
            async with asyncio.timeout(LAG_SECONDS):
                return await self._subscription.lag()
        except (Unreachable, TimeoutError):
            return None

    def _untell(self) -> None:
        if self._told:
            self._told = False
            signals.emit("inbox.unmeasured", consumer=self.name, incarnation=self.owner)

    def silent_seconds(self) -> float:
        """For how long the database has not answered a statement of ours."""
        asked = [link.asked_at for link in self._links if not link.lost]
        now = time.monotonic()
        return max([0.0, *(now - at for at in asked if at is not None)])

    @property
    def in_hand(self) -> int:
        """How many messages it has received and not yet acknowledged."""
        return 0 if self._subscription is None else len(self._hand)

    # ── what workers ask for (carrying.Desk) ───────────────────────────────────────────────────

    def seats_of(self, letters: Iterable[Letter]) -> list[Seat]:
        return self._seats.of(letters)

    def current(self, letter: Letter) -> bool:
        """Whether a message in hand is still ours; else it is dropped, and comes again."""
        if self._seats.current(letter):
            return True
        if letter.delivery is not None:
            self._hand.drop([letter.delivery])
        return False

    def acknowledge(self, letters: Sequence[Letter]) -> None:
        self._hand.acknowledge([one.delivery for one in letters if one.delivery is not None])

    def lose(self, seats: Iterable[Seat]) -> None:
        """These seats are another's: drop what is in hand of them, without a yes."""
        for seat in seats:
            claim = self._seats.lose(seat)
            if claim is not None:
                void = (seat.source, claim)
                self._hand.let_go(lambda each, void=void: (each.source, each.claim) == void)  # type: ignore[misc]

    def hint(self) -> None:
        self._due.set()

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        # A thread cannot be stopped half-way: whoever is cancelled waits for it.
        return await finish(_awaited(loop.run_in_executor(self.consumer.threads, function)))


async def _awaited(future: Any) -> Any:
    return await future
