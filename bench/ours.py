"""Postroom with the same verbs as the programs of its peers, and the limits it is measured against.

Run by its own process, so that CPU and memory are those of a relay and of nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import nats.js  # noqa: F401 (with all else that is imported before anything is measured)
import stage

from postroom.brokers.base import DELIVERED, Broker, Capabilities, Outcome, open_broker
from postroom.config import RelaySettings
from postroom.databases import migrate
from postroom.databases.database import Database
from postroom.messages import LANES, Draft, Message, lane_of, wire_headers
from postroom.outbox.publish import Outbox
from postroom.outbox.relay import Relay, dedicate_process
from postroom.outbox.store import Ask, Store
from postroom.outbox.together import PARTS

KEEP_SECONDS = 7 * 86_400

FILL = """
INSERT INTO postroom.outbox (lane, id, topic, key, type, content_type, payload, size)
SELECT CASE WHEN m.key = 'hot' THEN CAST($1 AS int)
            ELSE (CAST($2 AS int[]))[n % {keys} + 1] END,
       {id}, '{topic}', m.key, 'bench.v1', 'application/json', {payload}, {size}
  FROM generate_series(0, {last}) AS n
 CROSS JOIN LATERAL (SELECT {key} AS key) m
"""
# UUIDv7 as `publish` makes them: ids rise with time, a few in each millisecond.
ID = """CAST(overlay(overlay(md5(random()::text)
    PLACING lpad(to_hex(1760000000000 + n / 8), 12, '0') FROM 1 FOR 12)
    PLACING '7' FROM 13 FOR 1) AS uuid)"""
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
    """Says yes to everything at once, and stops the relay after so many messages."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.left = 0
        self.enough: Callable[[], None] = lambda: None

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.left -= len(batch)
        if self.left <= 0:
            self.enough()
        return [DELIVERED] * len(batch)

    async def ping(self) -> None: ...

    async def close(self) -> None: ...


class NotingBroker:
    """Notes when the broker said yes to each message."""

    def __init__(self, inner: Broker, acks: stage.Acks) -> None:
        self._inner, self._acks = inner, acks
        self.capabilities = inner.capabilities

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        outcomes = await self._inner.send(batch, epoch=epoch)
        for message in batch:
            self._acks.note(message.payload)
        return outcomes

    async def ping(self) -> None:
        await self._inner.ping()

    async def close(self) -> None:
        await self._inner.close()


class TimedStore(Store):
    """Notes how long each read took, and how many messages it brought."""

    reads: list[tuple[int, float]]

    async def read(self, link: Any, asks: Sequence[Ask], **limits: int) -> dict[int, list[Message]]:
        begun = time.perf_counter()
        found = await super().read(link, asks, **limits)
        self.reads.append((sum(map(len, found.values())), time.perf_counter() - begun))
        return found


