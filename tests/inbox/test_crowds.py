"""A crowd of consumers is given the same messages: each is handled by one of them, and run once.

A small everyday size. With `POSTROOM_GUARANTEES=big` PostgreSQL has a million deliveries, of 31,250
ids to each of 32 consumers, and 10,000 ids for threads; the others have 1,000 ids.
"""

import contextlib
import os
import random
import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pymysql
from consuming import House, apply, note

from doors import mysql_options
from helpers import eventually_async
from postroom import Consumer, inbox
from stages import Stage

BIG = os.environ.get("POSTROOM_GUARANTEES") == "big"
CROWD = 32
ROUND = 500  # ids at a time, so that little lies in memory
CHUNK = 100 if BIG else 4


def ids_of(database: str, most: int) -> int:
    if not BIG:
        return 12
    return most if database == "postgresql" else 1_000


async def test_thirty_two_consumers_are_given_each_message(house: House) -> None:
    """As after rebalances that nobody noticed: each has a topic of its own with all of them."""
    count, runs = ids_of(house.stage.database, 31_250), Counter[int]()

    def make(topic: str) -> Consumer:
        consumer = house.consumer(topics=[topic], concurrency=1, chunk_rows=CHUNK)

        @consumer.on("note")
        async def handle(event: Any, tx: Any) -> None:
            runs[event["n"]] += 1
            await apply(tx, event)

        return consumer

    topics = [f"copy-{number}" for number in range(CROWD)]
    crowd = [make(topic) for topic in topics]
    begun = time.perf_counter()
    async with contextlib.AsyncExitStack() as open_ones:
        for consumer in crowd:
            await open_ones.enter_async_context(consumer)
        for first in range(0, count, ROUND):
            batch = [note(None, n) for n in range(first, min(first + ROUND, count))]
            for topic in topics:
                random.shuffle(batch)  # so that transactions of two overlap in part
                await house.send(*(message._replace(topic=topic) for message in batch))
            await eventually_async(lambda: house.broker.unacknowledged("billing") == 0, 300)
    seconds = time.perf_counter() - begun
    handled = [consumer.tally.handled for consumer in crowd]
    print(
        f"{house.stage.database}: {count} ids, {count * CROWD} deliveries to {CROWD} consumers in "
        f"{seconds:.0f} s; {sum(each > 0 for each in handled)} of them handled any"
    )
    assert runs == dict.fromkeys(range(count), 1)
    assert sorted(number for _, number in house.effects()) == list(range(count))
    assert sum(handled) == count
    assert sum(consumer.tally.duplicates for consumer in crowd) == count * (CROWD - 1)


def connect(stage: Stage) -> Any:
    if stage.database == "postgresql":
        return psycopg.connect(stage.url)
    if stage.database == "mariadb":
        options = mysql_options(stage.url)
        return pymysql.connect(database=options.pop("db"), **options)
    return sqlite3.connect(stage.url.removeprefix("sqlite:///"), timeout=60)


def test_thirty_two_threads_ask_once_for_each_message(house: House) -> None:
    """All of them at the same moment, message after message."""
    count, runs = ids_of(house.stage.database, 10_000), Counter[int]()
    together = threading.Barrier(CROWD, timeout=300)

    def consume(connection: Any) -> None:
        for number in range(count):
            together.wait()
            if inbox.once(connection, "billing", f"message-{number}"):
                runs[number] += 1
                connection.cursor().execute(f"INSERT INTO thing VALUES ('{number:06}')")
            connection.commit()

    def consume_all(_: int) -> None:
        with contextlib.closing(connect(house.stage)) as connection:
            try:
                consume(connection)
            except BaseException:
                together.abort()  # the others need not wait for it
                raise

    begun = time.perf_counter()
    with ThreadPoolExecutor(CROWD) as threads:
        list(threads.map(consume_all, range(CROWD)))
    seconds = time.perf_counter() - begun
    print(f"{house.stage.database}: {count} ids, {CROWD} threads each, in {seconds:.0f} s")
    assert runs == dict.fromkeys(range(count), 1)
    assert house.stage.things() == [f"{number:06}" for number in range(count)]
