"""What a relay to Kafka is made of without what makes it one: the limit of the machine it runs on.

asyncpg reads the lanes ahead, confluent-kafka sends the same bytes with the same headers, every
report is awaited, asyncpg deletes; each of the three works while the others wait. There are no
leases, no fences, no journal, no retries, and no order once something fails: any failure ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import asyncpg
import stage

from postroom.messages import LANES, wire_time

READ = """
SELECT o.* FROM unnest($1::int[], $2::bigint[]) AS w(lane, after)
 CROSS JOIN LATERAL (SELECT lane, position, CAST(id AS text), topic, key, type, content_type,
                            CAST(date_part('epoch', created_at) * 1000000 AS bigint), payload
                       FROM postroom.outbox o
                      WHERE o.lane = w.lane AND o.position > w.after
                      ORDER BY o.position LIMIT 250) o
"""
DELETE = """
DELETE FROM postroom.outbox o USING unnest($1::int[], $2::bigint[]) AS w(lane, position)
 WHERE o.lane = w.lane AND o.position = w.position
"""
READ_AHEAD, UNDER_WAY = 2, 2  # reads that wait to be sent, and sends that wait to be deleted
YIELD_ROWS = 250
POLL_SECONDS = 0.001


class Part:
    """What one read brought, and how many of its reports are still awaited."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows
        self.left = len(rows)
        self.done = asyncio.get_running_loop().create_future()

    def report(self, error: Any, _: Any) -> None:
        assert error is None, error
        self.left -= 1
        if not self.left:
            self.done.set_result(None)


class Stamp:
    """The headers that a relay sends with a message that has none of its own."""

    def __init__(self) -> None:
        self._second, self._time = -1, b""

    def headers(self, row: Any) -> list[tuple[str, bytes]]:
        lane, position, name, _, key, type, content_type, created_us, _ = row
        id, kind = name.encode(), type.encode()
        second, rest = divmod(created_us, 1_000_000)
        if second != self._second:
            self._second = second
            self._time = wire_time(1_000_000 * second).removesuffix("+00:00").encode()
        return [
            ("ce_specversion", b"1.0"),
            ("ce_type", kind),
            ("ce_source", b"postroom"),
            ("content-type", content_type.encode()),
            ("event_type", kind),
            ("postroom-epoch", b"1"),
            ("ce_id", id),
            ("event_id", id),
            ("ce_time", b"%b.%06d+00:00" % (self._time, rest)),
            ("postroom-position", b"%d:%d" % (lane, position)),
            ("ce_partitionkey", key.encode()),
        ]


async def kafka(options: argparse.Namespace) -> dict[str, Any]:
    """Read ahead, send, await all reports, delete, all at once."""
    from confluent_kafka import Producer

    settings = {
        "bootstrap.servers": options.broker.removeprefix("kafka://"),
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
    }
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as a relay's own process has it
    found: dict[str, Any] = {}
    with stage.measured(found):
        producer = Producer(settings)
        reader = await asyncpg.connect(options.database)
        deleter = await asyncpg.connect(options.database)
        read: asyncio.Queue[Part | None] = asyncio.Queue(READ_AHEAD)
        sent: asyncio.Queue[Part | None] = asyncio.Queue(UNDER_WAY)
        polling = asyncio.create_task(_poll(producer))
        *_, deleted = await asyncio.gather(
            _read(reader, read), _send(producer, read, sent), _delete(deleter, sent)
        )
        polling.cancel()
    await reader.close()
    await deleter.close()
    return found | {"messages": deleted}


async def _read(connection: Any, read: asyncio.Queue[Part | None]) -> None:
    after = dict.fromkeys(range(LANES), 0)
    statement = await connection.prepare(READ)
    while rows := await statement.fetch(list(after), list(after.values())):
        after |= {row[0]: row[1] for row in rows}
        await read.put(Part(rows))
    await read.put(None)


async def _send(
    producer: Any, read: asyncio.Queue[Part | None], sent: asyncio.Queue[Part | None]
) -> None:
    headers = Stamp().headers
    while part := await read.get():
        for number, row in enumerate(part.rows, 1):
            producer.produce(row[3], row[8], row[4], -1, part.report, None, 0, headers(row))
            if not number % YIELD_ROWS:
                await asyncio.sleep(0)
        await sent.put(part)
    await sent.put(None)


async def _delete(connection: Any, sent: asyncio.Queue[Part | None]) -> int:
    count, statement = 0, await connection.prepare(DELETE)
    while part := await sent.get():
        await part.done
        rows = part.rows
        await statement.fetch([row[0] for row in rows], [row[1] for row in rows])
        count += len(rows)
    return count


async def _poll(producer: Any) -> None:
    while True:
        producer.poll(0)
        await asyncio.sleep(POLL_SECONDS)


if __name__ == "__main__":
    stage.main(kafka=kafka)
