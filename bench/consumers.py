"""Consumers of the same messages from NATS JetStream: by hand, and Postroom's with its inbox.

Each writes down that it has seen an id and inserts one row of its own for it, in one transaction.
By hand that is a transaction a message, with nats-py and the driver alone; ours shares one among
many where order allows. The table of ids is the same one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import stage
from sqlalchemy import event, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from postroom import signals
from postroom.brokers.base import DELIVERED, open_broker
from postroom.databases import migrate
from postroom.databases.urls import resolve
from postroom.inbox.consumer import Consumer
from postroom.messages import Message, lane_of, new_id

WORKERS = 4
FETCH = 500
NAME = "bench"
Apply = Callable[[str, int], Awaitable[None]]

TABLES = {
    "postgresql": "CREATE TABLE effect (place bigserial PRIMARY KEY, id text NOT NULL, n int)",
    "mysql": "CREATE TABLE effect (place BIGINT AUTO_INCREMENT PRIMARY KEY,"
    " id VARCHAR(99) NOT NULL, n INT)",
    "sqlite": "CREATE TABLE effect (place INTEGER PRIMARY KEY, id TEXT NOT NULL, n INTEGER)",
}
EFFECT = "INSERT INTO effect (id, n) VALUES ({}, {})"
SEEN = "INSERT {}INTO {}inbox (consumer, message_id) VALUES ('hand', {}) {}"


async def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Install, and fill the stream."""
    await migrate.install(options.database)
    connection = await _plain(options.database)
    await connection.run(TABLES[_dialect(options.database)])
    await connection.close()
    broker = open_broker(options.nats)
    messages = [_message(number) for number in range(options.messages)]
    assert (await broker.send(messages)).count(DELIVERED) == len(messages)
    await broker.close()
    return {}


def _message(number: int) -> Message:
    id, key, payload = new_id(), f"k{number % stage.KEYS}", stage.payload_of(number)
    return Message(
        lane_of(stage.SUBJECT, key, id), number, id, stage.SUBJECT, key, "bench.v1", None, None,
        "application/json", None, payload, len(payload), 0, time.time_ns() // 1000, 0, 0, 0, None,
    )  # fmt: skip


# ── by hand ────────────────────────────────────────────────────────────────────────────────────


async def hand(options: argparse.Namespace) -> dict[str, Any]:
    """One message after the other, each in a transaction of its own."""
    return await _by_hand(options, await _plain(options.database))


async def _by_hand(options: argparse.Namespace, connection: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"messages": options.messages}
    with stage.measured(found):
        client, js = await stage.jetstream(options.nats)
        subscription = await js.pull_subscribe(stage.SUBJECT, durable="hand")
        left = options.messages
        while left:
            for each in await subscription.fetch(min(FETCH, left), timeout=10):
                await _apply(connection, each)
                left -= 1
    await client.close()
    await connection.close()
    return found


async def hand_session(options: argparse.Namespace) -> dict[str, Any]:
    """The same with an AsyncSession for each message, as an application has one."""
    return await _by_hand(options, await _Sessions.open(options.database))


async def hands(options: argparse.Namespace) -> dict[str, Any]:
    """The same with several workers, each of which has its keys and its connection."""
    found: dict[str, Any] = {"messages": options.messages}
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(FETCH) for _ in range(WORKERS)]

    async def work(queue: asyncio.Queue[Any]) -> None:
        connection = await _plain(options.database)
        while (each := await queue.get()) is not None:
            await _apply(connection, each)
        await connection.close()

    with stage.measured(found):
        client, js = await stage.jetstream(options.nats)
        subscription = await js.pull_subscribe(stage.SUBJECT, durable="hand")
        tasks = [asyncio.create_task(work(queue)) for queue in queues]
        left = options.messages
        while left:
            for each in await subscription.fetch(min(FETCH, left), timeout=10):
                await queues[hash(each.headers["ce-partitionkey"]) % WORKERS].put(each)
                left -= 1
        for queue in queues:
            await queue.put(None)
        await asyncio.gather(*tasks)
    await client.close()
    return found


async def _apply(connection: Any, each: Any) -> None:
    await connection.apply(each.headers["ce-id"], json.loads(each.data)["n"])
    await each.ack()


class _Postgres:
    """asyncpg, alone."""

    seen = SEEN.format("", "postroom.", "$1", "ON CONFLICT DO NOTHING RETURNING 1")
    effect = EFFECT.format("$1", "$2")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.run = connection.execute
        self.close = connection.close

    async def apply(self, id: str, number: int) -> None:
        async with self._connection.transaction():
            if await self._connection.fetchval(self.seen, id):
                await self._connection.execute(self.effect, id, number)


