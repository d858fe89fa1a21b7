"""txoutbox, configured for throughput.

Strict order is its `strict_ordering` storage: a claim takes an advisory lock and holds a message
back while an earlier one of its key cannot be claimed. Its README names batch size and concurrency
as what bounds the rate, and both are far above its defaults. `publish_timeout` stays on, as the
README asks, and `lease` is longer than the worst round, as it demands.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import stage
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage

CONFIG = RelayConfig(batch_size=1000, concurrency=200, lease=timedelta(seconds=60))
CHANNEL = "outbox"


async def _storage(options: argparse.Namespace, *, wake: bool = False) -> PostgresStorage:
    pool = await asyncpg.create_pool(options.database, min_size=4, max_size=20)
    return PostgresStorage(
        pool,
        strict_ordering=options.strict,
        delete_on_ack=not options.keep,
        notify_channel=CHANNEL if wake else None,
    )


def _publisher(js: Any, acks: stage.Acks | None) -> Callable[[OutboxMessage], Awaitable[None]]:
    async def publish(message: OutboxMessage) -> None:
        if js is not None:
            await js.publish(
                stage.SUBJECT,
                message.payload,
                headers={"Nats-Msg-Id": str(message.id), "key": message.key or ""},
            )
        if acks is not None:
            acks.note(message.payload)

    return publish


async def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Make the table, and fill it by SQL: publishing is not what is measured here."""
    storage = await _storage(options, wake=options.wake)
    await storage.create_schema()
    await storage.pool.execute(
        "INSERT INTO outbox (topic, key, payload)"
        f" SELECT '{stage.SUBJECT}', {stage.key_sql(options.skew)}, {stage.PAYLOAD_SQL}"
        f" FROM generate_series(0, {options.messages - 1}) AS n"
    )
    await storage.pool.execute("VACUUM ANALYZE outbox")
    await storage.pool.close()
    return {}


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    client, js = await stage.jetstream(options.nats) if options.nats else (None, None)
    found: dict[str, Any] = {"messages": 0}
    with stage.measured(found):
        storage = await _storage(options)
        relay = Relay(storage, _publisher(js, None), config=CONFIG)
        while (done := await relay.run_once()).claimed:
            found["messages"] += done.published
    await storage.pool.close()
    if client is not None:
        await client.close()
    return found


async def relay(options: argparse.Namespace) -> dict[str, Any]:
    client, js = await stage.jetstream(options.nats)
    storage, acks = await _storage(options, wake=True), stage.Acks()
    async with Relay(storage, _publisher(js, acks), config=CONFIG) as running:
        listener = await storage.listen(running.wake)
        await stage.until_told({"ready": True})
        await listener.close()
    await client.close()
    return {"acks": acks.at}


def _write(storage: PostgresStorage, begin: stage.Begin) -> stage.Write:
    async def write(numbers: range) -> int:
        async with begin(numbers.start) as (transaction, connection, _):
            for number in numbers:  # it has no call for several
                await storage.insert(
                    connection,
                    stage.SUBJECT,
                    stage.payload_of(number),
                    key=f"k{number % stage.KEYS}",
                )
        return transaction

    return write


async def write(options: argparse.Namespace) -> dict[str, Any]:
    storage = await _storage(options, wake=True)
    async with stage.transactions(options) as begin:
        return await stage.write_steadily(options, _write(storage, begin))


async def writers(options: argparse.Namespace) -> dict[str, Any]:
    storage = await _storage(options, wake=options.wake)
    async with stage.transactions(options) as begin:
        return await stage.write_hard(options, _write(storage, begin))


if __name__ == "__main__":
    stage.main(prepare=prepare, drain=drain, relay=relay, write=write, writers=writers)
