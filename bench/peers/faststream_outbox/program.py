"""faststream-outbox, configured for throughput.

Its performance guide names three levers: `terminal_flush_batch_size`, more `max_workers` with a
larger `fetch_batch_size`, and its autovacuum statement; all three are used. Strict order is, in its
own words, a single subscriber with a single worker, so it comes in two rows.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import stage
from faststream.nats import NatsBroker
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import create_async_engine

BATCH = 500
FLUSH = 100
WORKERS = 8


def _broker(options: argparse.Namespace) -> OutboxBroker:
    url = options.database.replace("postgresql://", "postgresql+asyncpg://")
    engine = create_async_engine(url, pool_size=20, max_overflow=10)
    return OutboxBroker(engine, outbox_table=make_outbox_table(MetaData()), logger=None)


async def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Make the table, and fill it by SQL: publishing is not what is measured here."""
    metadata = MetaData()
    make_outbox_table(metadata)
    url = options.database.replace("postgresql://", "postgresql+asyncpg://")
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(text(outbox_autovacuum_ddl("outbox")))
    await engine.dispose()
    plain = await asyncpg.connect(options.database)
    await plain.execute(
        "INSERT INTO outbox (queue, payload, headers)"
        f" SELECT '{stage.SUBJECT}', {stage.PAYLOAD_SQL},"
        """ '{"content-type": "application/octet-stream"}'"""
        f" FROM generate_series(0, {options.messages - 1}) AS n"
    )
    await plain.execute("VACUUM ANALYZE outbox")
    await plain.close()
    return {}


async def _start(
    options: argparse.Namespace, done: Callable[[bytes], None]
) -> tuple[OutboxBroker, NatsBroker | None]:
    broker, target = _broker(options), None
    how: dict[str, Any] = {
        "max_workers": 1 if options.strict else WORKERS,
        "fetch_batch_size": BATCH,
        "min_fetch_interval": 0.01,
        "terminal_flush_batch_size": FLUSH,
    }
    if options.nats:
        target = NatsBroker(options.nats, logger=None)
        publisher = target.publisher(stage.SUBJECT, stream=stage.STREAM)

        @broker.subscriber(stage.SUBJECT, **how)
        async def relay(body: bytes) -> None:
            await publisher.publish(body, headers={"content-type": "application/octet-stream"})
            done(body)

        await target.connect()
    else:

        @broker.subscriber(stage.SUBJECT, **how)
        async def accept(body: bytes) -> None:
            done(body)

    await broker.start()
    return broker, target


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"messages": 0}
    finished = asyncio.Event()

    def count(_: bytes) -> None:
        found["messages"] += 1
        if found["messages"] >= options.messages:
            finished.set()

    with stage.measured(found):
        broker, target = await _start(options, count)
        await finished.wait()
        await broker.stop()  # settles what it has buffered
    if target is not None:
        await target.stop()
    return found


async def relay(options: argparse.Namespace) -> dict[str, Any]:
    acks = stage.Acks()
    broker, target = await _start(options, acks.note)
    await asyncio.sleep(1)
    await stage.until_told({"ready": True})
    await broker.stop()
    if target is not None:
        await target.stop()
    return {"acks": acks.at}


def _write(broker: OutboxBroker, begin: stage.Begin) -> stage.Write:
    async def write(numbers: range) -> int:
        async with begin(numbers.start) as (transaction, _, session):
            for number in numbers:
                await broker.publish(
                    stage.payload_of(number),
                    queue=stage.SUBJECT,
                    session=session,
                    headers={"content-type": "application/octet-stream"},
                )
        return transaction

    return write


async def write(options: argparse.Namespace) -> dict[str, Any]:
    broker = _broker(options)
    await broker.connect()
    options.driver = False  # it publishes on an AsyncSession alone
    async with stage.transactions(options) as begin:
        return await stage.write_steadily(options, _write(broker, begin))


async def writers(options: argparse.Namespace) -> dict[str, Any]:
    """It has no setting without NOTIFY, so there is nothing to compare with here."""
    broker = _broker(options)
    await broker.connect()
    options.driver = False
    async with stage.transactions(options) as begin:
        return await stage.write_hard(options, _write(broker, begin))


if __name__ == "__main__":
    stage.main(prepare=prepare, drain=drain, relay=relay, write=write, writers=writers)