async def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Install, and fill by SQL: publishing is not what is measured here."""
    await migrate.install(options.database)
    connection = await asyncpg.connect(options.database)
    await _fill(connection, options.messages, options.skew)
    await connection.close()
    return {}


async def _fill(connection: Any, messages: int, skew: bool) -> None:
    lanes = [lane_of(stage.SUBJECT, f"k{n}", "") for n in range(stage.KEYS)]
    # In parts, so that a large one needs no long transaction.
    await connection.execute("TRUNCATE postroom.outbox")
    await connection.execute(
        FILL.format(
            keys=stage.KEYS,
            id=ID,
            topic=stage.SUBJECT,
            payload=stage.PAYLOAD_SQL,
            size=stage.PAYLOAD_BYTES,
            last=messages - 1,
            key=stage.key_sql(skew),
        ),
        lane_of(stage.SUBJECT, "hot", ""),
        lanes,
    )
    await connection.execute("VACUUM ANALYZE postroom.outbox")
    await connection.execute("CHECKPOINT")


async def limit(options: argparse.Namespace) -> dict[str, Any]:
    """What the database can do with this design: sixteen lanes read and deleted, and no relay."""
    found: dict[str, Any] = {"messages": 0}
    lanes, after = list(range(LANES)), [0] * LANES
    with stage.measured(found):
        connection = await asyncpg.connect(options.database)
        while rows := await connection.fetch(READ, lanes, after):
            for row in rows:
                after[row["lane"]] = row["position"]
            await connection.execute(
                DELETE, [row["lane"] for row in rows], [row["position"] for row in rows]
            )
            found["messages"] += len(rows)
    await connection.close()
    return found


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    """Let a relay do it; stops after `messages`, with what was read till then."""
    yes = YesBroker()
    yes.left = options.messages
    target = options.nats or options.broker
    url = target or "yes://"
    found: dict[str, Any] = {}
    TimedStore.reads = []
    _use(TimedStore)
    dedicate_process()
    relay = Relay(
        options.database,
        url,
        brokers=None if target else {url: yes},
        keep_delivered_seconds=KEEP_SECONDS if options.keep else 0,
        rebind=True,
    )
    yes.enough = relay.stop
    with stage.measured(found):
        found["messages"] = (await relay.drain_once()).delivered
        await relay.close()
    return found | {"peak_bytes": _peak_bytes(), "reads": TimedStore.reads}


async def read(options: argparse.Namespace) -> dict[str, Any]:
    """Read batch after batch as a relay does, from the beginning again at the end."""
    settings = RelaySettings()
    store = TimedStore("postgresql", "reader", archive=False)
    TimedStore.reads = []
    link = await Database(options.database).connect()
    after, left = dict.fromkeys(range(LANES), 0), options.messages
    while left > 0:
        found = await store.read(
            link,
            [Ask(lane, position, False) for lane, position in after.items()],
            rows=settings.batch_rows,
            total_rows=settings.in_flight_rows // PARTS,
            bytes=settings.batch_bytes,
        )
        for lane, messages in found.items():
            after[lane] = messages[-1].position if messages else after[lane]
            left -= len(messages)
        if not any(found.values()):
            after = dict.fromkeys(range(LANES), 0)
    await link.close()
    return {"reads": TimedStore.reads}


async def share(options: argparse.Namespace) -> dict[str, Any]:
    """Work beside other relays until nothing is left: each takes its share of the lanes."""
    found: dict[str, Any] = {"begun": time.time()}
    look = await asyncpg.connect(options.database)
    dedicate_process()
    running = Relay(options.database, options.nats, keep_delivered_seconds=0, rebind=True)
    with stage.measured(found):
        async with running:
            await _emptied(look)
            found["ended"] = time.time()
    await look.close()
    return found | {"messages": running.tally.delivered}


async def _emptied(look: Any) -> None:
    while await look.fetchval("SELECT EXISTS (SELECT FROM postroom.outbox)"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def _use(store: type[Store]) -> None:
    from postroom.outbox import office

    office.Store = store  # type: ignore[misc]


def _peak_bytes() -> int:
    """The most memory this process ever held. (getrusage would count what started it, too.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


async def relay(options: argparse.Namespace) -> dict[str, Any]:
    acks = stage.Acks()
    dedicate_process()
    noting = NotingBroker(open_broker(options.nats), acks)
    running = Relay(
        options.database,
        options.nats,
        brokers={options.nats: noting},
        keep_delivered_seconds=0,
        rebind=True,
    )
    async with running:
        await asyncio.sleep(1)
        await stage.until_told({"ready": True})
    return {"acks": acks.at}


def _write(options: argparse.Namespace, begin: stage.Begin) -> stage.Write:
    outbox = Outbox(notify=options.database if options.wake else None)

    async def write(numbers: range) -> int:
        drafts = [
            Draft(
                payload=stage.payload_of(number),
                type="bench.v1",
                topic=stage.SUBJECT,
                key=f"k{number % stage.KEYS}",
            )
            for number in numbers
        ]
        async with begin(numbers.start) as (transaction, connection, session):
            if session is not None:
                outbox.publish_many(session, drafts)
            else:
                published = await outbox.publish_many_async(connection, drafts)
        if session is None:
            outbox.committed(*published)
        return transaction

    return write


async def write(options: argparse.Namespace) -> dict[str, Any]:
    async with stage.transactions(options) as begin:
        return await stage.write_steadily(options, _write(options, begin))


async def writers(options: argparse.Namespace) -> dict[str, Any]:
    async with stage.transactions(options) as begin:
        return await stage.write_hard(options, _write(options, begin))


async def client(options: argparse.Namespace) -> dict[str, Any]:
    """What nats-py does by itself, one message at a time, with all our headers."""
    found: dict[str, Any] = {"messages": options.messages}
    connection, js = await stage.jetstream(options.nats)
    begun = time.time()
    with stage.measured(found):
        for number in range(options.messages):
            message = _example(number)
            headers = wire_headers(message, source="bench")
            headers["Nats-Msg-Id"] = f"client-{begun}-{number}"
            await js.publish(stage.SUBJECT, message.payload, headers=headers)
    await connection.close()
    return found


def _example(number: int) -> Message:
    payload = stage.payload_of(number)
    return Message(
        0, number, "0198a1a1-0000-7000-8000-000000000000", stage.SUBJECT, "hot", "bench.v1",
        None, None, "application/json", None, payload, len(payload), 0, 0, 0, 0, 0, None,
    )  # fmt: skip


if __name__ == "__main__":
    stage.main(
        prepare=prepare,
        limit=limit,
        drain=drain,
        read=read,
        share=share,
        relay=relay,
        write=write,
        writers=writers,
        client=client,
    )
