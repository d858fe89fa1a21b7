"""What every measured program shares: its verbs, its clock, its messages, its way to NATS.

A program is run by the interpreter of its own environment, so this file needs nothing but the
standard library, and nats-py and asyncpg where they are asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

STREAM = "bench"
SUBJECT = "bench.orders"
KEYS = 1000
PAYLOAD_BYTES = 500
# The business row that a message is published beside; it tells which transaction it was.
BUSINESS = "INSERT INTO business (n) VALUES ($1) RETURNING CAST(pg_current_xact_id() AS text)"

Verb = Callable[[argparse.Namespace], Awaitable[dict[str, Any]]]
Begin = Callable[[int], AbstractAsyncContextManager[tuple[int, Any, Any]]]
# Writes the messages of these numbers in one transaction, and returns the transaction's number.
Write = Callable[[range], Awaitable[int]]


def main(**verbs: Verb) -> None:
    """Run the verb on the command line and print what it found as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=[name.replace("_", "-") for name in verbs])
    parser.add_argument("--database", default="")
    parser.add_argument("--nats", default="", help="no address: a receiver that says yes at once")
    parser.add_argument("--broker", default="", help="the address of a broker of any other kind")
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--skew", action="store_true", help="half of all messages on one key")
    parser.add_argument("--strict", action="store_true", help="order per key")
    parser.add_argument("--keep", action="store_true", help="keep what was delivered")
    parser.add_argument("--rate", type=float, default=200.0, help="messages a second")
    parser.add_argument("--each", type=int, default=1, help="messages in a transaction")
    parser.add_argument("--burst", type=int, default=0, help="transactions at once, at the start")
    parser.add_argument("--driver", action="store_true", help="asyncpg, not an AsyncSession")
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--wake", action="store_true", help="wake the relay after a commit")
    parser.add_argument("--kind", default="")
    options = parser.parse_args()
    found = asyncio.run(_run(verbs[options.verb.replace("-", "_")](options)))
    print(json.dumps(found), flush=True)


async def _run(verb: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await verb


@contextmanager
def measured(found: dict[str, Any]) -> Iterator[None]:
    """Add the seconds that pass, and the seconds of this process's CPU, to what was found."""
    begun, cpu = time.perf_counter(), _cpu_seconds()
    yield
    found["seconds"] = time.perf_counter() - begun
    found["cpu_seconds"] = _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def payload_of(number: int) -> bytes:
    """500 bytes of JSON that begin with the number of the message."""
    head = b'{"n":%d,"t":"' % number
    return head + b"x" * (PAYLOAD_BYTES - len(head) - 2) + b'"}'


# The same, as SQL over `n`.
PAYLOAD_SQL = f"""convert_to(
    rpad('{{"n":' || n || ',"t":"', {PAYLOAD_BYTES - 2}, 'x') || '"}}', 'UTF8')"""


def key_sql(skew: bool) -> str:
    """The key of message `n` as SQL."""
    spread = f"'k' || n % {KEYS}"
    return f"CASE WHEN n % 2 = 0 THEN 'hot' ELSE {spread} END" if skew else spread


def number_of(payload: bytes) -> int:
    """Which message this is."""
    return int(payload[5 : payload.index(b",")])


class Acks:
    """When the broker said yes to each message, by the clock on the wall."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def note(self, payload: bytes) -> None:
        self.at[number_of(payload)] = time.time()


async def until_told(ready: dict[str, Any]) -> None:
    """Say that the relay is ready, and go on until standard input ends."""
    print(json.dumps(ready), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def jetstream(url: str) -> tuple[Any, Any]:
    """A NATS client and its JetStream, with room for many answers on their way."""
    import nats

    client = await nats.connect(url)
    return client, client.jetstream()


@asynccontextmanager
async def transactions(options: argparse.Namespace) -> AsyncIterator[Begin]:
    """Yield a function that begins a transaction with a business row.

    It yields the number of the transaction, asyncpg's connection, and the session if there is one:
    all systems write through the same kind of transaction, on `--driver` asyncpg's own, else that
    of an AsyncSession.
    """
    if options.driver:
        import asyncpg

        async with asyncpg.create_pool(options.database, min_size=16, max_size=20) as pool:

            @asynccontextmanager
            async def on_driver(number: int) -> AsyncIterator[tuple[int, Any, Any]]:
                async with pool.acquire() as connection, connection.transaction():
                    transaction = await connection.fetchval(BUSINESS, number)
                    yield int(transaction), connection, None

            yield on_driver
        return
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    url = options.database.replace("postgresql://", "postgresql+asyncpg://")
    engine = create_async_engine(url, pool_size=20)
    business = text(BUSINESS.replace("$1", ":n"))

    @asynccontextmanager
    async def on_session(number: int) -> AsyncIterator[tuple[int, Any, Any]]:
        async with AsyncSession(engine) as session, session.begin():
            transaction = (await session.execute(business, {"n": number})).scalar_one()
            raw = await (await session.connection()).get_raw_connection()
            yield int(transaction), raw.driver_connection, session

    yield on_session
    await engine.dispose()


async def write_steadily(options: argparse.Namespace, write: Write) -> dict[str, Any]:
    """Write a burst and then messages at an even rate; returns when the server committed each."""
    import asyncpg

    each, first = options.each, options.burst * options.each
    numbers = [range(n, n + each) for n in range(0, first + options.messages, each)]
    tasks = [asyncio.create_task(write(some)) for some in numbers[: options.burst]]
    await asyncio.gather(*tasks)
    begun = time.perf_counter()
    for some in numbers[options.burst :]:
        delay = begun + (some.start - first) / options.rate - time.perf_counter()
        await asyncio.sleep(max(0.0, delay))
        tasks.append(asyncio.create_task(write(some)))
    written = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begun
    connection = await asyncpg.connect(options.database)
    rows = await connection.fetch(
        "SELECT CAST(extract(epoch FROM pg_xact_commit_timestamp(CAST(CAST(x AS text) AS xid)))"
        " AS float) FROM unnest(CAST($1 AS bigint[])) WITH ORDINALITY AS t(x, place)"
        " ORDER BY place",
        written,
    )
    await connection.close()
    commits = {str(n): row[0] for some, row in zip(numbers, rows, strict=True) for n in some}
    return {"commits": commits, "seconds": seconds}


async def write_hard(options: argparse.Namespace, write: Write) -> dict[str, Any]:
    """So many writers, each one transaction after the other, for so many seconds."""
    until = time.perf_counter() + options.seconds

    async def work(index: int) -> int:
        count = 0
        while time.perf_counter() < until:
            first = index * 1_000_000 + count
            await write(range(first, first + 1))
            count += 1
        return count

    found: dict[str, Any] = {}
    with measured(found):
        done = await asyncio.gather(*(work(index) for index in range(options.writers)))
    return found | {"transactions": sum(done)}
