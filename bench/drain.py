"""How fast a relay drains the outbox, as a ratio to what the database alone can do in the same run.

    make bench            # or: python bench/drain.py --messages 50000

A private PostgreSQL with fsync on, 500-byte payloads, 1,000 keys, strict order, a receiver that
says yes at once. The limit is the same design without a relay: sixteen lanes read and deleted by
asyncpg. Absolute figures move with the machine; the ratios are what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import asyncpg
from rich.console import Console
from rich.progress import track
from rich.table import Table

from postroom.brokers.base import DELIVERED, Capabilities, Outcome
from postroom.databases import migrate
from postroom.messages import LANES, Draft, Message
from postroom.outbox.publish import Outbox
from postroom.outbox.relay import Relay

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from servers import PostgresServer

READ = """
SELECT o.* FROM unnest($1::int[], $2::bigint[]) AS w(lane, after)
 CROSS JOIN LATERAL (SELECT * FROM postroom.outbox o
                      WHERE o.lane = w.lane AND o.position > w.after
                      ORDER BY o.position LIMIT 1000) o
 LIMIT 4000
"""
DELETE = """
DELETE FROM postroom.outbox o USING unnest($1::int[], $2::bigint[]) AS w(lane, position)
 WHERE o.lane = w.lane AND o.position = w.position
"""


class YesBroker:
    """Says yes to everything at once."""

    capabilities = Capabilities()

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        return [DELIVERED] * len(batch)

    async def ping(self) -> None: ...

    async def close(self) -> None: ...


async def fill(url: str, count: int) -> float:
    """Publish the messages, a thousand a transaction; returns messages a second."""
    outbox, text = Outbox(), "x" * 480
    connection = await asyncpg.connect(url)
    begun = time.perf_counter()
    for start in range(0, count, 1000):
        async with connection.transaction():
            await outbox.publish_many_async(
                connection,
                [
                    Draft(payload={"n": n, "t": text}, type="bench.v1", key=f"k{n % 1000}")
                    for n in range(start, min(start + 1000, count))
                ],
            )
    seconds = time.perf_counter() - begun
    await connection.execute("VACUUM ANALYZE postroom.outbox")
    await connection.close()
    return count / seconds


async def limit(url: str, count: int) -> float:
    """Read and delete all of it, with nothing in between."""
    connection = await asyncpg.connect(url)
    lanes, after = list(range(LANES)), [0] * LANES
    begun = time.perf_counter()
    while rows := await connection.fetch(READ, lanes, after):
        for row in rows:
            after[row["lane"]] = row["position"]
        await connection.execute(
            DELETE, [row["lane"] for row in rows], [row["position"] for row in rows]
        )
    seconds = time.perf_counter() - begun
    await connection.close()
    return count / seconds


async def drain(url: str, count: int, keep_seconds: int) -> float:
    """Let a relay do it."""
    relay = Relay(
        url, "yes://", brokers={"yes://": YesBroker()}, keep_delivered_seconds=keep_seconds
    )
    begun = time.perf_counter()
    done = await relay.drain_once()
    seconds = time.perf_counter() - begun
    assert done.delivered == count, done
    return count / seconds


async def main(count: int, rounds: int) -> None:
    rates: dict[str, list[float]] = {}
    with PostgresServer(fsync=True) as server:
        url = server.create_database("bench")
        await migrate.install(url)
        for _ in track(range(rounds), description="rounds"):
            for name, work in (
                ("database alone", lambda: limit(url, count)),
                ("relay", lambda: drain(url, count, 0)),
                ("relay, with archive", lambda: drain(url, count, 7 * 86_400)),
            ):
                rates.setdefault("publish, 1,000 a transaction", []).append(await fill(url, count))
                rates.setdefault(name, []).append(await work())
    best = sorted(rates["database alone"])[rounds // 2]
    table = Table(title=f"{count:,} messages of 500 bytes, median of {rounds}")
    for column in ("what", "messages a second", "of the limit"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, values in rates.items():
        rate = sorted(values)[len(values) // 2]
        table.add_row(name, f"{rate:,.0f}", f"{rate / best:.2f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.messages, arguments.rounds))