class _Mysql:
    """asyncmy, alone."""

    seen = SEEN.format("IGNORE ", "postroom_", "%s", "")
    effect = EFFECT.format("%s", "%s")

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def run(self, statement: str) -> None:
        async with self._connection.cursor() as cursor:
            await cursor.execute(statement)

    async def apply(self, id: str, number: int) -> None:
        async with self._connection.cursor() as cursor:
            if await cursor.execute(self.seen, (id,)):
                await cursor.execute(self.effect, (id, number))
        await self._connection.commit()

    async def close(self) -> None:
        self._connection.close()


class _Sqlite:
    """The standard library's module, with commits that outlive a power cut."""

    seen = SEEN.format("OR IGNORE ", "postroom_", "?", "")
    effect = EFFECT.format("?", "?")

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous = FULL")

    async def run(self, statement: str) -> None:
        self._connection.execute(statement)

    async def apply(self, id: str, number: int) -> None:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        if execute(self.seen, (id,)).rowcount:
            execute(self.effect, (id, number))
        execute("COMMIT")

    async def close(self) -> None:
        self._connection.close()


class _Sessions:
    """SQLAlchemy's AsyncSession, one for each message."""

    effect = text(EFFECT.format(":id", ":n"))

    def __init__(self, engine: AsyncEngine, seen: str) -> None:
        self._engine = engine
        self._seen = text(seen)
        self.close = engine.dispose

    @classmethod
    async def open(cls, url: str) -> _Sessions:
        before, prefix, after = {
            "postgresql": ("", "postroom.", "ON CONFLICT DO NOTHING"),
            "mysql": ("IGNORE ", "postroom_", ""),
            "sqlite": ("OR IGNORE ", "postroom_", ""),
        }[_dialect(url)]
        engine = create_async_engine(resolve(url).url)
        if _dialect(url) == "sqlite":
            event.listen(engine.sync_engine, "connect", _outlive_power_cuts)
        async with engine.connect():  # the first one looks around
            return cls(engine, SEEN.format(before, prefix, ":id", after))

    async def apply(self, id: str, number: int) -> None:
        async with AsyncSession(self._engine) as session:
            done: Any = await session.execute(self._seen, {"id": id})
            if done.rowcount:
                await session.execute(self.effect, {"id": id, "n": number})
            await session.commit()


def _outlive_power_cuts(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


async def _plain(url: str) -> Any:
    """A connection of the driver's own."""
    dialect, place = _dialect(url), make_url(url)
    if dialect == "postgresql":
        return _Postgres(await asyncpg.connect(url))
    if dialect == "sqlite":
        return _Sqlite(place.database or "")
    import asyncmy

    return _Mysql(
        await asyncmy.connect(
            host=place.host,
            port=place.port,
            user=place.username,
            password=place.password,
            database=place.database,
        )
    )


def _dialect(url: str) -> str:
    return url.partition(":")[0]


# ── ours ───────────────────────────────────────────────────────────────────────────────────────


async def session(options: argparse.Namespace) -> dict[str, Any]:
    """Handlers that are given an AsyncSession."""
    consumer = Consumer(NAME, options.database, options.nats, topics=[stage.SUBJECT])
    insert = text(EFFECT.format(":id", ":n"))

    @consumer.on("bench.v1")
    async def handle(event: Any, tx: Any, received: Any) -> None:
        await tx.execute(insert, {"id": received.id, "n": event["n"]})

    return await _until(consumer, options)


async def driver(options: argparse.Namespace) -> dict[str, Any]:
    """Handlers that are given the driver's own connection; sqlite3's is synchronous."""
    consumer = Consumer(
        NAME, options.database, options.nats, topics=[stage.SUBJECT], gives="driver"
    )

    async def with_asyncpg(event: Any, tx: Any, received: Any) -> None:
        await tx.execute(_Postgres.effect, received.id, event["n"])

    async def with_asyncmy(event: Any, tx: Any, received: Any) -> None:
        async with tx.cursor() as cursor:
            await cursor.execute(_Mysql.effect, (received.id, event["n"]))

    def with_sqlite3(event: Any, tx: Any, received: Any) -> None:
        tx.execute(_Sqlite.effect, (received.id, event["n"]))

    handlers = {"postgresql": with_asyncpg, "mysql": with_asyncmy, "sqlite": with_sqlite3}
    consumer.on("bench.v1")(handlers[_dialect(options.database)])
    return await _until(consumer, options)


async def _until(consumer: Consumer, options: argparse.Namespace) -> dict[str, Any]:
    """Run it from its start to the commit of the last message."""
    found: dict[str, Any] = {"messages": 0}
    enough = asyncio.Event()

    def hear(_: str, fields: dict[str, Any]) -> None:
        found["messages"] += fields["count"]
        if found["messages"] >= options.messages:
            enough.set()

    unlisten = signals.listen(hear, only=["delivery.handled"])
    with stage.measured(found):
        running = asyncio.create_task(consumer.run())
        waiting = asyncio.create_task(enough.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    consumer.stop()
    await running
    unlisten()
    return found


if __name__ == "__main__":
    stage.main(
        prepare=prepare,
        hand=hand,
        hand_session=hand_session,
        hands=hands,
        session=session,
        driver=driver,
    )
