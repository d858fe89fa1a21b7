"""pgqueuer, configured for throughput.

Its tuning guide asks for a larger `batch_size` where jobs are short, its autovacuum settings, and a
direct asyncpg connection for the queue manager. It has no order per key: the only strict order it
offers is `concurrency_limit=1`, one job at a time over all workers, so it is shown without order.
It logs every job in a table of its own, and that cannot be left out. It runs in its continuous
mode: in the mode named drain it waits for a whole batch before it fetches the next.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import stage
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

BATCH = 1000
FILL = 5000


async def prepare(options: argparse.Namespace) -> dict[str, Any]:
    connection = await asyncpg.connect(options.database)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    if not options.wake:
        await connection.execute("ALTER TABLE pgqueuer DISABLE TRIGGER USER")
    for start in range(0, options.messages, FILL):
        numbers = range(start, min(start + FILL, options.messages))
        payloads: list[bytes | None] = [stage.payload_of(number) for number in numbers]
        await queries.enqueue([stage.SUBJECT] * len(payloads), payloads, [0] * len(payloads))
    await connection.execute("VACUUM ANALYZE pgqueuer")
    await connection.close()
    return {}


async def _queue(
    options: argparse.Namespace, js: Any, done: Callable[[bytes], None]
) -> tuple[PgQueuer, asyncpg.Connection]:
    connection = await asyncpg.connect(options.database)
    queue = PgQueuer(AsyncpgDriver(connection))

    @queue.entrypoint(stage.SUBJECT)
    async def publish(job: Job) -> None:
        payload = job.payload or b""
        if js is not None:
            await js.publish(stage.SUBJECT, payload, headers={"Nats-Msg-Id": str(job.id)})
        done(payload)

    return queue, connection


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    client, js = await stage.jetstream(options.nats) if options.nats else (None, None)
    found: dict[str, Any] = {"messages": 0}

    def count(_: bytes) -> None:
        found["messages"] += 1
        if found["messages"] >= options.messages:
            queue.shutdown.set()

    with stage.measured(found):
        queue, connection = await _queue(options, js, count)
        await queue.qm.run(batch_size=BATCH, mode=QueueExecutionMode.continuous)
    await connection.close()
    if client is not None:
        await client.close()
    return found


async def relay(options: argparse.Namespace) -> dict[str, Any]:
    client, js = await stage.jetstream(options.nats)
    acks = stage.Acks()
    queue, connection = await _queue(options, js, acks.note)
    running = asyncio.create_task(
        queue.qm.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=1))
    )
    await asyncio.sleep(1)
    await stage.until_told({"ready": True})
    queue.shutdown.set()
    await running
    await connection.close()
    await client.close()
    return {"acks": acks.at}


def _write(begin: stage.Begin) -> stage.Write:
    async def write(numbers: range) -> int:
        async with begin(numbers.start) as (transaction, connection, _):
            queries = Queries(AsyncpgDriver(connection))
            payloads: list[bytes | None] = [stage.payload_of(number) for number in numbers]
            await queries.enqueue([stage.SUBJECT] * len(numbers), payloads, [0] * len(numbers))
        return transaction

    return write


async def write(options: argparse.Namespace) -> dict[str, Any]:
    async with stage.transactions(options) as begin:
        return await stage.write_steadily(options, _write(begin))


async def writers(options: argparse.Namespace) -> dict[str, Any]:
    async with stage.transactions(options) as begin:
        return await stage.write_hard(options, _write(begin))


if __name__ == "__main__":
    stage.main(prepare=prepare, drain=drain, relay=relay, write=write, writers=writers)
