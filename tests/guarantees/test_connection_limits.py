"""A database with room for fewer connections than a worker opens, at its start and after an outage.

At the start the worker gives the real reason. Once started, it waits until there is room again and
works on, no matter which of its connections was refused.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from tables import connect

from helpers import eventually_async
from helpers_messages import make_message
from limited import KINDS, Limited, limited
from postroom import Consumer, Outbox, signals
from postroom.brokers import memory, memory_receiving
from postroom.brokers.base import DELIVERED
from postroom.errors import PostroomError, Unreachable
from postroom.gateway.service import create_app
from postroom.idempotency import SHARED, Finisher, Keys, resumable
from postroom.messages import Message
from postroom.ops.watch import frames
from postroom.outbox.relay import Relay
from stages import Stages

QUICK: dict[str, Any] = {"poll_max_seconds": 0.05, "horizon_seconds": 0.005}
INSERT = text("INSERT INTO thing VALUES (:name)")


def say_yes(message: Message) -> bool:
    """An adapter whose exchange takes everything at once."""
    return True


class Crew:
    """One worker on a limited database: how it is started, given work, and seen to have done it."""

    connects = 0  # how many connections it opens before it calls itself started
    opens = 0  # how many it opens in all, where that is more

    def __init__(self, place: Limited) -> None:
        self.place = place
        self.stage = place.stage
        self.broker = memory.broker(f"limits-{uuid.uuid4().hex[:8]}")
        self.heard: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether a worker has ended because of an error."""
        return any(each.startswith(("relay.failed", "consumer.failed")) for each in self.heard)

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Start the worker, and stop it in the end; raises the error that it ended with."""
        raise NotImplementedError
        yield

    async def ask(self, name: str) -> None:
        """Give it something to do, whether or not it can do it now."""

    async def done(self, name: str) -> bool:
        """Whether it has been done."""
        return name in self.stage.things()


class RelayCrew(Crew):
    connects = 4
    opens = 5  # the one that listens for notifications

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with Relay(self.place.url, f"memory://{self.broker.name}", rebind=True, **QUICK):
            yield

    async def ask(self, name: str) -> None:
        def publish() -> None:
            with closing(connect(self.stage.url)) as tx:
                Outbox().publish(tx, name, type="note", topic="orders")
                tx.commit()

        await asyncio.to_thread(publish)

    async def done(self, name: str) -> bool:
        return f'"{name}"'.encode() in [each.payload for each in self.broker.messages]


class ConsumerCrew(Crew):
    connects = 2
    opens = 3

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        how: dict[str, Any] = {"topics": ["orders"], "poll_seconds": 0.05, "concurrency": 1}
        consumer = Consumer("billing", self.place.url, f"memory://{self.broker.name}", **how)
        self.handle_by(consumer)
        async with consumer:
            yield

    def handle_by(self, consumer: Consumer) -> None:
        @consumer.on("note")
        async def handle(event: Any, tx: Any) -> None:
            await tx.execute(INSERT, {"name": event})

    async def ask(self, name: str) -> None:
        message = make_message(f'"{name}"'.encode(), key="k", type="note", topic="orders")
        assert await self.broker.send([message]) == [DELIVERED]


class ThreadConsumerCrew(ConsumerCrew):
    def handle_by(self, consumer: Consumer) -> None:
        @consumer.on("note")
        def handle(event: Any, tx: Any) -> None:
            tx.execute(INSERT, {"name": event})


class FinisherCrew(Crew):
    """It starts without a connection, and opens one when it first looks for orphans."""

    opens = 1

    def made(self, url: str, *, fails: bool) -> Any:
        keys = Keys(url, scope=SHARED)

        @resumable(keys, "rides.create")
        async def create(run: Any, ride: Any) -> Any:
            if fails:
                raise RuntimeError("broken")
            await run.point("created", lambda tx: insert(tx, ride["name"]))
            return 201, {}

        async def insert(tx: Any, name: str) -> None:
            await tx.execute(INSERT, {"name": name})

        return create, keys

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        create, keys = self.made(self.place.url, fails=False)
        finisher = Finisher(create, poll_seconds=0.05)
        task = asyncio.create_task(finisher.run())
        try:
            yield
            assert not task.done()
        finally:
            finisher.stop()
            await task
            await keys.close_async()

    async def ask(self, name: str) -> None:
        create, keys = self.made(self.stage.url, fails=True)
        with contextlib.suppress(RuntimeError):
            await create(name, {"name": name})
        await keys.close_async()
        await asyncio.to_thread(self.orphan)

    async def done(self, name: str) -> bool:
        # A run that lost its connection has spent an attempt, and waits for the next one.
        await asyncio.to_thread(self.orphan)
        return await super().done(name)

    def orphan(self) -> None:
        moment = "0" if self.stage.database == "sqlite" else "'2020-01-01'"
        where = "status = 'failed'"
        self.stage.query(f"UPDATE {{p}}idempotency_key SET locked_until = {moment} WHERE {where}")


class GatewayCrew(Crew):
    connects = 5  # the counter's and the relay's
    opens = 6

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        app = create_app(self.place.url, f"call:{__name__}:say_yes", rebind=True, **QUICK)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as self.client,
        ):
            yield

    async def ask(self, name: str) -> None:
        order = {"symbol": "AAPL", "side": "buy", "quantity": 1, "order_type": "market"}
        await self.client.post("/do/order", json=order, headers={"Idempotency-Key": name})

    async def done(self, name: str) -> bool:
        await self.ask(name)  # again, as a client does that got no answer
        column = "`key`" if self.stage.database == "mariadb" else "key"
        rows = self.stage.query(f"SELECT state FROM {{p}}ledger WHERE {column} = %s", name)
        # An order whose settling was cut off is in doubt: this exchange cannot be asked.
        return bool(rows) and rows[0][0] in ("succeeded", "unknown")


class WatchCrew(Crew):
    """`postroom status --watch`."""

    connects = 1

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        stopping, self.first, self.asked = asyncio.Event(), asyncio.Event(), False

        async def watch() -> None:
            looks = frames(self.place.url, interval_seconds=0.05, stopping=stopping)
            async for frame in looks:
                self.first.set()
                if frame.error:
                    self.heard.append(frame.error)
                else:
                    self.asked = False

        task = asyncio.create_task(watch())
        first = asyncio.create_task(self.first.wait())
        await asyncio.wait([task, first], return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if task.done():
            await task
        try:
            yield
        finally:
            stopping.set()
            await task

    async def ask(self, name: str) -> None:
        self.asked = True

    async def done(self, name: str) -> bool:
        return not self.asked


CREWS = {
    "relay": RelayCrew,
    "consumer": ConsumerCrew,
    "consumer in threads": ThreadConsumerCrew,
    "finisher": FinisherCrew,
    "gateway": GatewayCrew,
    "watch": WatchCrew,
}


@pytest.fixture(params=KINDS)
def place(
    request: pytest.FixtureRequest, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Limited]:
    monkeypatch.setattr(memory_receiving, "TAKE_SECONDS", 0.2)
    made = limited(stages[request.param])
    yield made
    made.close()


@pytest.fixture(params=CREWS)
def crew(request: pytest.FixtureRequest, place: Limited) -> Iterator[Crew]:
    made: Crew = CREWS[request.param](place)

    def hear(name: str, fields: dict[str, Any]) -> None:
        if "error" in fields:
            made.heard.append(f"{name} {fields['error']}")

    stop = signals.listen(hear)
    yield made
    stop()


async def test_a_start_with_too_few_connections_gives_the_reason(crew: Crew) -> None:
    for connections in range(crew.connects):
        crew.place.allow(connections)
        with pytest.raises(Unreachable, match=crew.place.reason):
            async with crew.at_work():
                pytest.fail(f"it started with {connections} connections")
    crew.place.allow(crew.connects or None)
    async with crew.at_work():
        crew.place.allow(None)
        await crew.ask("work")
        await eventually_async(lambda: crew.done("work"))


@contextlib.asynccontextmanager
async def outlives(crew: Crew) -> AsyncIterator[None]:
    try:
        async with crew.at_work():
            yield
    except PostroomError as error:
        raise AssertionError(f"the worker ended: {error}") from error


async def test_a_worker_outlives_a_server_that_comes_back_too_small(crew: Crew) -> None:
    async with outlives(crew):
        await crew.ask("before")
        await eventually_async(lambda: crew.done("before"))
        for connections in range(max(crew.connects, crew.opens)):
            crew.heard.clear()
            crew.place.allow(connections)
            crew.place.end_sessions()
            work = f"with {connections}"
            await crew.ask(work)

            async def refused_or_done(work: str = work, enough: int = connections) -> bool:
                refused = any(crew.place.reason in each for each in crew.heard)
                done = enough >= crew.connects and await crew.done(work)
                return refused or crew.ended or done

            await eventually_async(refused_or_done)
            crew.place.allow(None)
            if crew.ended:
                break
            await eventually_async(lambda work=work: crew.done(work))  # type: ignore[misc]
