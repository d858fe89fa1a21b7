"""How soon a message is found by its id among those that were delivered."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from typing import Any

import asyncpg

from bench.figures import Figures, at_most, median
from bench.room import OURS, Room

ROWS = (10_000_000, 20_000)
PART = 500_000
LOOKS = 30
MOST_MILLIS = 100.0
# One id in a hundred was chosen by its publisher; the others are UUIDv7, as `publish` makes them.
FILL = """
INSERT INTO postroom.archive (day, id, lane, position, topic, key, type, content_type, payload,
       size, redrives, attempts, created_at, delivered_at)
SELECT CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date),
       CASE WHEN n % 100 = 0 THEN CAST(md5(CAST(n AS text)) AS uuid)
            ELSE CAST(lpad(to_hex(1760000000000 + n / 8), 12, '0')
                      || '7' || substr(md5(CAST(n AS text)), 1, 19) AS uuid) END,
       n % 16, n, 'bench.orders', 'k' || n % 1000, 'bench.v1', 'application/json',
       decode(repeat('78', 500), 'hex'), 500, 0, 1, clock_timestamp(), clock_timestamp()
  FROM generate_series(CAST($1 AS bigint), CAST($2 AS bigint)) AS n
"""


def archive(room: Room) -> Figures:
    """Look-ups by id in one day of the archive, on a server that was just vacuumed."""
    rows = room.size(*ROWS)
    figures = Figures(f"Finding a message by its id among {rows:,} delivered in one day")
    with room.database() as url:
        room.tick("install")
        room.run(OURS, "prepare", database=url, messages=0)
        found = asyncio.run(_measure(room, url, rows))
    figures.numbers |= found
    for what, millis in found.items():
        half, most = median(millis), max(millis)
        figures.add(f"{what}, median of {len(millis)}", f"{half:.1f} ms")
        figures.add(
            f"{what}, longest", f"{most:.1f} ms", most / MOST_MILLIS, to="100 ms", bar=at_most(1.0)
        )
    return figures


async def _measure(room: Room, url: str, rows: int) -> dict[str, list[float]]:
    connection = await asyncpg.connect(url)
    for first in range(1, rows + 1, PART):
        room.tick(f"fill, {first:,}")
        last = min(first + PART - 1, rows)
        await connection.execute(FILL, first, last, timeout=600)
    room.tick("vacuum")
    await connection.execute("VACUUM ANALYZE postroom.archive", timeout=600)
    dice = random.Random(1)
    numbers = [dice.randrange(1, rows + 1) for _ in range(LOOKS)]
    ours = [await _id_at(connection, n - (n % 100 == 0)) for n in numbers]
    chosen = [await _id_at(connection, n - n % 100 + 100) for n in numbers if n < rows - 100]
    missing = [uuid.UUID(int=dice.getrandbits(128)) for _ in range(LOOKS)]
    room.tick("look")
    found = {
        "an id of ours": [await _look(connection, id, 1) for id in ours],
        "an id that its publisher chose": [await _look(connection, id, 1) for id in chosen],
        "an id that is not there": [await _look(connection, id, 0) for id in missing],
    }
    await connection.close()
    return found


async def _id_at(connection: Any, position: int) -> Any:
    return await connection.fetchval(
        "SELECT id FROM postroom.archive WHERE position = $1", position
    )


async def _look(connection: Any, id: Any, expected: int) -> float:
    begun = time.perf_counter()
    rows = await connection.fetch("SELECT position FROM postroom.archive WHERE id = $1", id)
    assert len(rows) == expected, (id, rows)
    return (time.perf_counter() - begun) * 1000
